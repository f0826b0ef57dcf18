"""The one table of benchmarks/README.md, of the files in benchmarks/results/: at most 20 numbers.

    python benchmarks/summary.py [--write]

Prints the table; with --write it replaces the table on the page. A number whose result is not there is "not measured".
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Result

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE / "README.md"
BEGIN, END = "<!-- the table of benchmarks/summary.py begins -->\n", "<!-- the table ends -->\n"
STEPS_BEGIN, STEPS_END = "<!-- the table of steps begins -->\n", "<!-- the table of steps ends -->\n"
MOST = 20
"""Numbers on the page."""
THREAD = "CPU time of the calling thread, which has no worker threads or processes; nor has the peer"
LINK = "link of 50 ms and 20 MB/s, simulated in front of an S3 server on this machine"
CORES = "on two CPU cores, which are also the devices, so this is no claim about accelerators"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Results of one file.

    Attributes:
        file: its name without .jsonl.
        what: a regular expression that `Result.what` fits from its begin to its end.
        against: the same of `Result.against`.
        note: a regular expression; the number is its first group in the note of the result. Empty: the number that was
            measured.
        only: a regular expression that the note must have.
    """

    file: str
    what: str
    against: str = ".*"
    note: str = ""
    only: str = ""

    def number(self, results: Mapping[str, Sequence[Result]]) -> float | None:
        """The mean over all results that fit; None where there is none, or one was not measured."""
        numbers = []
        for result in self.fitting(results):
            found = re.search(self.note, result.note) if self.note else None
            numbers.append(float(found[1]) if found else None if self.note else result.measured)
        known = [number for number in numbers if number is not None]
        return statistics.mean(known) if known and len(known) == len(numbers) else None

    def fitting(self, results: Mapping[str, Sequence[Result]]) -> list[Result]:
        """The results that fit, in the order of the file."""
        return [
            one
            for one in results.get(self.file, ())
            if re.fullmatch(self.what, one.what)
            and re.fullmatch(self.against, one.against)
            and re.search(self.only, one.note)
        ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        asked: what a user would ask for.
        source: where the number is.
        unit: after the number.
        beside: the peer or the limit; `{}` is the number of `other`.
        other: where the peer's number is.
        conditions: what it holds for.
    """

    asked: str
    source: Source
    unit: str
    beside: str
    other: Source | None = None
    conditions: str

    def line(self, results: Mapping[str, Sequence[Result]]) -> str:
        """The row as Markdown."""
        number, other = self.source.number(results), self.other and self.other.number(results)
        measured = "not measured" if number is None else f"**{number:.3g}** {self.unit}".rstrip()
        beside = self.beside.replace("{}", "not measured" if other is None else f"{other:.3g}")
        return f"| {self.asked} | {measured} | {beside} | {self.conditions} |"


LAUNCH, LOOP, READ, REMOTE = "launch", "train_loop", "data_read", "remote_data"
MIXINT, CURVES = "sweep_mixint", "sweep_schedulers"
ROWS = (
    Row(
        asked="Start of a job: what the launcher adds until the first step", unit="s", beside="limit 0.3 s",
        source=Source(file=LAUNCH, what="first step under the launcher.*2 hosts by ssh"),
        conditions="2 ranks on 2 hosts over ssh (network namespaces of one machine), over the same ranks started by "
        "hand; wall time, median of 10",
    ),
    Row(
        asked="kill -9 of a rank: until every rank of the job has ended", unit="s", beside="torchrun (c10d): {} s",
        source=Source(file=LAUNCH, what="kill -9 of a rank, 2 hosts of 2 ranks: roxxel-dist"),
        other=Source(file=LAUNCH, what=".*over torchrun, c10d", note=r"it takes ([\d.]+) s"),
        conditions="2 simulated hosts of 2 ranks; wall time, median of 10. In 4 of 10 runs of torchrun, ranks were "
        "alive after 30 s",
    ),
    Row(
        asked="The cable of a host is cut: until every rank has ended", unit="s", beside="limit 15 s",
        source=Source(file=LAUNCH, what="link of a host cut, all gone: 4 hosts"),
        conditions="4 simulated hosts; wall time, 95th percentile of 10; a cut of 5 s ends nothing",
    ),
    Row(
        asked="kill -9 of a rank: what the launcher adds until the first new step", unit="s", beside="limit 2 s",
        source=Source(file=LAUNCH, what="restart after a kill -9 of a rank.*2 hosts by ssh"),
        conditions="2 ranks on 2 simulated hosts, over the new ranks' own start; wall time, 95th percentile of 10",
    ),
    Row(
        asked="Shuffled batches of 16 x 1,025 tokens to numpy", unit="x", beside="torch DataLoader = 1",
        source=Source(file=READ, what="16x1025 to numpy", against="x torch DataLoader"), conditions=THREAD,
    ),
    Row(
        asked="The same batches", unit="x", beside="grain (MapDataset by index) = 1",
        source=Source(file=READ, what="16x1025 to numpy", against="x grain"), conditions=THREAD,
    ),
    Row(
        asked="First batch at step 1,000,000 of a remote corpus of 10.7 TB", unit="s", beside="limit 2 s",
        source=Source(file=REMOTE, what="cold first batch at step 1,000,000 .*", against="s"),
        conditions=f"64 rows of 10,000 shards, nothing cached; {LINK}; wall time",
    ),
    Row(
        asked="Rows of a remote corpus as fast as it goes", unit="x", beside="grain over fsspec, 64 threads = 1",
        source=Source(file=REMOTE, what="the same rows as fast as.*", against="x grain over fsspec, 64 threads"),
        conditions=f"{LINK}; wall time",
    ),
    Row(
        asked="Bytes fetched over bytes used", unit="", beside="1; limit 1.5",
        source=Source(file=REMOTE, what="a pass over .*", against="bytes fetched / bytes used"),
        conditions="one pass over 299 MB at random with a cache of 74 MB",
    ),
    Row(
        asked="Building a data set with a BPE tokenizer", unit="x", beside="the tokenizer's own encode_batch = 1",
        source=Source(file="data_build", what="data build of .*", against=".*wall time"),
        conditions="24 MiB of text, whole processes on two CPU cores; wall time",
    ),
    Row(
        asked="A step of the trainer, with logs and checkpoints", unit="x", beside="the bare compiled step = 1",
        source=Source(file=LOOP, what="wall clock, logging and checkpointing"),
        conditions=f"a step of 9 ms; wall time {CORES}",
    ),
    Row(
        asked="A save stops the training for", unit="ms", beside="a synchronous save: {} ms",
        source=Source(file=LOOP, what="async save of 240 MB, taken from the loop", against="ms"),
        other=Source(file=LOOP, what="synchronous save of 240 MB"),
        conditions=f"a state of 240 MB, to the page cache of a local disk; wall time {CORES}",
    ),
    Row(
        asked="FLOPs of all devices together over those of one", unit="x", beside="1, the limit",
        source=Source(file="compiled", what="h100:8x8, .*", against=".*124M.*"),
        conditions="64 H100, 124M parameters, `fsdp`, a row a device, bfloat16; by the compiler of the GPUs, not run",
    ),
    Row(
        asked="Memory of a device with `fsdp`", unit="GB", beside="80 GB, the device",
        source=Source(file="compiled", what="h100:1x8, .*", against=".*1.3B.*", note=r"([\d.]+) GB of a device"),
        conditions="8 H100, 1.3B parameters, a row a device, `gradient_checkpointing`; by the compiler, not run",
    ),
    Row(
        asked="Sweeps: pairs of searches that `bayes` wins, best of 50 trials", unit="of all",
        beside="Optuna's multivariate TPE wins the others",
        source=Source(
            file=MIXINT, what="dimension (5|10|20), best of 50: pairs won", against="multivariate TPE",
            only="instances 5 to 9",
        ),
        conditions="COCO's bbob-mixint, 120 pairs in each of 5, 10 and 20 dimensions, instances that tuned nothing",
    ),
    Row(
        asked="Sweeps: the same", unit="of all", beside="Optuna's GPSampler wins the others",
        source=Source(file=MIXINT, what="dimension (5|10|20), best of 50: pairs won", against="GPSampler"),
        conditions="likewise; 24 pairs in each of 5, 10 and 20 dimensions",
    ),
    Row(
        asked="Sweeps: distance to the best loss, 1/5 of the steps of 50 full trials, `bayes` with `asha`", unit="",
        beside="Optuna's TPE with successive halving: {}",
        source=Source(file=CURVES, what="all kinds, 1/5 of the steps", against="asha, bayes"),
        other=Source(file=CURVES, what="all kinds, 1/5 of the steps", against="Optuna TPE, successive halving"),
        conditions="0 is the best loss, 1 a full trial at random; made learning curves of 6 kinds that tuned nothing; "
        "median over all instances",
    ),
    Row(
        asked="Sweeps: the same after 50 full trials, `bayes` without `asha`", unit="",
        beside="Optuna's TPE without pruning: {}",
        source=Source(file=CURVES, what="all kinds, all of the steps", against="full trials, bayes"),
        other=Source(file=CURVES, what="all kinds, all of the steps", against="Optuna TPE, full trials"),
        conditions="likewise",
    ),
    Row(
        asked="A trial that does nothing costs the driver of a sweep", unit="ms",
        beside="limit 10 ms; it is {} x Ray Tune's",
        source=Source(file="sweep_driver", what="driver, a no-op trial", against="ms CPU"),
        other=Source(file="sweep_driver", what="driver, a no-op trial", against="x Ray Tune"),
        conditions="CPU time of the driver's process, without the search; one node",
    ),
    Row(
        asked="A suggestion of `bayes` after 150 trials", unit="ms", beside="limit 250 ms",
        source=Source(file="sweep_engines", what="surface: a suggestion after 150 trials"),
        conditions="22 parameters; CPU time of one thread",
    ),
)  # fmt: skip


def read(folder: Path = RESULTS) -> tuple[dict[str, list[Result]], dict[str, dict[str, Any]]]:
    """The results of each file, and what it says of its machine, by the file's name without .jsonl."""
    results, about = {}, {}
    for file in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        results[file.stem] = [Result.of(line) for line in lines if "what" in line]
        about[file.stem] = lines[0]["begin"]
    return results, about


def table(folder: Path = RESULTS) -> str:
    """The table as Markdown, and below it when and on what machine each part was measured."""
    results, about = read(folder)
    lines = ["| What | Measured | Beside | Conditions |", "|---|---|---|---|", *(row.line(results) for row in ROWS), ""]
    for name in dict.fromkeys(row.source.file for row in ROWS):
        if one := about.get(name):
            form = ", short form" if one["quick"] else ""
            lines.append(
                f"- `{name}`{form}: {one['date']}, commit {one['commit']}, {one['cores']} cores ({one['cpu']}), "
                f"load {one['load']:.0f}, jax {one['versions'].get('jax', 'none')}"
            )
    return "\n".join(lines) + "\n"


PROGRAMS = {"": "roxxel-dist", "plain": "flax and optax", "MaxText": "MaxText"}
"""By what a note of `compiled.py` calls them."""


def steps(folder: Path = RESULTS) -> str:
    """The table of the steps of `compiled.py` as Markdown: ours, and those beside it."""
    lines = ["| Step | By | GB | TFLOP | MB sent | Kernels | ms | GB of memory |", "|---|---|---|---|---|---|---|---|"]
    last = ""
    for result in read(folder)[0].get("compiled", ()):
        step, _, measured = result.what.rpartition(": ")
        for text in result.note.split("; ") if measured == "bytes" else ():
            by, numbers = re.split(r"\d", text, maxsplit=1)[0].strip(), re.findall(r"[\d.,]*\d", text)
            lines.append(f"| {'' if step == last else step} | {PROGRAMS[by]} | {' | '.join(numbers)} |")
            last = step
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it on the page")
    text = table()
    print(text, end="")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        for part, begin, end in ((text, BEGIN, END), (steps(), STEPS_BEGIN, STEPS_END)):
            before, after = page.index(begin) + len(begin), page.index(end)
            page = page[:before] + part + page[after:]
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
