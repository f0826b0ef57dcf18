"""A rank without jax: it says where it is by files in its working directory, and stays until `end` is there.

python launch_rank.py                 say "up" and stay
python launch_rank.py steps [RANK]    tell steps to the launcher; all stay in step 5, and RANK never comes out of it
"""

import faulthandler
import itertools
import os
import signal
import sys
import time
from pathlib import Path

STUCK_STEP = 5
RANK = next(os.environ[name] for name in ("ROXXEL_PROCESS_ID", "RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)


def say(what: str) -> None:
    """Leave this process's number and the time, which all hosts of the benchmark share, as `what.RANK`."""
    new = Path(f".{what}.{RANK}")
    new.write_text(f"{os.getpid()} {time.monotonic()}")
    new.rename(f"{what}.{RANK}")


def stay() -> None:
    while not Path("end").exists():
        time.sleep(0.05)


def steps(stuck: str | None) -> None:
    """A training whose ranks wait for each other after every step."""
    from roxxel_dist.process.progress import Progress

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    progress, size = Progress.from_env(int(RANK)), int(os.environ["ROXXEL_NUM_PROCESSES"])
    for step in itertools.count(1):
        progress.enter(step)
        if step == STUCK_STEP and stuck in (RANK, None):
            say("up")
            stay()
        elif step > STUCK_STEP:
            say("up")
        if step > 1:  # as a device that has a step in hand
            while not all(Path(f"step{step - 1}.{rank}").exists() for rank in range(size)):
                time.sleep(0.005)
        say(f"step{step}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["steps"]:
        steps(*(sys.argv[2:] or [None]))
    else:
        say("up")
        stay()
