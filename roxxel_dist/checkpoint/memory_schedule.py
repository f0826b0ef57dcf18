"""After which steps a generation is taken: rank 0 decides it from the cost of earlier ones."""

import math
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SHARE = 0.01
"""The share of the steps' time that generations may take with `auto`."""
FIRST_AFTER = 2
"""Steps before the first generation of a process; the first steps are not like others."""
COSTS = 5
"""The cost of a generation is the median of so many: a single one may have waited for a core."""
LOOK_AGAIN = 8
"""Steps until rank 0 decides again, while the cost of a generation is unknown."""


@dataclass(frozen=True, kw_only=True)
class CopyDecision:
    """The decision of rank 0 about a step, for all ranks."""

    generation: str = ""
    """The generation to take; empty for none."""
    slot: int = 0
    """Which of a rank's two files holds it."""
    off: str = ""
    """Why there are no more generations."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a rank's part of a generation, or of the preparations, went."""

    problem: str = ""
    neighbour: str = ""
    """Why the neighbour does not have it, where it should."""
    seconds: float = 0.0
    """Time that the devices were idle; if they are CPUs, also the CPU time that the generation took from them."""


class Schedule:
    """The generations of one process's training, as rank 0 counts them.

    Args:
        every: steps between two; None: as many as `SHARE` asks for.
        log: takes lines for people.
    """

    def __init__(self, every: int | None, log: Callable[[str], None]) -> None:
        self._every, self._log = every, log
        self._costs: deque[float] = deque(maxlen=COSTS)
        self._logged: set[str] = set()
        self.begin(0, 0)

    def begin(self, step: int, slot: int) -> None:
        """The run goes on after a step; the first generation is kept in a slot."""
        self._name = secrets.token_hex(4)  # no two processes give the same name to different generations
        self._count, self._slot, self._off = 0, slot, ""
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier step."""
        self._last, self._clock = step, None
        self.next_step: int = step + FIRST_AFTER if self._every is None else (step // self._every + 1) * self._every
        """The step that the next decision is about."""

    def start_clock(self, step: int) -> None:
        """The first step since `begin` or `go_back` is done."""
        if self._clock is None:
            self._clock: tuple[int, float] | None = (step, time.monotonic())

    def postpone(self, step: int) -> None:
        """The generation before is not done."""
        self.next_step = step + (self._every or 1)

    def decide(self, step: int, done: int, reports: Sequence[Report]) -> CopyDecision | None:
        """Whether to take a generation at `step`, when `done` steps are done; None: neither that, nor an end of it.

        Args:
            step: that is decided about.
            done: steps that are done now.
            reports: of all ranks, on what they ended since the last decision; empty where that was nothing.
        """
        if reports:
            self._off = self._take_in(reports)
        if self._off:
            return CopyDecision(off=self._off)
        every = self._every or LOOK_AGAIN
        if self._every is None and self._costs:
            begun, since = self._clock or (done, time.monotonic())
            a_step = (time.monotonic() - since) / max(1, done - begun)
            every = max(1, math.ceil(statistics.median(self._costs) / max(SHARE * a_step, 1e-9)))
            if step - self._last < every and self._count:
                self.next_step = self._last + every
                return None
        self._count += 1
        self.next_step = step + every
        self._last, self._clock = step, (done, time.monotonic())
        return CopyDecision(generation=f"{self._name}.{self._count}", slot=self._slot)

    def _take_in(self, reports: Sequence[Report]) -> str:
        """Learn from the reports of all ranks; returns why there can be no generations, or nothing."""
        problem = next((report.problem for report in reports if report.problem), "")
        if not self._count:  # of the preparations
            if problem:
                self._log_once(f"no copies of the state in shared memory: {problem}")
            return problem
        if problem:
            self._log_once(
                f"the copy of step {self._last} in shared memory is dropped ({problem}); training continues, and the "
                f"next one is tried",
                about="dropped",
            )
            return ""
        self._slot = 1 - self._slot
        self._costs.append(max(report.seconds for report in reports))
        for report in reports:
            if report.neighbour:
                self._log_once(f"{report.neighbour}; training goes on", about=report.neighbour.partition(" (")[0])
        return ""

    def _log_once(self, line: str, about: str = "") -> None:
        """Log a line, unless one on the same subject (`about`, by default the line itself) was logged before."""
        if (about or line) not in self._logged:
            self._logged.add(about or line)
            self._log(line)
