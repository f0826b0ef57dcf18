"""Why the kernel does not start a program, for people. Standard library only."""

import errno
import os
import shutil
from contextlib import suppress

SCRIPT = b"#!"
HEAD = 256
"""Bytes of the first line that the kernel reads."""


def why_not_started(word: str, error: OSError) -> str:
    """What is wrong with the program of a command, and the fix.

    Args:
        word: the first word of the command, as `execvp` took it.
        error: what `execvp` raised.
    """
    path = word if "/" in word else shutil.which(word) or _on_path(word)
    if path is None or not os.path.lexists(path):
        return f"program not found: {word!r}; check the first word after `--`, or give its full path"
    return f"cannot run {word!r}: {_why_not_run(path, word, error)}"


def _why_not_run(path: str, word: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    if not os.path.exists(path):
        return f"it is a link to {os.path.realpath(path)!r}, which is not there; correct the link"
    if os.path.isdir(path):
        return "it is a folder; name a program in it"
    if not os.access(path, os.X_OK):
        return f"{reason}; make it executable (chmod +x)"
    interpreter = _interpreter(path)
    if error.errno == errno.EACCES and _is_noexec(path):
        start = f"`-- {interpreter or 'bash'} {word}`"
        return f"its file system is mounted noexec; start it by its interpreter, as in {start}"
    return _of_script(word, interpreter, reason) if interpreter else _of_binary(error.errno, reason)


def _of_script(word: str, interpreter: str, reason: str) -> str:
    if interpreter.endswith("\r"):
        return f"its lines end as on Windows (CR LF); save it with Unix line ends: sed -i 's/\\r$//' {word}"
    if not os.path.exists(interpreter):
        return f"its first line names {interpreter!r}, which is not there; correct that line"
    return f"{reason}; its first line names {interpreter!r}: see that it can be run"


def _of_binary(number: int | None, reason: str) -> str:
    if number == errno.ENOEXEC:
        return "it is no program, and its first line names none; write one there, such as #!/bin/bash"
    if number == errno.ENOENT:
        return "it is there, and the loader that it names is not: it was built for another system"
    return f"{reason}; check the file"


def _on_path(word: str) -> str | None:
    """A file of this name in PATH that cannot be run."""
    places = (os.path.join(folder, word) for folder in os.get_exec_path())
    return next((place for place in places if os.path.isfile(place)), None)


def _interpreter(path: str) -> str | None:
    """What the first line of a script names; None for another file."""
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(HEAD)
        if head.startswith(SCRIPT):
            line = head[len(SCRIPT) :].split(b"\n")[0].strip(b" \t")
            return os.fsdecode(line.split(b" ")[0].split(b"\t")[0])
    return None


def _is_noexec(path: str) -> bool:
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    return False
