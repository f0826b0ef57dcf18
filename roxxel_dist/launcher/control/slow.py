"""Which rank works slower than the others, if any: decided from the CPU usage of each rank. No processes here.

A collective makes the steps of all ranks equally long, so the steps do not show a slow rank. Local values are compared:
how long its threads waited for a CPU for each second that they ran, and the CPU time of a fixed computation
(`cluster.speed_probe`). A rank that only computes more than the others, as rank 0 does, does not count as slow.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from roxxel_dist.cluster.progress import Record
from roxxel_dist.launcher.host.usage import Usage

BLOCK_STEPS = 9
BLOCK_S = 1.0
"""Ranks are compared over blocks of so many steps of each, and so many seconds: all at the same time."""
BLOCKS = 4
"""Blocks in a row in which a rank has to be slow before it is named, and fast before that is taken back."""
SLOW = 1.5
"""Times the median of the others from which on, over these blocks, a rank is slow."""
SUSPECT = 1.3
"""The same of each block."""
FAST = 1.2
THROTTLED = 0.15
"""A group that was throttled for so much more of the time than those of the others explains why a rank waits."""
MORE_WORK = 1.25
"""A rank that had so many times the CPU time of the others lacks none: it has more to do."""
PROBES = 8
"""Probes of which the quickest counts: another program on the same core disturbs some, a slow core slows down all."""
CHANGED = 1.5
"""The factor is reported again once it has changed this many times since the last report."""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """How much slower than the others, and the evidence: shares of the time, and multiples of the median."""

    factor: float
    waited: float = 0.0
    throttled: float = 0.0
    probe: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SlowRanks:
    """One rank that is slow, or all of a host; or that are so no longer (then `slowness` is None)."""

    ranks: tuple[int, ...]
    host: str
    whole_host: bool
    """Whether these are all of its ranks, and there are several."""
    step: int
    """The step that the first of them had done."""
    slowness: Slowness | None


@dataclass(frozen=True)
class _Sum:
    """What a rank had in some steps."""

    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    throttled_s: float = 0.0

    def plus(self, steps: int, before: Usage, after: Usage) -> "_Sum":
        return _Sum(
            self.steps + steps,
            self.seconds + after.time - before.time,
            self.cpu_s + after.cpu_s - before.cpu_s,
            self.wait_s + after.wait_s - before.wait_s,
            self.longest_wait_s + after.longest_wait_s - before.longest_wait_s,
            self.throttled_s + after.throttled_s - before.throttled_s,
        )

    @property
    def stretch(self) -> float:
        """Seconds that it took to run for a second."""
        return (self.cpu_s + self.wait_s) / self.cpu_s if self.cpu_s > 0 else 1.0

    def share(self, seconds: float) -> float:
        return min(1.0, seconds / self.seconds) if self.seconds > 0 else 0.0


@dataclass
class _Rank:
    host: str
    record: Record
    usage: Usage
    block: _Sum = _Sum()
    probes: deque[float] = field(default_factory=lambda: deque(maxlen=PROBES))
    blocks: deque[Slowness] = field(default_factory=lambda: deque(maxlen=BLOCKS))
    said: Slowness | None = None
    """As last reported; None if the rank is not slow."""


class SlowRankDetector:
    """What is known of the ranks' speed. `hosts`: where each rank runs."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._ranks: dict[int, _Rank] = {}
        self._begun: float | None = None

    def observe(self, rank: int, record: Record, usage: Usage, now: float) -> None:
        """Take in the progress and the CPU usage of a rank, both read at the same moment.

        The time between two calls counts only if the rank did steps of a single phase in it.
        """
        known = self._ranks.get(rank)
        if known is None or known.usage.pid != usage.pid:
            self._ranks[rank] = _Rank(self._hosts[rank], record, usage)
            return
        before = known.record
        if record.probe_s > 0 and record.probe_s != before.probe_s:
            known.probes.append(record.probe_s)
        same = (before.activity, before.phase, before.pauses) == (record.activity, record.phase, record.pauses)
        if same and record.activity == "step" and before.done > 0:
            if record.done == before.done:
                known.record = replace(before, probe_s=record.probe_s)
                return
            known.block = known.block.plus(record.done - before.done, known.usage, usage)
        known.record, known.usage = record, usage
        self._begun = self._begun or now

    def forget(self, rank: int) -> None:
        """This rank has ended."""
        self._ranks.pop(rank, None)

    @property
    def factors(self) -> dict[int, float]:
        """The ranks that are slow now, and how many times slower than the others."""
        return {rank: round(known.said.factor, 1) for rank, known in self._ranks.items() if known.said is not None}

    def check(self, now: float) -> list[SlowRanks]:
        """The changes: ranks that are now slow, slower, or no longer slow. Call it about every second."""
        if self._begun is None or now - self._begun < BLOCK_S or len(self._ranks) < 2:
            return []
        if min(known.block.steps for known in self._ranks.values()) < BLOCK_STEPS:
            return []
        self._begun = now
        self._compare()
        changed = [rank for rank, known in sorted(self._ranks.items()) if self._changed(known)]
        return self._by_host(changed)

    def _compare(self) -> None:
        """End the block of each rank with how slow it was."""
        ranks = self._ranks.values()
        stretch = _Others([known.block.stretch for known in ranks])
        waited = _Others([known.block.share(known.block.longest_wait_s) for known in ranks])
        throttled = _Others([known.block.share(known.block.throttled_s) for known in ranks])
        cpu = _Others([known.block.cpu_s / known.block.steps for known in ranks])

        def has_more_work(block: _Sum) -> bool:
            return block.cpu_s / block.steps > MORE_WORK * cpu.median(block.cpu_s / block.steps)

        probe = _Others([min(known.probes) for known in ranks if len(known.probes) == PROBES])
        for known in ranks:
            block, factor, by_probe = known.block, 1.0, 0.0
            lost, quota = block.share(block.longest_wait_s), block.share(block.throttled_s)
            more, limited = lost - waited.median(lost), quota - throttled.median(quota)
            is_throttled = limited >= THROTTLED and more >= 0
            if is_throttled:  # on a loaded machine the others wait for as long, for other reasons
                factor = 1 / max(0.05, 1 - (more if more >= 1 - 1 / SLOW else min(lost, limited)))
            elif block.stretch >= SUSPECT * stretch.median(block.stretch) and not has_more_work(block):
                factor = 1 / max(0.05, 1 - more)
            if len(known.probes) == PROBES and probe.others:
                by_probe = min(known.probes) / probe.median(min(known.probes))
            known.blocks.append(
                Slowness(
                    factor=max(factor, by_probe, 1.0),
                    waited=lost if factor >= SUSPECT else 0.0,
                    throttled=quota if factor >= SUSPECT and is_throttled else 0.0,
                    probe=by_probe if by_probe >= SUSPECT else 0.0,
                )
            )
            known.block = _Sum()

    @staticmethod
    def _changed(known: _Rank) -> bool:
        """Whether a rank needs a report; `said` then holds its slowness."""
        if len(known.blocks) < BLOCKS:
            return False
        blocks, said = known.blocks, known.said
        now = Slowness(
            factor=median(block.factor for block in blocks),
            waited=median(block.waited for block in blocks),
            throttled=median(block.throttled for block in blocks),
            probe=median(block.probe for block in blocks),
        )
        if said is None:
            is_slow = now.factor >= SLOW and all(block.factor >= SUSPECT for block in blocks)
            known.said = now if is_slow else None
            return is_slow
        if all(block.factor < FAST for block in blocks):
            known.said = None
            return True
        differs = all(not said.factor / CHANGED < block.factor < said.factor * CHANGED for block in blocks)
        if differs and now.factor >= SUSPECT:
            known.said = now
            return True
        return False

    def _by_host(self, changed: list[int]) -> list[SlowRanks]:
        """The reports about these ranks: one each, or one for a host if all its ranks are slow."""
        news: list[SlowRanks] = []
        hosts = {known.host for known in self._ranks.values()}
        for host in dict.fromkeys(self._ranks[rank].host for rank in changed):
            own = sorted(rank for rank, known in self._ranks.items() if known.host == host)
            said = [self._ranks[rank].said for rank in own]
            slow = [slowness for slowness in said if slowness is not None]
            if len(hosts) > 1 and len(own) > 1 and len(slow) in (0, len(own)):
                groups = [tuple(own)]
            else:
                groups = [(rank,) for rank in changed if self._ranks[rank].host == host]
            for group in groups:
                first = self._ranks[group[0]]
                worst = max(slow, key=lambda slowness: slowness.factor) if len(group) > 1 and slow else first.said
                step = first.record.done
                news.append(SlowRanks(ranks=group, host=host, whole_host=len(group) > 1, step=step, slowness=worst))
        return news


class _Others:
    """Values of all ranks, and the median of those of the others for each."""

    def __init__(self, values: list[float]) -> None:
        self._values = sorted(values)
        self.others = len(values) > 1

    def median(self, own: float) -> float:
        """The median of all values but one, `own`."""
        left_out, count = bisect_left(self._values, own), len(self._values) - 1

        def value(place: int) -> float:
            return self._values[place + (place >= left_out)]

        return (value((count - 1) // 2) + value(count // 2)) / 2
