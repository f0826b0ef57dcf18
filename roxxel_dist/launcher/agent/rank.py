"""A rank as its agent has it: the tree of its processes, its output, and its messages."""

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roxxel_dist.launcher.host.process_tree import ProcessTree, die_with_parent
from roxxel_dist.launcher.job.placement import worker_argv
from roxxel_dist.launcher.output.logs import LineSplitter
from roxxel_dist.process import progress
from roxxel_dist.process.exit_codes import EXIT_NOT_STARTED, EXIT_USAGE, PIPE_ENV

OF_THE_USER = (errno.E2BIG, errno.ENOENT, errno.ENOEXEC)
START_FIXES = {
    errno.E2BIG: "its variables and words are too large: shorten them (--env, --env-from)",
    errno.ENOENT: "the interpreter is not there: check the installation on this host",
    errno.EAGAIN: "this host allows no more processes: raise its limit (ulimit -u, pids.max), or start fewer ranks",
    errno.ENOMEM: "this host has no memory left",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
}
"""Why a rank could not be started, by errno, and what helps."""


def why_not_started(error: OSError) -> tuple[int, str]:
    """The exit code of a rank that cannot be started, and why it cannot."""
    text = error.strerror or str(error)
    if fix := START_FIXES.get(error.errno or 0):
        text += f": {fix}"
    return EXIT_USAGE if error.errno in OF_THE_USER else EXIT_NOT_STARTED, text


@dataclass(frozen=True)
class RankCommand:
    """The program of a rank, and its variables."""

    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(eq=False, kw_only=True)
class Rank:
    """One process of the job and all that it started (its tree)."""

    number: int
    tree: ProcessTree
    output: int
    pipe: int  # its messages beside its output: `progress.AgentPipe`
    lines: LineSplitter = field(default_factory=LineSplitter)
    messages: LineSplitter = field(default_factory=LineSplitter)
    code: int | None = None  # negative: a signal
    killed_by_us: bool = False  # killed by this agent, and not on its way out before
    reported: progress.Record = field(default_factory=progress.Record)  # what the controller knows
    first: progress.Record | None = None  # as it was when its first step was seen
    exited: bool = False  # its process; the exit code follows a moment later
    instead: RankCommand | None = None  # for a spare that has not confirmed yet: the program to start if it ends
    taken_by: float = 0.0  # when it must have confirmed


def _begin() -> None:
    """End with the keeper; and ignore SIGHUP, which says that a terminal is gone, and a rank has none.

    systemd sends it right behind SIGTERM, to each process of a session, and would kill what saves.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent()


def start_rank(
    number: int, program: RankCommand, folders: Sequence[str], kill_s: float, pass_fds: tuple[int, ...] = ()
) -> Rank:
    """Start a rank in its own session, with one pipe for its output, and one for its messages to the agent.

    `folders` are those of the agent and `kill_s` is the limit of the keeper, see `ProcessTree`; `pass_fds` are closed
    here.
    Raises OSError where it cannot be started.
    """
    reads, writes = os.pipe()
    pipe_read, pipe_write = os.pipe()
    for fd in (reads, pipe_read, pipe_write):
        os.set_blocking(fd, False)
    env = {**program.env, PIPE_ENV: f"{pipe_write}:{os.fstat(pipe_write).st_ino}"}

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            worker_argv(program.command),
            stdin=subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            env=env,
            pass_fds=(pipe_write, *pass_fds),
            start_new_session=True,
            preexec_fn=_begin,  # noqa: PLW1509 - system calls; its keeper has one thread
        )

    try:
        tree = ProcessTree(start, holds=(writes, pipe_write, *pass_fds), folders=folders, kill_s=kill_s)
    except BaseException:
        os.close(reads)
        os.close(pipe_read)
        raise
    finally:
        for fd in (writes, pipe_write, *pass_fds):
            os.close(fd)
    return Rank(number=number, tree=tree, output=reads, pipe=pipe_read)
