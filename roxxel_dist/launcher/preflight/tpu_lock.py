"""The lock that libtpu takes on the TPU chips of a machine: who has it.

libtpu opens this file for writing and takes a POSIX lock on it (lockf) for the life of its process. The file stays. It
is stale where its process hangs on, or where another user has made it: then nobody else can open it.
"""

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

LOCK = Path("/tmp/libtpu_lockfile")
FLOCK = "hhqqi4x"
"""struct flock of Linux with 64 bits: type, whence, start, length, pid."""


def tpu_lock(path: Path) -> dict[str, Any] | None:
    """The lock at a path: `path`, the `holder` (words; None: nobody), and `why` it cannot be opened; None: no file.

    Nothing is locked here, not for a moment.
    """
    if not os.path.lexists(path):
        return None
    told = {"path": str(path), "holder": None, "why": None}
    try:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )  # as libtpu: in /tmp the kernel looks at that
    except OSError as error:
        reason = "it is another user's" if error.errno in (errno.EACCES, errno.EPERM) else str(error.strerror)
        return told | {"why": reason}
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    finally:
        os.close(file)
    return told if kind == fcntl.F_UNLCK else told | {"holder": _who(pid)}


def _who(pid: int) -> str:
    """A process for people; one of another container has no number here."""
    if pid <= 0:
        return "a process of another container"
    with suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}"
