"""Make docs/benchmarks.md and its pictures from what `bench.py` has written down: the same files from the same results.

python benchmarks/page.py [--results FOLDER] [--docs FOLDER]
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from measure import Result
from overview import draw_overview
from pictures import draw, drawn
from tables import TABLES, Table

HERE = Path(__file__).parent
LONGEST = 160
"""Characters of a reason."""
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
NOT_HERE = """A GPU and a TPU: nothing on this page was measured on one, and nothing on it says how fast training is
there. `make bench-gpu` measures a 124M-parameter model where there is a GPU, and is no part of this page. Nor are
networks of real machines: all hosts here are simulated on one.
"""
INTRODUCTION = """# Benchmarks

`make bench` measures every table of this page and writes the page; `make bench QUICK=1` measures short forms. One part
is measured again with `make bench-data`, `bench-train`, `bench-compiled`, `bench-model`, `bench-ngram`, `bench-launch`
or `bench-sweep`, and `make bench-page` after it, which makes the page from the results in `benchmarks/results/`.

![Speed of peers and of the bare operations over that of roxxel-dist](benchmarks/overview.png)

The blue line is roxxel-dist. An orange mark is a peer that does the same work: the further to the left, the slower. A
black mark is the limit: the bare operation, without anything around it.

## How it is measured

- **In turns.** What is compared runs in the same minutes on the same machine, round by round, so that whatever else the
  machine does falls on all of it.
- **Medians** of the rounds; where faults are repeated, the 95th percentile.
- **Ratios to a peer of the same run**, not times of another machine. A time without a peer says so by its unit.
- **CPU time of the thread** where the work is in one thread, because wall time lies on a machine that others use too;
  wall time where threads or processes work together, or waiting is what is measured.
- **Targets** stand in the programs. One that is missed is shown as MISSED. A peer that is not installed is shown as not
  installed, and what could not be measured as failed, with the reason.

In the pictures a bar is what was measured over its target. The line is the target: a bar of an upper bound (<=) must
end before it, a bar of a lower bound (>=) must cross it. Bars that miss are orange and hatched, and say MISSED. Targets
of zero have no bar.

### Not measured

"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a table."""

    begin: dict[str, Any]
    results: Sequence[Result]
    end: dict[str, Any]
    """Empty: it was stopped before its end."""

    @property
    def failed(self) -> str:
        """Why the program that measures it did not come to its end."""
        return shorten(self.end.get("failed", ""), LONGEST) if self.end else "stopped before its end"


def read(folder: Path) -> dict[str, Measured]:
    """The tables that were measured, by name."""
    found = {}
    for table in TABLES:
        file = folder / f"{table.name}.jsonl"
        if file.exists():
            found[table.name] = parse(file.read_text(encoding="utf-8"))
    return found


def parse(text: str) -> Measured:
    """One file of results."""
    lines = [json.loads(line) for line in text.splitlines()]
    ends = [line["end"] for line in lines if "end" in line]
    results = [Result.of(line) for line in lines if "what" in line]
    return Measured(begin=lines[0]["begin"], results=results, end=ends[-1] if ends else {})


def page(found: dict[str, Measured]) -> str:
    """All of the page."""
    parts = [INTRODUCTION + NOT_HERE, "## The machine\n", machines(found.values()), "## In short\n", summary(found)]
    for table in TABLES:
        parts += [f"## {table.title}\n", section(table, found.get(table.name))]
    return "\n".join(parts)


def machines(found: Iterable[Measured]) -> str:
    """What the tables were measured on: one line for each machine and set of versions."""
    lines = []
    for one in found:
        about = one.begin
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        line = (
            f"- {about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB of memory, Linux {about['kernel']}, "
            f"Python {about['python']}, {versions}.\n"
        )
        if line not in lines:
            lines.append(line)
    return "".join(lines) or "Nothing was measured yet.\n"


