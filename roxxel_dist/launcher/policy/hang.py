"""Which rank keeps the job waiting, if any: decided from the records of the ranks and a clock. No processes here.

Ranks wait for each other, so when one is stuck, soon none moves. The one to name has entered the fewest steps; while it
does something that may take long (it compiles, it saves), no rank counts as stuck.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from roxxel_dist.process.progress import Record

LIMITS_S: Mapping[str, float] = {
    "start": 1800,
    "join": 280,
    "compile": 3600,
    "restore": 1800,
    "eval": 3600,
    "save": 1800,
    "exit": float("inf"),
}
"""Seconds that each activity may take that is no step (for "exit" there is --exit-timeout). Of "join" less than
`cluster.distributed.INIT_TIMEOUT_S`: then jax aborts the ranks that wait, and they would be blamed."""
UNKNOWN_S = 3600.0
"""A step's limit while the usual time of a step of this phase is not known: the first one may compile."""
LEAST_S = 60.0
TIMES = 10
SAMPLES = 3
"""Steps that must have been timed before the limit follows them."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A rank that did not go on in time."""

    rank: int
    step: int
    """The step it had entered; 0 before the first."""
    phase: int
    """From 1; 0 where there are none."""
    activity: str
    seconds: float
    """How long it had been there."""
    limit: float
    tied: int = 1
    """How many ranks were in the same step, and none behind: with more than one, the culprit is a guess."""
    absent: bool = False
    """Others wait for it in `jax.distributed.initialize`, where it has not come yet."""
    alone: bool = False
    """Nothing is known of the ranks of other hosts, which have launchers of their own."""


@dataclass
class StepTimes:
    """Durations of steps, from one attempt of a job to the next on as many devices. Seconds, by phase."""

    usual: dict[int, deque[float]] = field(default_factory=dict)
    """The last steps of any rank."""
    first: dict[int, float] = field(default_factory=dict)
    """The longest first step of a rank in an attempt: it may compile."""

    def add(self, phase: int, seconds: float) -> None:
        """A step that followed another one."""
        if (usual := self.usual.get(phase)) is None:
            usual = self.usual[phase] = deque(maxlen=101)
        usual.append(seconds)

    def add_first(self, phase: int, seconds: float) -> None:
        """The first step of a rank in an attempt, with all that it did until the next one."""
        self.first[phase] = max(seconds, self.first.get(phase, 0.0))


@dataclass
class _Seen:
    record: Record
    since: float  # by the launcher's clock: the clocks of hosts may differ
    first: Record | None = None  # as it entered its first step of this phase

    @property
    def is_in_first_step(self) -> bool:
        return self.first is not None and self.first.entered == self.record.entered


