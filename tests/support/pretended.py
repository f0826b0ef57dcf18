"""A controller's own loop, with agents that are pretended: each is three pipes, and says what a test has it say."""

import contextlib
import fcntl
import gc
import itertools
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, log
from pathlib import Path
from typing import Any, cast

from roxxel_dist.launcher.control.attempt import Attempt
from roxxel_dist.launcher.control.record import JobRecorder
from roxxel_dist.launcher.host.protocol import Message, encode
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import placements
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.output import Console, Logs
from roxxel_dist.launcher.policy.hang import HangDetector
from roxxel_dist.launcher.policy.outcome import AttemptResult
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.process.interrupt import SignalPipe
from roxxel_dist.process.progress import Record

NEVER_S = 1e6
LINEAR = 1.15
"""The largest exponent of a linear cost: what caches do to CPU time is in it. A pass over all for each has about 2."""


def exponent(cost: Callable[[int], float], small: int, large: int, *, log_too: bool = False) -> float:
    """By which power of a number n a cost grows; `log_too`: that of what is left of it beside log n.

    From the least of some measurements of each, which take turns: what else runs on the machine can only add to one.
    Where that is above `LINEAR`, there are more of them, and one of the small number is the mean of several, so that it
    takes as long as one of the large: on a busy machine who runs longer is interrupted more, and finds its caches cold.
    """
    least, found = {small: inf, large: inf}, inf
    for turns in range(1, 41):
        again = large // small if turns > 4 else 1
        if turns == 5:
            least[small] = inf
        least[small] = min(least[small], sum(cost(small) for _ in range(again)) / again)
        least[large] = min(least[large], cost(large))
        found = log(least[large] / least[small]) / log(large / small)
        found -= log(log(large) / log(small)) / log(large / small) if log_too else 0.0
        if turns >= 4 and found <= LINEAR:
            break
    return found


def cpu_of(act: Callable[[], object]) -> float:
    """Seconds of CPU that this thread needs for something, without collections, which look at all that is there."""
    gc.disable()
    begun = time.thread_time()
    try:
        act()
        return time.thread_time() - begun
    finally:
        gc.enable()


def report_of(ranks: Iterable[int], step: int) -> Message:
    """What an agent says whose ranks have come to a step."""
    record = Record(step, step - 1, time.time(), 1, "step", 1)
    return {"type": "progress", "records": [[rank, *record] for rank in ranks], "echo": time.monotonic()}


def report_for_ever(hosts: Sequence[tuple[int, int, str]], ranks: int) -> None:
    """Report a new step of each host twice a second, until stdin ends; hosts are (output, orders, nonce)."""
    begun = time.monotonic()
    for turn in itertools.count():
        left_s = begun + turn / (2 * len(hosts)) - time.monotonic()
        if select.select([0], [], [], max(0.0, left_s))[0]:
            return
        number = turn % len(hosts)
        output, orders, nonce = hosts[number]
        os.write(output, encode(report_of(range(number * ranks, (number + 1) * ranks), 2 + turn // len(hosts)), nonce))
        with contextlib.suppress(BlockingIOError):
            os.read(orders, 1 << 16)


class _Process:
    lingers: bool = False
    """Whether it stays until it is killed."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.is_killed = False
        orders, output, errors = os.pipe(), os.pipe(), os.pipe()
        self.orders, self.output, self._errors = orders[0], output[1], errors[1]
        os.set_blocking(self.orders, False)
        self.stdin = os.fdopen(orders[1], "wb", buffering=0)
        self.stdout, self.stderr = (os.fdopen(fd, "rb", buffering=0) for fd in (output[0], errors[0]))

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None
        if self.lingers and not self.is_killed:
            self.waited.append(timeout)
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("client", timeout)
        return 0

    def kill(self) -> None:
        self.is_killed = True

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

    No clock of it ever ends, but for those in `more` (`Limits`): a pretended host says nothing by itself.
    """

    def __init__(self, hosts: int, ranks: int, folder: Path, **more: float) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._soft = soft
        self.ranks = ranks
        self.backend = PretendedBackend(hosts)
        limits = Limits(**{"silent_s": NEVER_S, "start_s": NEVER_S, "kill_s": NEVER_S, "agent_end_s": 0.0, **more})
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
        data = b"".join(encode(message, link.nonce) for message in messages)
        output = self.backend.processes[link.host].output
        if len(data) > 1 << 15:
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert os.write(output, data) == len(data)

    def report(self, host: int, step: int) -> None:
        """Have an agent tell that all of its ranks are in a step."""
        self.say(host, report_of(self.ranks_of(host), step))

    def turn(self, wait_s: float = 0.0) -> None:
        """Let the controller take what has come, as its loop does."""
        for link, event in self.pool.events(wait_s):
            self.attempt._on_event(link, event)
        self.attempt._on_clock(time.monotonic())

    def cpu_share(self, seconds: float) -> float:
        """CPU seconds a second of this process, with its heartbeats and the record of the job, while each host reports
        a new step of each of its ranks twice a second, one host after the other: another process has them do so."""
        processes = self.backend.processes.items()
        hosts = [(process.output, process.orders, self.pool.connect(host).nonce) for host, process in processes]
        fds = [fd for host in hosts for fd in host[:2]]
        with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, pass_fds=fds) as others:
            assert others.stdin is not None
            others.stdin.write(json.dumps({"hosts": hosts, "ranks": self.ranks}) + "\n")
            others.stdin.flush()
            begun, cpu = time.monotonic() + 1.5, 0.0  # they start meanwhile
            for until in (begun, begun + seconds):
                cpu = time.process_time()
                while (now := time.monotonic()) < until:
                    self.turn(max(0.0, min(self.attempt._check_at, until) - now))
            return (time.process_time() - cpu) / seconds

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


if __name__ == "__main__":
    report_for_ever(**json.loads(sys.stdin.readline()))