def summary(found: dict[str, Measured]) -> str:
    """How many targets are reached, and which are not; what could not be measured."""
    named = {table.name: table.title for table in TABLES}
    told = [(named[name], result) for name, one in found.items() for result in one.results]
    reached = [result for _, result in told if result.reached]
    missed = [(title, result) for title, result in told if result.reached is False and result.measured is not None]
    lines = [f"{len(reached)} of the {len(reached) + len(missed)} targets that were measured are reached.\n"]
    for title, result in missed:
        what, against, measured, target, _ = cells(result)
        unit = f" {against}" if against else ""
        lines.append(f"\n- MISSED: {title}: {what}: {measured}{unit}, target {target}{_because(result)}")
    for title, result in told:
        if result.measured is None:
            what, against, reason, *_ = cells(result)
            lines.append(f"\n- {title}: {what}{', ' if against else ''}{against}: {reason}")
    for name, one in found.items():
        if one.failed:
            lines.append(f"\n- {named[name]}: failed: {plain(one.failed)}")
    return "".join(lines) + "\n"


def section(table: Table, found: Measured | None) -> str:
    """One table: the question, how and when it was measured, its lines, its picture, and what it leaves out."""
    lines = [f"{table.question}\n", f"{table.how}\n"]
    if found is None:
        lines.append(f"**Not measured yet**: `make bench-{table.part}` does.\n")
    else:
        lines += [form(table, found), rows(found.results)]
        if found.failed:
            lines.append(f"**failed: {plain(found.failed)}**\n")
        if drawn(found.results):
            lines.append(f"![{table.title}: measured over target](benchmarks/{table.name}.png)\n")
        if table.misses and any(result.reached is False for result in found.results):
            lines.append(f"Why targets are missed: {table.misses}\n")
    return "\n".join([*lines, f"Not measured: {table.left_out}\n"])


def form(table: Table, found: Measured) -> str:
    """Which form it is, when, of what, and how busy the machine was."""
    begin, end = found.begin, found.end
    full = "Full form" if table.quick else "The only form"
    which = f"Short form ({table.quick})" if begin["quick"] else full
    took = f" in {end['seconds'] / 60:.1f} minutes" if end else ""
    loads = f"{begin['load']:.1f} at the start" + (f" and {end['load']:.1f} at the end" if end else "")
    busy = "; other work ran on the machine" if begin["load"] > begin["cores"] / 2 else ""
    return f"{which}, measured {begin['date']}{took}, commit {begin['commit']}. Load average {loads}{busy}.\n"


def rows(results: Sequence[Result]) -> str:
    """The lines as a table of Markdown."""
    lines = [
        "| what | measured | against, or unit | target | measured / target | |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    for result in results:
        what, against, measured, target, reached = cells(result)
        share = ratio(result)
        over = "" if share is None else f"{share:.2f}"
        said = f"**{reached}**" if result.reached is False else reached
        if result.note and result.measured is not None:
            against = f"{against} ({plain(result.note)})"
        lines.append(f"| {what} | {measured} | {against.strip()} | {target} | {over} | {said}{_because(result)} |")
    return "\n".join(lines) + "\n"


def _because(result: Result) -> str:
    """Why a line that was measured is missed all the same."""
    return f": {plain(shorten(result.failed, LONGEST))}" if result.failed and result.measured is not None else ""


def cells(result: Result) -> tuple[str, ...]:
    """The line's texts, as they may stand in a table."""
    *texts, reached = (plain(shorten(cell, LONGEST)) for cell in result.cells)
    words = {True: "reached", False: "failed" if result.measured is None else "MISSED", None: ""}
    return (*texts, words[result.reached] if reached else "")


def ratio(result: Result) -> float | None:
    """Measured over target."""
    if result.measured is None or not result.target:
        return None
    return result.measured / result.target


def plain(text: str) -> str:
    """A text that Markdown and HTML leave as it is, in one line."""
    for sign, word in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("_", "\\_"), ("\n", " ")):
        text = text.replace(sign, word)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    found = read(asked.results)
    (asked.docs / "benchmarks").mkdir(parents=True, exist_ok=True)
    (asked.docs / "benchmarks.md").write_text(page(found), encoding="utf-8")
    overview = {name: one.results for name, one in found.items()}
    draw_overview(overview, asked.docs / "benchmarks" / "overview.png")
    for table in TABLES:
        picture = asked.docs / "benchmarks" / f"{table.name}.png"
        if table.name in found and drawn(found[table.name].results):
            draw(table.title, found[table.name].results, picture)
        else:
            picture.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