@dataclass
class HangDetector:
    """The progress of the ranks in an attempt, and which of them hangs.

    `step_timeout` in seconds; None follows the usual time of a step, that of earlier attempts too. `still_s`: who asks
    less often stood still itself (a stopped terminal, a suspended machine).
    """

    step_timeout: float | None = None
    times: StepTimes = field(default_factory=StepTimes)
    still_s: float = field(kw_only=True)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _reporting: set[int] = field(default_factory=set)
    """The living ranks that have reported anything."""
    _heard: float = 0.0
    """When a rank has printed something."""
    _looked: float | None = None
    _stood_still: bool = False

    def __post_init__(self) -> None:
        self._first = dict(self.times.first)  # of earlier attempts: in this one ranks need not be equally fast

    def observe(self, rank: int, record: Record, now: float) -> bool:
        """Take in the record of a rank, as it is at `now` (seconds of any clock that only grows).

        Returns whether it has entered another step, or does something else.
        """
        before = self._seen.get(rank)
        if before is None:
            if record.entered or record.activity:
                self._reporting.add(rank)
            self._seen[rank] = _Seen(record, now, record if record.activity == "step" else None)
            return False
        old, first, steps, phase = before.record, before.first, record.entered - before.record.entered, record.phase
        if steps > 0:
            if old.activity == record.activity == "step" and old.phase == phase:
                self.times.add(phase, max(0.0, record.time - old.time) / steps)
            if first is not None and first.entered == old.entered and first.phase == phase:
                self.times.add_first(phase, max(0.0, record.time - first.time))
        if record.activity == "step" and (first is None or first.phase != phase):
            before.first = record
        before.record = record
        is_new = steps != 0 or old.activity != record.activity
        if is_new:
            before.since = now
            self._reporting.add(rank)
        return is_new

    def hear(self, now: float) -> None:
        """A rank has printed something: where none reports anything, it is the one sign that they go on."""
        self._heard = now

    def forget(self, rank: int) -> None:
        """Follow a rank no more: it has ended."""
        self._seen.pop(rank, None)
        self._reporting.discard(rank)

    @property
    def finished(self) -> int | None:
        """The step that all ranks that report steps have finished; 0 in the first, which may compile for minutes.

        None: no living rank has reported a step.
        """
        return min((seen.record.done for seen in self._seen.values() if seen.record.entered), default=None)

    def limit(self, record: Record, *, first: bool = False) -> float:
        """Seconds that a rank may stay as it is; infinite if it never reported an activity.

        `first`: it is in its first step of the phase in this attempt.
        """
        if record.activity != "step":
            return LIMITS_S.get(record.activity, float("inf"))
        if self.step_timeout is not None:
            return self.step_timeout
        samples = sorted(self.times.usual.get(record.phase, ()))
        if len(samples) < SAMPLES:
            return UNKNOWN_S
        usual = samples[len(samples) // 2]
        return max(LEAST_S, TIMES * max(usual, self._first.get(record.phase, 0.0) if first else 0.0))

    def _limit_of(self, seen: _Seen) -> float:
        if self._is_mute and self.step_timeout is not None:
            return max(self.step_timeout, LEAST_S)  # the start of a program that will report steps may take as long
        return self.limit(seen.record, first=seen.is_in_first_step)

    @property
    def _is_mute(self) -> bool:
        """Whether no rank has reported a thing: the program may be one that never does."""
        return not self._reporting

    def check(self, now: float) -> Hang | None:
        """The rank that everybody waits for, when its time is over. To be asked every second or so."""
        still = self._looked is not None and now - self._looked > self.still_s
        if self._looked is not None and still and not self._stood_still:  # twice in a row: it is slow, and has listened
            for seen in self._seen.values():
                seen.since = min(now, seen.since + now - self._looked)
        self._looked, self._stood_still = now, still
        if self._is_mute and self.step_timeout is not None:
            for seen in self._seen.values():
                seen.since = max(seen.since, self._heard)
        last, absent = self._last(now)
        if not last or (not absent and any(now - seen.since <= self._limit_of(seen) for seen in last.values())):
            return None
        rank = min(last, key=lambda rank: (last[rank].since, rank))
        return self._hang(rank, now, tied=len(last), absent=absent)

    def refine(self, hang: Hang, *, stopped: Collection[int], silent: Collection[int], now: float) -> Hang:
        """The hang with the rank that is to blame, when the stacks have been asked for.

        Args:
            hang: as `check` gave it.
            stopped: ranks that the kernel does not run (SIGSTOP, a file system that does not answer).
            silent: ranks that did not answer.
            now: as for `check`.
        """
        last, _ = self._last(now)
        if hang.rank not in last:
            return hang
        for suspects in (self._seen.keys() & stopped, last.keys() & silent):
            if 0 < len(suspects) < len(self._seen):
                rank = min(suspects, key=lambda rank: (self._seen[rank].record.entered, rank))
                return self._hang(rank, now, tied=1, absent=hang.absent)
        return hang

    def _last(self, now: float) -> tuple[dict[int, _Seen], bool]:
        """(the ranks that have entered the fewest steps, False). If one of them has waited for the others in `join` up
        to the limit: (those that have not reached `join`, True)."""
        fewest = min((seen.record.entered for seen in self._seen.values()), default=0)
        last = {rank: seen for rank, seen in self._seen.items() if seen.record.entered == fewest}
        absent = {rank: seen for rank, seen in last.items() if seen.record.activity != "join"}
        if any(seen.record.activity == "join" and now - seen.since > LIMITS_S["join"] for seen in last.values()):
            return absent or last, bool(absent)
        return last, False

    def _hang(self, rank: int, now: float, *, tied: int, absent: bool) -> Hang:
        seen = self._seen[rank]
        return Hang(
            rank=rank,
            step=seen.record.entered,
            phase=seen.record.phase,
            activity=seen.record.activity,
            seconds=now - seen.since,
            limit=LIMITS_S["join"] if absent else self._limit_of(seen),
            tied=tied,
            absent=absent,
        )
