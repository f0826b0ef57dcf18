"""Trials as Ray tasks: submitted, observed, cancelled, and ended; and what a task does inside its worker.

A task runs the generator of its trial, receives Ray's cancel at once, and dies with the driver.
"""

import math
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from roxxel_dist.launcher.backends.ray.cluster import amounts, capacities
from roxxel_dist.launcher.control.record import Process, is_alive, this_process
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.process_stat import AwakeClock
from roxxel_dist.sweep.trial.outcome import disk_full

Item = dict[str, Any]
END_S = 20.0
"""Seconds that a trial has to end when asked; then it is killed."""
GIVE_UP_S = END_S + 10.0
"""Seconds after which it should have ended, or its worker should have killed it."""
GET_S = 0.5
"""Seconds to wait for a value before signals are checked; then the wait continues."""
ASK_S, LOST_S = 2.0, 30.0
"""Seconds between questions to the cluster whether it is there, and those without an answer after which it is lost."""
LOOK_S = 1.0
"""Seconds between looks of a worker at the clock while a trial ends."""
CancelReason = Literal["stop", "pause", "drain", "ended"]


def function_name(run: Callable[[Item], Iterator[Item]]) -> str:
    """A function of a module as `module:name`. Raises ValueError for one that a worker could not import."""
    name = getattr(run, "__qualname__", "<")
    if "<" in name or run.__module__ == "__main__":
        raise UserError(f"{run.__module__}.{name}: a trial must be a function of a module that workers can import")
    return f"{run.__module__}:{name}"


def body(run: str, task: Item, driver: Mapping[str, Any]) -> Iterator[Item]:
    """Run a trial: the generator function `run`, as `module:name`. Yields what it yields.

    Besides, {"start"} gets the address of this node, an error becomes a {"fail"}, and {"fatal": {"reason"}} means that
    no trial can run here. This process dies with the driver, where that can be seen from here.
    """
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets its own
    if driver["threads"] is not None:
        os.environ["OMP_NUM_THREADS"] = driver["threads"]
    signal.signal(signal.SIGURG, lambda *_: None)  # only the return from a system call is wanted
    wakes, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_watch, args=(wakes, driver, over), daemon=True).start()
    try:
        yield from _events(run, task)
    finally:
        over.set()


