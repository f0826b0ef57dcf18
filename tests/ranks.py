"""A rank that does nothing but steps, and dies at the first attempt where a file says so."""

RANK = """
import os, sys, time
from roxxel_dist.cluster.progress import Progress
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
