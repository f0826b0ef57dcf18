"""One Python process that does one command or program after the other, as a process of each would.

Most of what a small `train` costs is the start of Python and the imports of jax; pages have dozens of them.
"""

import atexit
import gc
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

COMMANDS = {"audit", "batch", "check-layouts", "compare", "data", "eval", "export", "find-lr", "generate", "merge"}
COMMANDS |= {"plan", "report", "train", "verify"}
"""Of roxxel-dist, those that start no processes."""
BESIDE = {"cp", "ls", "mkdir", "mv"}
"""Programs that scripts call beside them, each in a process of its own."""
SHELL = re.compile(r"[$`|&;<>]")
"""What only a shell can do."""
GLOB = re.compile(r"[*?]")


def plain(text: str) -> list[list[str]] | None:
    """The words of each line of a script that only gives such commands and starts programs; None for others.

    What a process does that is there for others too has three words: those that a shell needs for the line alone are
    `bash -c LINE`.
    """
    try:
        lines = [(line, shlex.split(line, comments=True)) for line in text.replace("\\\n", " ").splitlines()]
    except ValueError:  # a quoted text of several lines
        return None
    lines = [(line, words) for line, words in lines if words]
    simple = (
        words[0] in ("python", *BESIDE) or (words[0] == "roxxel-dist" and words[1] in COMMANDS) for _, words in lines
    )
    if SHELL.search(text) or not all(simple):
        return None
    return [["bash", "-c", line] if words[0] in BESIDE or GLOB.search(line) else words for line, words in lines]


class OneProcess:
    """The process, with this environment; it ends with this one, or when the one that asks has gone."""

    def __init__(self, env: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], env=env, text=True, **pipes)
        atexit.register(self.end)

    def run(self, words: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
        """As `subprocess.run` with text, and both streams captured."""
        try:
            print(json.dumps({"words": words, "cwd": str(cwd)}), file=self.process.stdin, flush=True)
            return subprocess.CompletedProcess(words, **json.loads(self.process.stdout.readline()))
        except BaseException:  # the test took too long, or the process died: its answer would not be read
            self.end()
            raise

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def call(words: list[str]) -> int:
    """Do what the words say, and return the exit code."""
    from roxxel_dist.cli import main

    try:
        if words[0] == "roxxel-dist":
            return main(words[1:])
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    """Do what each line of stdin asks for; what it said and its code are a line of stdout."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    variables, path = dict(os.environ), list(sys.path[1:])
    for line in asked:
        given = json.loads(line)
        os.chdir(given["cwd"])
        sys.path[:] = [given["cwd"], *path]
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as warned:
            os.dup2(said.fileno(), 1)
            os.dup2(warned.fileno(), 2)
            answer = {"returncode": call(given["words"])}
            sys.stdout.flush()
            sys.stderr.flush()
            for name, stream in (("stdout", said), ("stderr", warned)):
                stream.seek(0)
                answer[name] = stream.read().decode()
        print(json.dumps(answer), file=answers, flush=True)
        # The next one finds what it would find at its own start: variables, and modules of its folder as they are then.
        os.environ.clear()
        os.environ.update(variables)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(given["cwd"]):
                del sys.modules[name]
        gc.collect()


if __name__ == "__main__":
    serve()
