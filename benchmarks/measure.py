"""How the benchmarks measure: contenders take turns, medians are compared, and a table is printed as it is measured."""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ROUNDS = 9
QUICK_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of a table."""

    what: str
    against: str
    """What it is compared with, or the unit of `measured`."""
    measured: float | None
    """None: the peer is not installed, or `failed` says why."""
    target: float | None = None
    at_most: bool = False
    """Whether the target is an upper bound."""
    note: str = ""
    failed: str = ""
    """Why there is nothing measured, or why the target is missed whatever was measured."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is; None where there is none, or nothing to compare it with."""
        if self.failed:
            return False
        if self.target is None or self.measured is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The line's texts."""
        target = "" if self.target is None else f"{'<=' if self.at_most else '>='} {self.target:.4g}"
        if self.measured is None:
            measured = f"failed: {self.failed}" if self.failed else "not installed"
        else:
            measured = f"{self.measured:,.0f}" if abs(self.measured) >= 1000 else f"{self.measured:.3g}"
        return self.what, self.against, measured, target, {True: "yes", False: "MISSED", None: ""}[self.reached]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """One that was written down."""
        return cls(**line)


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


def without_paths(reason: str) -> str:
    """A reason without the place of this checkout and of this Python: it is published."""
    return reason.replace(f"{Path(__file__).resolve().parent.parent}/", "").replace(f"{sys.prefix}/", "")


def flags(doc: str | None) -> argparse.ArgumentParser:
    """What every benchmark's command line has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short form: fewer rounds, or less of each")
    parser.add_argument("--json", type=Path, help="add the lines to this file, one JSON object each")
    return parser


class Lines:
    """The lines of a table: each is written down as soon as it is measured, and all are printed at the end.

    Args:
        file: where to write them; None: not at all.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.results: list[Result] = []

    def add(self, what: str, group: Callable[[], Iterable[Result]]) -> None:
        """Some lines. If measuring them fails, that is a line too, and the others are measured all the same."""
        print(what, file=sys.stderr, flush=True)
        try:
            for result in group():
                self.tell(result)
        except Exception as problem:
            traceback.print_exc()
            reason = without_paths((str(problem).splitlines() or [""])[0])
            self.tell(Result(what=what, against="", measured=None, failed=f"{type(problem).__name__}: {reason}"))

    def tell(self, result: Result) -> None:
        """One line."""
        self.results.append(result)
        print("  " + "  ".join(result.cells), file=sys.stderr, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(result)) + "\n")

    def end(self) -> int:
        """Print the table. The exit code: 1 where a group could not be measured; a target missed is no failure."""
        print(table(self.results), flush=True)
        return int(any(result.failed and result.measured is None for result in self.results))