def _events(run: str, task: Item) -> Iterator[Item]:
    import ray

    node = ray.util.get_node_ip_address()
    try:
        function = resolve_name(run)
    except (ImportError, AttributeError) as error:
        reason = f"{node} cannot import {run} ({error}): install the same packages there as here"
        yield {"fatal": {"reason": reason}}
        return
    if task.get("ray_address"):  # `auto` may mean another cluster, to a process that the trial starts here
        task = task | {"ray_address": ray.get_runtime_context().gcs_address}
    try:
        for item in function(task):
            yield {"start": {**item["start"], "node": node}} if "start" in item else item
    except Exception as error:
        if full := disk_full(str(error)):
            yield {"fatal": {"reason": f"{node}: {full}"}}
            return
        if log := task.get("log"):
            with suppress(OSError):  # the reason is reported all the same
                Path(log).parent.mkdir(parents=True, exist_ok=True)
                with Path(log).open("a", encoding="utf-8") as file:
                    file.write(traceback.format_exc())
        kind = "oom" if isinstance(error, MemoryError) else "error"
        yield {"fail": {"kind": kind, "reason": f"{type(error).__name__}: {error}", "log": log}}


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
    end, clock = math.inf, AwakeClock()  # a program that was stopped with this process gets its time to save
    while True:
        left = end - clock.now()
        ready = [fd for fd, _ in poll.poll(None if left == math.inf else min(max(left, 0.0), LOOK_S) * 1000)]
        if pidfd in ready or (clock.now() >= end and not over.is_set()):
            os.kill(os.getpid(), signal.SIGKILL)
        if wakes in ready and signal.SIGINT in os.read(wakes, 64):
            end = min(end, clock.now() + END_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        if over.is_set():
            end = math.inf


def _pidfd(process: Process) -> int:
    """A descriptor that is ready when the driver has died; where it has died already, so does this process."""
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(process.pid)
        if is_alive(process):  # asked after: the number cannot be another process's now
            return pidfd
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit


def _namespace() -> str:
    """Which numbers of processes are seen here."""
    return os.readlink("/proc/self/ns/pid")


@dataclass(kw_only=True, eq=False)
class Attempt:
    """One attempt at a trial."""

    trial: int
    attempt: int
    losses: int
    """Attempts that were lost before this one, since the driver started."""
    stream: Any
    since: float = field(default_factory=time.monotonic)
    """The time when it was submitted or, from `has_begun` on, when it began."""
    has_begun: bool = False
    cancel_reason: CancelReason | None = None
    """The decision about it: stopped early, paused, to be run again by the next start, or already reported as ended."""
    end: float = math.inf
    """The time when its process must be gone, by the executor's clock."""
    cancelled: bool = False
    announced: bool = False
    """Whether it was said that it waits for room."""
    value: Any = None
    """The reference of a value that has not come yet."""


class RayExecutor:
    """Trials as streaming Ray tasks, one process each, that Ray never runs again on its own."""

    def __init__(self, ray: Any, run: Callable[[Item], Iterator[Item]], resources: Mapping[str, float]) -> None:
        self._ray = ray
        self._run = function_name(run)
        threads = os.environ.get("OMP_NUM_THREADS")
        self._driver = {"process": asdict(this_process()), "namespace": _namespace(), "threads": threads}
        self._resources = resources
        with _refusals(resources):
            self._body = ray.remote(max_calls=1, max_retries=0, num_returns="streaming", **_options(resources))(body)
        self.running: list[Attempt] = []
        self._free: Mapping[str, float] = {}
        # What is waited for counts only while this process runs: it may be stopped, and so may all that it waits for.
        self._clock = AwakeClock()
        self._answers, self._seen, self._answered, self._died = 0, 0, 0.0, False
        self._closed = threading.Event()
        # In a thread of its own: with a cluster that is gone the call lasts ten minutes, and no signal is received.
        self._asks = threading.Thread(target=self._ask, name="ray-health", daemon=True)

    def __enter__(self) -> "RayExecutor":
        self._asks.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._asks.join(0.0 if self.is_lost else ASK_S)

    def _ask(self) -> None:
        """Ask the cluster what is free, again and again."""
        while not self._closed.wait(ASK_S):
            with suppress(Exception):  # whatever Ray raises, it is no answer
                self._free, self._answers = self._ray.available_resources(), self._answers + 1

    @property
    def is_lost(self) -> bool:
        """Whether the cluster has not answered for too long, or this machine's part of it has died."""
        now = self._clock.now()
        if self._seen != self._answers:
            self._seen, self._answered = self._answers, now
        return self._died or now - self._answered >= LOST_S

    def submit(self, trial: int, attempt: int, losses: int, task: Item) -> None:
        """Start an attempt; it waits in Ray for room. Raises UserError where Ray refuses its resources."""
        with _refusals(self._resources):
            stream = self._body.options(name=f"trial-{trial}").remote(self._run, task, self._driver)
        self.running.append(Attempt(trial=trial, attempt=attempt, losses=losses, stream=stream))

    def wait(self, seconds: float) -> list[tuple[Attempt, Item]]:
        """The events of the trials, as soon as one has any, or none after so long.

        Besides what the body yields: {"lost": {"reason"}}, {"fatal": {"reason"}}, and {"exited": {}} for a task that
        has ended, the last of it.
        """
        handles = [attempt.stream if attempt.value is None else attempt.value for attempt in self.running]
        ready = {id(handle) for handle in self._ray.wait(handles, num_returns=1, timeout=seconds)[0]}
        answered = [attempt for attempt, handle in zip(self.running, handles, strict=True) if id(handle) in ready]
        return [(attempt, item) for attempt in answered for item in self._read(attempt)]

    def _read(self, attempt: Attempt) -> list[Item]:
        from ray import exceptions

        try:
            attempt.value = next(attempt.stream) if attempt.value is None else attempt.value
            item = self._ray.get(attempt.value, timeout=GET_S)
            attempt.value = None
        except exceptions.GetTimeoutError:
            return []  # its node may be gone: it is waited for again, between looks at signals and cluster
        except exceptions.LocalRayletDiedError:
            self._died = True  # nothing more can be run from here, and no trial is to blame
            return []
        except (StopIteration, exceptions.TaskCancelledError):
            return [{"exited": {}}]
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            why = f"a Ray worker cannot run a trial ({str(error).strip().splitlines()[-1]})"
            return [{"fatal": {"reason": f"{why}: is roxxel-dist installed on its node?"}}, {"exited": {}}]
        except exceptions.RayError as error:
            why = " ".join(str(error).split()).partition(". ")[0]
            return [{"lost": {"reason": f"{type(error).__name__}: {why}"}}, {"exited": {}}]
        return [item]

    def cancel(self, attempt: Attempt, reason: CancelReason) -> None:
        """Tell an attempt to end: its body sees KeyboardInterrupt, and is killed where that does not help."""
        attempt.cancel_reason, attempt.end, attempt.cancelled = reason, self._clock.now() + GIVE_UP_S, True
        self._ray.cancel(attempt.stream)

    def await_exit(self, attempt: Attempt) -> None:
        """An attempt has sent its last event: it ends by itself."""
        attempt.cancel_reason, attempt.end = "ended", self._clock.now() + END_S

    def expire(self) -> list[Attempt]:
        """Attempts that did not end although they were cancelled; cancels those that did not end by themselves."""
        now = self._clock.now()
        late = [attempt for attempt in self.running if now >= attempt.end]
        lost = [attempt for attempt in late if attempt.cancelled]
        for attempt in late:
            if not attempt.cancelled:
                self.cancel(attempt, "ended")
        return lost

    def waiting_message(self, seconds: float) -> str | None:
        """The message about trials that found no room for so long; names each trial once."""
        before = time.monotonic() - seconds
        silent = [attempt for attempt in self.running if not (attempt.has_begun or attempt.cancel_reason)]
        new = [attempt for attempt in silent if not attempt.announced and attempt.since < before]
        if not new:
            return None
        for attempt in new:
            attempt.announced = True
        needed, free = self._resources, self._free
        return (
            f"trial {', '.join(str(attempt.trial) for attempt in new)} waits for room in Ray: needed "
            f"{amounts(needed, needed)} on one node; free now, together: {amounts(free, needed)}"
        )


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Resources by name as `ray.remote` takes them."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    named = {own[name]: amount for name, amount in resources.items() if name in own}
    return named | {"resources": {name: amount for name, amount in resources.items() if name not in own}}


@contextmanager
def _refusals(resources: Mapping[str, float]) -> Iterator[None]:
    """Raises UserError for what Ray says of amounts that it cannot give: each version has rules of its own."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        why = " ".join("".join(map(str, error.args)).split())  # Ray gives some of its texts in pieces
        raise UserError(
            f"resources: Ray refuses {amounts(resources, resources)} for a trial ({why}): "
            "change `resources` of --extras, --cpus_per_trial or --gpus_per_trial"
        ) from error


def check_room(nodes: Sequence[Mapping[str, Any]], resources: Mapping[str, float]) -> None:
    """Check that a node could run a trial. Raises ValueError where none ever could, with what there is."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in resources.items()) for node in alive):
        raise UserError(
            f"a trial needs {amounts(resources, resources)} on one node (`resources`, --gpus_per_trial), and no node "
            f"has that: {capacities(nodes, resources)}. Ask for less, or start larger nodes"
        )
