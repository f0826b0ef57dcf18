"""What a launcher and its ranks have agreed on, and the errors that users can fix. Both sides import this first."""

import os
import signal
from contextlib import suppress

STACK_SIGNAL = signal.SIGRTMIN + 5
"""Asks a rank for the stacks of its threads. No SIGUSR1: programs catch that one for purposes of their own."""
SCHEDULER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals by which batch systems announce the end of a job where a user asks for them (`sbatch --signal=USR1@60`). They
are requests to save and leave, as SIGTERM is, unless the program has a handler of its own for them."""
STATUS_ENV = "ROXXEL_STATUS"
"""Set to 1 where a launcher keeps what a rank prints, and draws the progress bar."""
PIPE_ENV = "ROXXEL_PIPE"
"""DESCRIPTOR:INODE of the pipe by which a rank sends its agent what is no output; see `progress.agent_pipe`."""

SPARE_ENV = "ROXXEL_SPARE"
"""The descriptor from which a spare process reads which rank it becomes; no program finds it."""
AT_ONCE = "!"
"""Behind that descriptor: the spare imports without pauses, for no rank works on its host."""
MEMORY_ENV = "ROXXEL_MEMORY"
"""A folder in the memory of the host, for all ranks of the host and all attempts of the job; gone when the job ends.
At first it has the file `key` alone, with 64 hex digits that are the same on all hosts of the job."""
EXIT_TIMEOUT_ENV = "ROXXEL_EXIT_TIMEOUT"
"""Seconds that a rank whose program ended well waits for the others; 0: without a limit."""
EXIT_SLACK_S = 5.0
"""A rank waits so much longer than the launcher, which asks for stacks when --exit-timeout is over."""

REACHED_ENV = "ROXXEL_REACHED_STEP"
"""The largest step that earlier attempts of this launch have entered, for `train` alone: it writes its config before it
enters a step. A program of the user's may begin several runs, so the step may belong to another run."""

EXIT_FAILED = 1
EXIT_USAGE = 2
"""A mistake in the command or the config: never restarted."""
EXIT_DRAINED = 42
"""Stopped on request, a checkpoint is saved."""
EXIT_PREFLIGHT = 69
"""The hosts are not fit, and nothing was started."""
EXIT_NOT_STARTED = 70
"""The host could not start this rank: it has no memory or no process number left, or its files are away."""
EXIT_PORT = 71
"""Rank 0 found the coordinator's port taken, which preflight had found free: started again, with another one."""
EXIT_FILES = 74
"""A file that an earlier attempt of the job has used cannot be reached: a file system is away, so it is tried again."""
EXIT_GIVEN_UP = 75
"""Restarts were made, and came to nothing."""
EXIT_LOST_RANK = 76
"""jax's coordinator, or what it says of another rank, is lost to this rank: started again."""
EXIT_RUNTIME = 77
"""An exception of jax's or XLA's runtime in this rank, such as a reset connection or an accelerator's error: started
again."""
EXIT_HANG = 124
"""A rank stayed when it should not."""
EXIT_TIMEOUT_TEXT = "the program had ended, and other ranks had not after the time that --exit-timeout gives"
"""What a worker says when it leaves with `EXIT_HANG`."""
OK_CODES = (0, EXIT_DRAINED)
"""Codes that are no failure."""


class UserError(ValueError):
    """A mistake in the user's input: a command prints only the message and exits with `EXIT_USAGE`.

    The code that finds the mistake raises it, with the field or file, the value, the rule and the fix. No other
    ValueError is taken for one: a bug of this package, of a library or of the user's own code keeps its traceback.
    """

    exit_code: int = EXIT_USAGE

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback, in notebooks too: the same one line."""
        return [f"{type(self).__name__}: {self}"]


class FullDiskError(UserError):
    """A disk or a quota is full, or a file may not be so large: the same command is right when there is room."""

    exit_code: int = EXIT_FAILED


class MissingFileError(FileNotFoundError, UserError):
    """A file or folder that the user named is not there."""


class OutputError(OSError):
    """The standard output cannot be written, as on a full disk: no mistake in the command."""


class FileSystemError(RuntimeError):
    """Files cannot be reached, in a later attempt of a job, that its first attempt needed too."""

    exit_code: int = EXIT_FILES


class LostRankError(RuntimeError):
    """Another rank, or jax's coordinator in rank 0, has not answered jax for longer than its heartbeat allows."""


def attempt_number() -> int:
    """The number of starts of this process's job before this one; 0 where there is no launcher."""
    return int(os.environ.get("ROXXEL_ATTEMPT") or 0)


def pip_install(extra: str) -> str:
    """The command that adds the packages of an extra, such as "plot", to this installation.

    The package is in no registry yet, so the command names the folder that it was installed from; where that is not
    known or not there any more, it is one to run in a clone.
    """
    import json
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and seldom needed
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        source = json.loads(distribution("roxxel-dist").read_text("direct_url.json") or "")
        folder = Path(unquote(urlsplit(source["url"]).path))
        if (folder / "pyproject.toml").is_file():
            editable = "-e " if source["dir_info"].get("editable") else ""
            return f"pip install {editable}'{folder}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of the repository"
