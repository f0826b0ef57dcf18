"""A controller's own loop, with agents that are pretended: each is three pipes, and says what a test has it say."""

import fcntl
import gc
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import Any, cast

from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.recorder import JobRecorder
from roxxel_dist.launcher.host.protocol import encode
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.limits import Limits
from roxxel_dist.launcher.job.placement import placements
from roxxel_dist.launcher.job.signals import SignalPipe
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.output.console import Console
from roxxel_dist.launcher.output.logs import Logs
from roxxel_dist.launcher.policy.hang import HangDetector
from roxxel_dist.launcher.policy.outcome import AttemptResult
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.progress import Record

NEVER_S = 1e6
LINEAR = 1.5
"""The largest exponent of a linear cost: 1.15, and what caches do to CPU time. A pass over all for each has about 2."""


def exponent(cost: Callable[[int], float], small: int, large: int, times: int = 3) -> float:
    """By which power of a number a cost grows, from the least of some measurements of each."""
    few, many = (min(cost(number) for _ in range(times)) for number in (small, large))
    return log(many / few) / log(large / small)


def cpu_of(act: Callable[[], object]) -> float:
    """Seconds of CPU that this thread needs for something, without collections, which look at all that is there."""
    gc.disable()
    begun = time.thread_time()
    try:
        act()
        return time.thread_time() - begun
    finally:
        gc.enable()


class _Process:
    def __init__(self) -> None:
        orders, output, errors = os.pipe(), os.pipe(), os.pipe()
        self.orders, self.output, self._errors = orders[0], output[1], errors[1]
        os.set_blocking(self.orders, False)
        self.stdin = os.fdopen(orders[1], "wb", buffering=0)
        self.stdout, self.stderr = (os.fdopen(fd, "rb", buffering=0) for fd in (output[0], errors[0]))

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass

    def close(self) -> None:
        for fd in (self.orders, self.output, self._errors):
            os.close(fd)


class PretendedBackend(Backend):
    """Hosts that are pipes."""

    heartbeat_timeout_s = 10.0

    def __init__(self, count: int) -> None:
        self.hosts = tuple(f"h{number:04}" for number in range(count))
        self.python, self.directory = "python", "/"
        self.processes: dict[str, _Process] = {}

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        return []

    def start(self, host: str, module: str, *words: str) -> Any:
        self.processes[host] = _Process()
        return self.processes[host]


class PretendedJob:
    """An attempt of the controller at a job on so many hosts, which a test moves by hand. Use it as a context.

    No clock of it ever ends: a pretended host says nothing by itself.
    """

    def __init__(self, hosts: int, ranks: int, folder: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._soft = soft
        self.ranks = ranks
        self.backend = PretendedBackend(hosts)
        limits = Limits(silent_s=NEVER_S, start_s=NEVER_S, kill_s=NEVER_S, agent_end_s=0.0)
        self.job = JobSpec(
            command=("train",),
            nprocs=hosts * ranks,
            run_id="pretended",
            log_dir=folder / "logs",
            limits=limits,
            host_lease=NEVER_S,
        )
        self.pool = HostPool(self.backend, limits=limits)
        self.screen = Console(all_ranks=False)
        self.recorder = JobRecorder(self.job, self.backend)
        self.attempt = Attempt(
            job=self.job,
            pool=self.pool,
            logs=Logs(self.job, self.screen.info),
            console=self.screen,
            signals=cast("SignalPipe", None),
            recorder=self.recorder,
            key="key",
            address="127.0.0.1",
            spares="off",
        )

    def __enter__(self) -> "PretendedJob":
        attempt = self.attempt
        self.recorder.__enter__()
        self.recorder.update(state="running")
        attempt._result = AttemptResult(exits=attempt._exits, hosts=len(self.backend.hosts))  # as `Attempt.run` does
        attempt._code, attempt._begun = {}, time.monotonic()
        attempt._detector = HangDetector(None, attempt.times, still_s=NEVER_S)
        placed = placements(self.job, self.backend.hosts, "127.0.0.1:1", {})
        self.pool.start(self.job, placed, "key", "off")
        for place in placed:
            for rank in place.ranks:
                attempt._detector.observe(rank, Record(), time.monotonic())
        for host in range(len(self.backend.hosts)):
            for rank in self.ranks_of(host):
                self.say(host, {"type": "started", "rank": rank, "pid": 1})
        while len(attempt._running) < self.job.nprocs:
            self.turn()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.backend.processes.values():
            process.close()
        self.pool.__exit__()
        self.recorder.end(0)
        self.recorder.__exit__()
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.ranks, (host + 1) * self.ranks)

    def say(self, host: int, *messages: Mapping[str, Any]) -> None:
        """Have an agent send messages."""
        link = self.pool.connect(self.backend.hosts[host])
        data = b"".join(encode({"n": f"{link.nonce}.1", **message}) for message in messages)
        output = self.backend.processes[link.host].output
        if len(data) > 1 << 15:
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert os.write(output, data) == len(data)

    def report(self, host: int, step: int) -> None:
        """Have an agent tell that all of its ranks are in a step."""
        record = {"entered": step, "done": step - 1, "time": time.time(), "phase": 1, "activity": "step", "pid": 1}
        records = [[rank, record] for rank in self.ranks_of(host)]
        self.say(host, {"type": "progress", "records": records, "echo": time.monotonic()})

    def turn(self) -> None:
        """Let the controller take what has come, as its loop does."""
        for link, event in self.pool.events(0.0):
            if link is not None and event is not None:
                self.attempt._on_event(link, event)
        self.attempt._on_clock(time.monotonic())

    def orders(self) -> Counter[str]:
        """The orders that the controller has sent since the last look, by their kind."""
        found = Counter[str]()
        for process in self.backend.processes.values():
            data = b""
            try:
                while more := os.read(process.orders, 1 << 20):
                    data += more
            except BlockingIOError:
                pass
            found.update(json.loads(line)["type"] for line in data.splitlines())
        return found
