"""What a second request to stop means: people repeat themselves to kill, systems send two signals for one request.

systemd sends SIGTERM and SIGHUP together, a wrapper hands on the SIGINT of the terminal, GNU timeout sends SIGTERM to
its program and to its group, and batch systems send a warning, then SIGTERM, or (LSF) SIGINT, SIGTERM and SIGKILL ten
seconds apart. Standard library only.
"""

import os
import signal
from collections.abc import Mapping, Sequence

from roxxel_dist.process.exit_codes import SCHEDULER_SIGNALS

PAIR_S = 3.0
"""Signals of one request come within so many seconds, also from a busy machine."""
FORWARD_S = 0.15
"""A wrapper hands a SIGINT on sooner than a person presses Ctrl-C again."""
BATCH_JOB = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "SGE_O_HOST", "FLUX_JOB_ID", "COBALT_JOBID", "OAR_JOB_ID")
"""Variables of a job of a batch system, which sends its signals one after the other until its SIGKILL."""
AGAIN = "Ctrl-C again kills them"
"""The words for a person who has asked for a stop."""


def in_batch_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a batch system started this process."""
    return any(environ.get(name) for name in BATCH_JOB)


def kills(number: int, earlier: Sequence[tuple[int, float]], now: float, *, batch_job: bool = False) -> bool:
    """Whether a signal asks to kill what saves; otherwise it is a request to stop, or says nothing new.

    Args:
        number: the signal.
        earlier: the requests before it: (signal, when, in seconds of any clock that only grows).
        now: by the same clock.
        batch_job: a batch system sends signals here: of others than people's only a SIGKILL ends the save.
    """
    if number == signal.SIGQUIT:
        return True
    by_people = [when for before, when in earlier if before == signal.SIGINT]
    if number == signal.SIGINT and by_people:
        return now - by_people[0] >= FORWARD_S
    if batch_job or number not in (signal.SIGINT, signal.SIGTERM):  # a terminal that closes says nothing new
        return False
    by_systems = [when for before, when in earlier if before not in SCHEDULER_SIGNALS]  # which are warnings
    return bool(by_systems) and now - by_systems[0] >= PAIR_S
