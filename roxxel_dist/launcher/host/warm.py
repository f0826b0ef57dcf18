"""A spare: a worker that imports the same modules as its rank, and waits for the order to become the rank.

It may leave no trace that the program of the rank could see: no thread, no signal handler, no variable. It imports
in slices, most of the time asleep. A lower priority would do less: it applies only within a session if the kernel
groups sessions (autogroup), and without privileges a process cannot go back from nice 19 or SCHED_IDLE. Decision 25.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path

from roxxel_dist.launcher.host.probe import versions
from roxxel_dist.launcher.host.sources import recorder
from roxxel_dist.process.exit_codes import AT_ONCE, SPARE_ENV
from roxxel_dist.process.progress import agent_pipe

NAME = "roxxel-spare"
"""What `ps` calls it while it waits."""
SLICE_S, PAUSE_S = 0.01, 0.04
"""CPU time between two pauses, and a pause: a spare that imports takes a fifth of a core."""
FIRST_VICTIM = "1000"
"""The kernel's score of a process to be killed first where memory is short."""


def become_rank(modules: Sequence[str]) -> None:
    """Import modules, and wait; returns as the rank, with its variables.

    Ends the process where its agent does, and where the rank would run other code than a process that starts now.
    """
    given = os.environ.pop(SPARE_ENV)
    orders = int(given.removesuffix(AT_ONCE))
    pipe = agent_pipe()
    recorder().install()
    before = versions()
    with _shown_as_spare():
        with nullcontext() if given.endswith(AT_ONCE) else _in_slices():
            for module in modules:
                import_module(module)
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        pipe.send({"spare": "ready", "size": size})
        order = b""
        while not order.endswith(b"\n"):
            piece = os.read(orders, 1 << 16)
            if not piece:
                os._exit(0)
            order += piece
    os.close(orders)
    installed = [name for name, version in versions().items() if before.get(name) != version]
    if changed := recorder().changed() or ", ".join(installed):
        pipe.send({"spare": "stale", "changed": changed})
        os._exit(0)
    os.environ.clear()
    os.environ.update(json.loads(order)["env"])
    if not pipe.send({"spare": "taken"}):
        os._exit(1)
    sys.stdout.flush()


@contextmanager
def _shown_as_spare() -> Iterator[None]:
    """Within it `ps` shows this process as no rank, and the kernel ends it first where memory is short."""
    values = {Path("/proc/self/comm"): NAME, Path("/proc/self/oom_score_adj"): FIRST_VICTIM}
    before = {path: path.read_text(encoding="ascii").strip() for path in values}
    for path, value in values.items():
        with suppress(OSError):
            path.write_text(value, encoding="ascii")
    yield
    for path, value in before.items():
        with suppress(OSError):
            path.write_text(value, encoding="ascii")


@contextmanager
def _in_slices() -> Iterator[None]:
    """Within it this process sleeps after each slice of CPU time."""
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(PAUSE_S))
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, SLICE_S, SLICE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
