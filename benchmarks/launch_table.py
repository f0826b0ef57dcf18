"""The rows of `make bench-launch`: repetitions, what they came to, and whether that is what it must be."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hosts import Cluster
from launch_jobs import MissedError
from measure import Result


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    target: str
    """In words."""
    limit: float | None = None
    """What `value` may be at most; None: it is only told."""
    times: Sequence[float] = ()
    unit: str = "s"
    missed: Sequence[str] = ()
    """What went wrong in repetitions that did not go as they must."""
    by_median: bool = False
    """Of differences, and of what two programs take, the median counts; otherwise the 95th percentile."""
    note: str = ""

    @property
    def value(self) -> float:
        """What is compared with the limit."""
        if not self.times:
            return math.inf
        return statistics.median(self.times) if self.by_median else percentile(self.times, 0.95)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.limit is None:
            return None
        return not self.missed and self.value <= self.limit

    @property
    def measured(self) -> str:
        """In words."""
        parts = []
        if self.times:
            median, most = f"{statistics.median(self.times):.3g}", f"{percentile(self.times, 0.95):.3g}"
            unit = f" {self.unit}" if self.unit else ""
            parts.append(f"p95 {most}{unit}, median {median}, n {len(self.times)}")
        if self.missed:
            parts.append(f"{len(self.missed)} went wrong")
        return "; ".join([*parts, *([self.note] if self.note else [])])

    def as_result(self) -> Result:
        """The line of a table that all benchmarks share."""
        count = len(self.times) + len(self.missed)
        kind = f"median of {count}" if self.by_median else f"p95 of {count}"
        if self.times == [0.0] * len(self.times):  # what only has to go well is not timed
            kind = self.note or kind
        elif self.note:
            kind += f"; {self.note}"
        failed = f"{len(self.missed)} of {count} went wrong: {self.missed[0].splitlines()[0]}" if self.missed else ""
        if not count:
            return Result(what=self.what, against="", measured=None, target=self.limit, at_most=True)
        measured = self.value if self.times else None
        return Result(
            what=self.what, against=self.unit, measured=measured, target=self.limit, at_most=True, note=kind,
            failed=failed,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        value = self.value if math.isfinite(self.value) else None
        return {**vars(self), "times": list(self.times), "missed": list(self.missed), "value": value, "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows share."""

    count: int
    """Repetitions of a row."""
    width: int = 4
    """How many of those that only wait run at the same time, each on hosts of its own."""


@dataclass
class Tally:
    """The repetitions of a row."""

    what: str
    times: list[float] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, once: Callable[[], float | None]) -> None:
        """One repetition; tells of it on stderr. One without a time only has to go well."""
        try:
            taken = once()
        except (MissedError, OSError, AssertionError, ValueError) as problem:
            self.missed.append(f"{type(problem).__name__}: {problem}")
            print(f"  {self.what}: {self.missed[-1]}", file=sys.stderr, flush=True)
            return
        if taken is not None:
            self.times.append(taken)
            print(f"  {self.what}: {taken:.3f}", file=sys.stderr, flush=True)


def repeated(what: str, count: int, once: Callable[[int], float | None]) -> Tally:
    """`once(number)`, so many times."""
    tally = Tally(what)
    for number in range(count):
        tally.add(lambda number=number: once(number))
    return tally


def at_once(what: str, setting: Setting, hosts: int, once: Callable[[Cluster, int], float | None]) -> Tally:
    """As `repeated`, several at the same time: for what waits for many seconds of which the machine is idle.

    Each thread has a cluster of its own, from its begin to its end: the machines end with the thread that made them.
    """
    tally = Tally(what)
    width = min(setting.width, setting.count)

    def some(first: int) -> None:
        time.sleep(first * 1.5)  # so that they do not all start at the same time
        with Cluster(hosts) as cluster:
            for number in range(first, setting.count, width):
                tally.add(lambda number=number: once(cluster, number))

    with ThreadPoolExecutor(width) as threads:
        list(threads.map(some, range(width)))
    return tally


def percentile(times: Iterable[float], share: float) -> float:
    """The nearest rank: no value between two that were measured."""
    ordered = sorted(times)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    words = {True: "yes", False: "NO", None: ""}
    cells = [("what", "target", "measured", "met")]
    cells += [(row.what, row.target, row.measured, words[row.met]) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(cell, widths, strict=True)).rstrip() for cell in cells
    )
