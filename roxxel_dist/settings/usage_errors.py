"""Errors of a file system that are the user's mistake, and what cures them."""

import contextlib
import errno
from collections.abc import Iterator

from roxxel_dist.objects.errors import StoreError
from roxxel_dist.process.exit_codes import FileSystemError, FullDiskError, OutputError, UserError, attempt_number

CURES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file, and no folder: check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.EEXIST: "name another place",
    errno.ELOOP: "it is a link that leads back to itself: name the file itself",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose another place, or change the permissions",
    errno.EPERM: "choose another place, or change the permissions",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "files may not be so large here (ulimit -f): raise the limit, or choose another place",
}
"""Fixes for operating-system errors, by errno; other errors are not usage errors."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

AWAY = {
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV,
    errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN,
}  # fmt: skip
"""Errors of a file system that is unavailable, for files that existed before."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Let files that cannot be used within it be the user's mistake, as a `UserError` is; other errors pass unchanged.

    In a later attempt of a job, files that cannot be reached are no mistake, because earlier attempts could read them.
    Raises UserError: with a message for the user; FullDiskError where it is none of the user's mistakes.
    FileSystemError: in a later attempt, where a file system may be unavailable.
    """
    try:
        yield
    except (FileSystemError, FullDiskError, OutputError):
        raise
    except UserError as error:
        if attempt_number() and _is_away(error):
            raise _unavailable(error) from error
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise FullDiskError(str(error)) from error
        raise
    except OSError as error:
        if (message := _refusal(error)) is None:
            raise
        if attempt_number() and _is_away(error):
            raise _unavailable(message) from error
        raise (FullDiskError if error.errno in FULL else UserError)(message) from error


def _unavailable(problem: object) -> FileSystemError:
    return FileSystemError(f"{problem} (attempt {attempt_number()} of this job: perhaps a file system is away)")


def _refusal(error: OSError) -> str | None:
    """The message for an error that the user can fix; None for other errors, which need a traceback."""
    if isinstance(error, StoreError):
        return str(error)
    if error.errno is None:
        return None
    where = error.filename or "a file"
    if attempt_number() and error.filename and error.errno in AWAY:
        return f"{where}: {error.strerror}"
    return f"{where}: {error.strerror}: {CURES[error.errno]}" if error.errno in CURES else None


def _is_away(error: UserError | OSError) -> bool:
    """Whether an error, or its cause, means that a file system is unavailable."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError):
        return False
    return cause.errno in AWAY or (cause.errno is None and isinstance(cause, FileNotFoundError | PermissionError))
