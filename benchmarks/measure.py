"""How the benchmarks measure: contenders take turns, medians are compared, and only ratios are printed."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of a table."""

    what: str
    against: str
    """What it is compared with, or the unit of `measured`."""
    measured: float | None
    """None: the peer is not installed."""
    target: float | None = None
    at_most: bool = False
    """Whether the target is an upper bound."""

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The line's texts."""
        measured = "not installed" if self.measured is None else f"{self.measured:.3g}"
        if self.target is None:
            return self.what, self.against, measured, "", ""
        target = f"{'<=' if self.at_most else '>='} {self.target:g}"
        if self.measured is None:
            return self.what, self.against, measured, target, ""
        reached = self.measured <= self.target if self.at_most else self.measured >= self.target
        return self.what, self.against, measured, target, "yes" if reached else "NO"


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    calls: int,
    clock: Callable[[], float] = time.thread_time,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """Median seconds a call of each, measured in turns so that what else the machine does falls on all of them.

    Args:
        contenders: what to call.
        calls: how often in one round.
        clock: the CPU time of this thread, or the wall clock for contenders that have threads of their own.
        rounds: how many.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            start = clock()
            for _ in range(calls):
                call()
            times[name].append((clock() - start) / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def ratios(what: str, mine: str, times: Mapping[str, float], against: Mapping[str, float | None]) -> Iterable[Result]:
    """How many times as fast as each of the others `mine` is; the values of `against` are the targets."""
    for name, target in against.items():
        measured = times[name] / times[mine] if name in times else None
        yield Result(what=what, against=f"x {name}", measured=measured, target=target)


def table(results: Iterable[Result]) -> str:
    """The lines as a table for people."""
    rows = [("what", "against", "measured", "target", "reached"), *(result.cells for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
