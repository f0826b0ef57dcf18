"""A trial inside a Ray worker: runs the trial's generator, hears Ray's cancel at once, and dies with the driver."""

import math
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

from roxxel_dist.launcher.jobs.record import Process, is_alive, this_process
from roxxel_dist.sweep.verdict import disk_full

Item = dict[str, Any]
END_S = 20.0
"""How long a trial has that was told to end; then it is killed."""


def name_of(run: Callable[[Item], Iterator[Item]]) -> str:
    """A function of a module as `module:name`. Raises ValueError for one that a worker could not import."""
    name = getattr(run, "__qualname__", "<")
    if "<" in name or run.__module__ == "__main__":
        raise ValueError(f"{run.__module__}.{name}: a trial must be a function of a module that workers can import")
    return f"{run.__module__}:{name}"


def driver() -> dict[str, Any]:
    """The process that calls, as its workers know it."""
    return {
        "process": asdict(this_process()),
        "namespace": _namespace(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def body(run: str, task: Item, driver: Mapping[str, Any]) -> Iterator[Item]:
    """Run a trial. Yields what `run` yields.

    Besides, {"start"} gets the address of this node, an error of `run` becomes a {"fail"}, and {"broken": {"reason"}}
    tells that no trial can run here.

    Args:
        run: a generator function, as `module:name`.
        task: what it is called with.
        driver: whom to die with, where that can be seen from here, and whose OMP_NUM_THREADS to have: Ray sets its own.
    """
    os.environ.pop("OMP_NUM_THREADS", None)
    if driver["threads"] is not None:
        os.environ["OMP_NUM_THREADS"] = driver["threads"]
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGINT}
    )  # Ray blocks it, and what the trial starts inherits that
    signal.signal(signal.SIGURG, _noted)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_watch, args=(reads, driver, over), daemon=True).start()
    try:
        yield from _told(run, task)
    finally:
        over.set()


def _told(run: str, task: Item) -> Iterator[Item]:
    try:
        function = resolve_name(run)
    except (ImportError, AttributeError) as error:
        yield {
            "broken": {"reason": f"{_node()} cannot import {run} ({error}): install the same packages there as here"}
        }
        return
    if task.get("ray_address"):  # `auto` may mean another cluster, to a process that the trial starts here
        import ray

        task = task | {"ray_address": ray.get_runtime_context().gcs_address}
    try:
        for item in function(task):
            if "start" in item:
                yield {"start": {**item["start"], "node": _node()}}
            else:
                yield item
    except Exception as error:
        if full := disk_full(str(error)):
            yield {"broken": {"reason": f"{_node()}: {full}"}}
            return
        reason = f"{type(error).__name__}: {error}"
        kind = "oom" if isinstance(error, MemoryError) else "error"
        _keep(traceback.format_exc(), task.get("log"))
        yield {"fail": {"kind": kind, "reason": reason, "log": task.get("log")}}


def _keep(text: str, log: str | None) -> None:
    """Add a traceback to the trial's log."""
    if log is not None:
        with suppress(OSError):  # the reason is told all the same
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(text)


def _node() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _namespace() -> str:
    """Which numbers of processes are seen here."""
    return os.readlink("/proc/self/ns/pid")


def _watch(wakes: int, driver: Mapping[str, Any], over: threading.Event) -> None:
    """Die when the driver has died, pass on Ray's cancel, and die where that does not end the trial.

    Ray ends the workers of a driver that was killed after 2 to 7 s; until then the next driver would find them at work.
    Its cancel only marks that Python shall raise KeyboardInterrupt; a real signal, to the main thread, makes a system
    call return that it waits in. A cancel by force that follows another one does nothing (Ray 2.60).
    """
    poll = select.poll()
    poll.register(wakes, select.POLLIN)
    process = Process(**driver["process"])
    pidfd = _pidfd(process) if (process.boot, driver["namespace"]) == (this_process().boot, _namespace()) else None
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    end = math.inf
    while True:
        left = end - time.monotonic()
        ready = [fd for fd, _ in poll.poll(None if left == math.inf else max(left, 0.0) * 1000)]
        if pidfd in ready or (time.monotonic() >= end and not over.is_set()):
            os.kill(os.getpid(), signal.SIGKILL)
        if wakes in ready and signal.SIGINT in os.read(wakes, 64):
            end = min(end, time.monotonic() + END_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        if over.is_set():
            end = math.inf


def _pidfd(process: Process) -> int:
    """A descriptor that is ready when the driver has died."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        pidfd = None
    if pidfd is None or not is_alive(process):  # asked after: the number cannot be another process's now
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit
    return pidfd


def _noted(number: int, frame: FrameType | None) -> None:
    """Only the return from a system call was wanted."""
