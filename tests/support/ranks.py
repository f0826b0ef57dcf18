"""Ranks for tests, what waits to be one, and what a user may have beside the program."""

from pathlib import Path

NAMESAKES = (
    *("queue", "select", "random", "types", "token", "copy", "signal", "tokenize"),
    *("agent", "worker", "rank", "warm", "actor", "cluster"),
)
"""Modules of the standard library, and of the launcher."""
RANK = """
import os, sys, time
from roxxel_dist.process.progress import Progress
rank = int(os.environ["ROXXEL_PROCESS_ID"])
progress = Progress.from_env(rank)
first = os.environ["ROXXEL_ATTEMPT"] == "0"
for step in range(1, 100000):
    progress.enter(step)
    time.sleep(0.05)
    progress.finish(step)
    if first and rank == 1 and os.path.exists("die"):
        os.kill(os.getpid(), 9)
"""
"""It does nothing but steps, and dies at the first attempt where a file says so."""


def is_waiting_spare(pid: int) -> bool:
    """Whether a process waits to be a rank, and has done its imports."""
    try:
        place = Path("/proc", str(pid))
        return (place / "comm").read_text() == "roxxel-spare\n" and "pipe_read" in (place / "wchan").read_text()
    except OSError:
        return False


def write_namesakes(folder: Path) -> None:
    """Files of a user that have the names of modules, and end whatever imports them."""
    for name in NAMESAKES:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')\n")
