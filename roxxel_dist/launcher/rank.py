"""What an agent knows of one of its ranks."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from roxxel_dist.cluster import progress
from roxxel_dist.launcher.logs import Lines


@dataclass(eq=False, kw_only=True)
class Rank:
    """One process of the job and all that it started (its session)."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    output: int
    lines: Lines = field(default_factory=Lines)
    code: int | None = None  # negative: a signal
    culled: bool = False  # killed by this agent, and not on its way out before
    swept: bool = False  # its session is dead; what the pipe still holds is all there will be
    settled: bool = False
    told: progress.Record = field(default_factory=progress.Record)  # what the controller knows


def start_rank(number: int, command: Sequence[str], env: Mapping[str, str], watch: Callable[[], None]) -> Rank:
    """Start a rank in a session of its own, with one pipe for all it says; in it `watch` is called first."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=writes,
        stderr=writes,
        env=env,
        start_new_session=True,
        preexec_fn=watch,  # noqa: PLW1509 - the agent has one thread; before exec, so that no rank is unguarded
    )
    os.close(writes)
    return Rank(number=number, process=process, pidfd=os.pidfd_open(process.pid), output=reads)


def exit_code(pid: int) -> int:
    """How a process ended, without reaping it; a signal is negative."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if end is None:
        raise RuntimeError(f"process {pid} was said to have ended and has not")
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
