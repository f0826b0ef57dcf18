"""Which rank is named as slow: the decision over recorded and made series, and real ranks that are slowed down."""

import contextlib
import csv
import dataclasses
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from cpu_quota import competitors, cpu_share, quota
from cpu_quota import missing as quota_missing

from roxxel_dist.cluster.progress import Record
from roxxel_dist.launcher.control.report import slow_report
from roxxel_dist.launcher.control.slow import PROBES, SlowRankDetector, SlowRanks
from roxxel_dist.launcher.host.usage import Usage, UsageReader
from roxxel_dist.launcher.jobs.record import entries

Launch = Callable[..., Any]
RECORDED = Path(__file__).parent / "recorded"
REPORT_S = 0.5
LIMIT_S = 180.0


def recorded(name: str) -> tuple[list[SlowRanks], int]:
    """The reports about a recorded training of two ranks, and its last step."""
    detector, news, step = SlowRankDetector({0: "h", 1: "h"}), [], 0
    with (RECORDED / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            rank, now, step, activity = int(row["rank"]), float(row["now"]), int(row["done"]), row["activity"]
            record = Record(
                entered=int(row["entered"]), done=step, phase=1, activity=activity, pid=7 + rank,
                pauses=int(row["pauses"]), probe_s=float(row["probe_s"]),
            )  # fmt: skip
            names = ("time", "cpu_s", "wait_s", "longest_wait_s", "throttled_s")
            detector.observe(rank, record, Usage(pid=7 + rank, **{name: float(row[name]) for name in names}), now)
            news += detector.check(now)
    return news, step


def test_a_training_at_half_its_cpu_quota_is_named_once() -> None:
    """Recorded on two cores with a load of 7: the quota of rank 1 was set at step 95."""
    (slow,), last = recorded("half_speed")
    assert (slow.ranks, slow.host, slow.whole_host, last) == ((1,), "h", False, 168)
    assert 95 < slow.step <= 95 + 50
    words = (
        r"rank 1 on host h is slow, 2\.\d x the others, after step \d+: its process waited 7\d% of the time for a CPU"
    )
    assert re.fullmatch(words + r"; its cgroup was throttled for 7\d%", slow_report(slow))


def test_a_training_on_a_loaded_machine_names_nobody() -> None:
    """Recorded on two cores with a load of 7 to 18: every rank waits for a CPU, now one more and now the other."""
    news, last = recorded("loaded")
    assert (news, last > 1500) == ([], True)


@dataclass
class Made:
    """A rank of a made series: what it has in a second of steps, as shares of that second."""

    cpu: float = 0.4
    wait: float = 0.02
    throttled: float = 0.0
    probe: float = 1e-4
    noise: float = 0.0


class Series:
    """Ranks in lockstep, in steps of so many seconds, as their agents tell of them."""

    def __init__(self, step_s: float, hosts: Sequence[str], seed: int = 0) -> None:
        self.detector = SlowRankDetector(dict(enumerate(hosts)))
        self.step, self.step_s, self.pauses, self._now = 0.0, step_s, 0, 0.0
        self._usage = {rank: Usage(pid=9 + rank, time=0.0) for rank in range(len(hosts))}
        self._chance = random.Random(seed)

    def run(self, steps: int, ranks: Mapping[int, Made]) -> list[SlowRanks]:
        """So many steps; the ranks that are not named do as `Made()`."""
        news: list[SlowRanks] = []
        end = self.step + steps
        while self.step < end:
            before, self._now = int(self.step), self._now + REPORT_S
            self.step += REPORT_S / self.step_s
            for rank, usage in self._usage.items():
                what = ranks.get(rank, Made())
                wait = min(0.95, max(0.0, what.wait * self._chance.lognormvariate(0, what.noise)))
                self._usage[rank] = replace(
                    usage, time=self._now, cpu_s=usage.cpu_s + what.cpu * REPORT_S,
                    wait_s=usage.wait_s + wait * REPORT_S, longest_wait_s=usage.longest_wait_s + wait * REPORT_S,
                    throttled_s=usage.throttled_s + what.throttled * REPORT_S,
                )  # fmt: skip
                probe = what.probe * (1 + self._chance.random() / 50)
                record = Record(int(self.step) + 1, int(self.step), 0.0, 1, "step", 9 + rank, self.pauses, probe)
                if int(self.step) > before:
                    self.detector.observe(rank, record, self._usage[rank], self._now)
            news += self.detector.check(self._now)
        return news

    def pause(self, ranks: Mapping[int, Made]) -> None:
        """A validation or a save, for three seconds."""
        for rank, usage in self._usage.items():
            what = ranks.get(rank, Made())
            self._usage[rank] = replace(
                usage, time=self._now + 3, cpu_s=usage.cpu_s + 3 * what.cpu, wait_s=usage.wait_s + 3 * what.wait,
                longest_wait_s=usage.longest_wait_s + 3 * what.wait,
            )  # fmt: skip
        self._now += 3
        self.pauses += 1


HALF = Made(wait=0.55)


@pytest.mark.parametrize("step_s", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_a_rank_that_waits_is_named_within_50_steps_and_taken_back(step_s: float, ranks: int) -> None:
    series = Series(step_s, ["h"] * ranks)
    assert series.run(200, {}) == []
    begun = series.step
    (slow,) = series.run(100, {1: HALF})
    assert (slow.ranks, slow.host) == ((1,), "h")
    assert slow.step <= begun + 50
    assert series.detector.factors == {1: 2.1}
    (over,) = series.run(100, {})
    assert (over.ranks, over.slowness, series.detector.factors) == ((1,), None, {})
    assert slow_report(over) == f"rank 1 on host h is no longer slow, after step {over.step}"


def test_in_short_steps_some_seconds_have_to_pass() -> None:
    series = Series(0.02, ["h"] * 2)
    assert series.run(500, {}) == []
    assert series.run(150, {1: HALF}) == [], "three seconds may be another program's"
    assert [slow.ranks for slow in series.run(150, {1: HALF})] == [(1,)]


def test_it_is_said_again_when_it_changes() -> None:
    series = Series(0.1, ["h"] * 3)
    first, *rest = series.run(1000, {1: HALF})
    assert rest == []
    (worse,) = series.run(1000, {1: Made(wait=0.8)})
    assert worse.slowness is not None
    assert first.slowness is not None
    assert worse.slowness.factor > 2 * first.slowness.factor


def test_all_ranks_of_a_host_are_the_host() -> None:
    series = Series(0.1, ["a", "a", "b", "b", "c", "c"])
    (slow,) = series.run(200, {2: HALF, 3: HALF})
    assert (slow.ranks, slow.host, slow.whole_host) == ((2, 3), "b", True)
    assert slow_report(slow).startswith("host b (ranks 2, 3) is slow, 2.1 x the others, after step ")
    (over,) = series.run(200, {})
    assert slow_report(over).startswith("host b (ranks 2, 3) is no longer slow")


def test_a_slow_clock_is_seen_by_the_probe() -> None:
    series = Series(0.1, ["a", "b"])
    (slow,) = series.run(20 * PROBES, {1: Made(cpu=0.9, probe=2.1e-4)})
    assert slow_report(slow).endswith(": the probe took 2.1 x the median of the others")


IDLE: dict[str, tuple[int, dict[int, Made]]] = {
    "alike": (2, {}),
    "three on two cores": (3, dict.fromkeys(range(3), Made(cpu=0.3, wait=0.5, noise=0.25))),
    "ten on two cores": (10, dict.fromkeys(range(10), Made(cpu=0.15, wait=0.6, noise=0.25))),
    # A thread that writes, uploads or exports competes with those that train: its rank waits, and lacks no CPU.
    "rank 0 writes": (2, {0: Made(cpu=0.9, wait=0.6)}),
    "rank 0 logs": (4, {0: Made(cpu=0.45, wait=0.1)}),
    "many threads that sleep": (4, {1: Made(cpu=0.005, wait=0.03), 2: Made(cpu=0.005, wait=0.0)}),
}


@pytest.mark.parametrize("name", IDLE)
def test_nobody_is_named_in_10000_steps(name: str) -> None:
    ranks, what = IDLE[name]
    assert Series(0.1, ["h"] * ranks).run(10_000, what) == []


def test_what_happens_between_steps_counts_for_nothing() -> None:
    """Rank 0 waits for its disk, and its threads for each other, in every validation and every save."""
    series, busy = Series(0.1, ["h"] * 2), {0: Made(wait=0.9)}
    for _ in range(100):
        assert series.run(20, {}) == []
        series.pause(busy)


def test_the_reader_sees_what_a_process_had() -> None:
    reader, own = UsageReader(), os.getpid()
    first = reader.read(own)
    assert first is not None
    assert first == Usage(pid=own, time=first.time)
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    while (second := reader.read(own)) is None:  # it has just been read
        time.sleep(0.01)
    assert 0.2 <= second.cpu_s <= psutil.Process().cpu_times().user + psutil.Process().cpu_times().system
    assert second.longest_wait_s <= second.time - first.time
    assert reader.read(0) is None
    assert UsageReader().read(2**22 + 1) is None


LOCKSTEP = """
import mmap, os, signal, sys, threading, time
from roxxel_dist.cluster.progress import Progress
from roxxel_dist.cluster.speed_probe import SpeedProbe
rank, ranks = int(os.environ["ROXXEL_PROCESS_ID"]), int(os.environ["ROXXEL_NUM_PROCESSES"])
work_s, steps, folder = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
attempt = os.environ["ROXXEL_ATTEMPT"]
fd = os.open(f"{folder}/lockstep.{attempt}", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8 * ranks)
done = memoryview(mmap.mmap(fd, 8 * ranks)).cast("q")
progress = Progress.from_env(rank)
signal.signal(signal.SIGTERM, lambda *_: os._exit(42))  # saved
def write():  # rank 0 logs
    with open(f"{folder}/log", "a") as log:
        while True:
            end = time.thread_time() + work_s / 5
            while time.thread_time() < end:
                log.write("a line\\n")
            time.sleep(work_s)
if rank == 0:
    threading.Thread(target=write, daemon=True).start()
with SpeedProbe(progress):
    for step in range(1, steps + 1):
        progress.enter(step)
        end = time.thread_time() + work_s
        while time.thread_time() < end:
            pass
        done[rank] = step
        while min(done) < step and not os.path.exists(f"{folder}/stop"):  # as in a collective
            time.sleep(work_s / 20)
        progress.finish(step)
        if os.path.exists(f"{folder}/stop"):
            break
"""
NAMED = re.compile(r"rank (\d+) on host (\S+) is slow, ([\d.]+) x the others, after step (\d+): (.*)")


@dataclass
class Lockstep:
    """Ranks without jax that wait for each other in each step."""

    job: Any

    @staticmethod
    def until(condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition; seldom looked at, for the ranks need the CPUs."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
            time.sleep(0.1)

    def ranks(self) -> list[dict[str, Any]]:
        """As `ps --json` tells of them."""
        return [dataclasses.asdict(rank) for record in entries() for rank in record.ranks]

    def step(self) -> int:
        return max((rank["step"] for rank in self.ranks()), default=0)

    def named(self, rank: int, *, within: int) -> float:
        """The factor of a rank, when it is named; it has so many steps from now on."""
        begun = self.step()
        self.until(
            lambda: {r["rank"] for r in self.ranks() if r["slow"]} or self.step() > begun + within + 60, "a name"
        )
        slow = {r["rank"]: r["slow"] for r in self.ranks() if r["slow"]}
        assert list(slow) == [rank], (slow, begun, self.step())
        return slow[rank]

    def end(self) -> list[tuple[int, int, float, str]]:
        """(rank, step, factor, what is seen) of each that was named."""
        (self.job.folder / "stop").touch()
        code, _, err = self.job.wait()
        assert code == 0, err
        return [(int(m[1]), int(m[4]), float(m[3]), m[5]) for m in NAMED.finditer(err)]


@pytest.fixture
def lockstep(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lockstep]:
    """Start ranks in steps of so much CPU time."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def start(work_s: float, steps: int, **job: Any) -> Lockstep:
        words = ("env", sys.executable, "-c", LOCKSTEP, work_s, steps, tmp_path)
        return Lockstep(launch(*map(str, words), **job))

    return start


def slowed(pid: int) -> contextlib.AbstractContextManager[None]:
    """Half of what a process uses: by a quota, or by other programs on its core where no group can be made."""
    return competitors(pid, 0, 2) if quota_missing() else quota(pid, cpu_share(pid) / 2)


@pytest.mark.cluster
def test_a_rank_at_half_speed_is_named_and_taken_back(lockstep: Callable[..., Lockstep]) -> None:
    job = lockstep(0.03, 100_000)
    job.until(lambda: job.step() > 20, "steps")
    pid = next(rank["pid"] for rank in job.ranks() if rank["rank"] == 1)
    with slowed(pid):
        begun = job.step()
        factor = job.named(1, within=100)
    job.until(lambda: not any(rank["slow"] for rank in job.ranks()), "its recovery")
    ((rank, step, said, seen),) = job.end()
    assert (rank, said) == (1, factor)
    assert factor >= 1.5
    assert begun < step
    assert re.match(r"its process waited \d\d% of the time for a CPU", seen)


@pytest.mark.cluster
def test_a_spare_host_takes_the_place_of_a_slow_one(lockstep: Callable[..., Lockstep]) -> None:
    """Hosts are agents on this machine; in the second attempt the spare one is left, and then none."""
    job = lockstep(0.01, 100_000, hosts=["a", "b", "c"], spare_hosts=1, replace_slow=True, max_restarts=3)
    job.until(lambda: job.step() > 10, "steps")
    first = {rank["host"]: rank["pid"] for rank in job.ranks()}
    with slowed(first["b"]):
        job.until(lambda: {"a", "c"} == {rank["host"] for rank in job.ranks() if rank["step"] > 10}, "the spare host")
    second = {rank["host"]: rank["pid"] for rank in job.ranks()}
    with slowed(second["a"]):
        job.until(lambda: any(rank["slow"] for rank in job.ranks()), "a name")
    (job.job.folder / "stop").touch()
    code, _, err = job.job.wait()
    assert code == 0
    assert "a spare host takes the place of b: the ranks get 30 s to save and exit" in err
    assert re.search(r"rank 1 on host b is slow, .* x the others, .*; it is replaced \(--replace-slow\)", err)
    assert "restart 1 of 3" in err
    assert "going on without b, with c instead" in err
    assert "host a stays: no spare host is left" in err


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(quota_missing() is not None, reason=str(quota_missing()))
def test_a_rank_at_half_speed_is_named_20_of_20_within_50_steps(lockstep: Callable[..., Lockstep]) -> None:
    job = lockstep(0.015, 100_000)
    job.until(lambda: job.step() > 20, "steps")
    pids = {rank["rank"]: rank["pid"] for rank in job.ranks()}
    begun = []
    for number in range(20):
        rank = number % 2
        with quota(pids[rank], cpu_share(pids[rank]) / 2):
            begun.append(job.step())
            job.named(rank, within=50)
        job.until(lambda: not any(rank["slow"] for rank in job.ranks()), "its recovery")
    named = job.end()
    print(*zip(begun, named, strict=False), sep="\n")
    assert [rank for rank, *_ in named] == [number % 2 for number in range(20)]
    assert all(first < step <= first + 50 for first, (_, step, *_) in zip(begun, named, strict=True))
    assert all("its cgroup was throttled for" in seen for *_, seen in named)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "work_s", "steps"), [(2, 0.02, 10_000), (3, 0.02, 5_000), (10, 0.01, 2_000)])
def test_an_idle_run_names_nobody(ranks: int, work_s: float, steps: int, lockstep: Callable[..., Lockstep]) -> None:
    """Also where ten share two cores."""
    job = lockstep(work_s, steps, nprocs=ranks)
    assert job.job.process.wait(3600) == 0
    assert job.end() == []
