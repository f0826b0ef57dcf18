"""The programs of benchmarks/: their results, and that benchmarks/README.md has these numbers."""

import json
import re
import sys
from pathlib import Path

import pytest
from tables import one_test

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import bench
import summary
from measure import Lines, Result

ABOUT = {"date": "2026-01-02 03:04 UTC", "commit": "abc", "cores": 2, "cpu": "a processor", "quick": True}
ABOUT |= {"versions": {"jax": "0.10.2"}, "load": 0.4}


def written(folder: Path, name: str, *results: Result) -> None:
    lines = Lines(folder / f"{name}.jsonl")
    (folder / f"{name}.jsonl").write_text(json.dumps({"begin": ABOUT}) + "\n")
    for result in results:
        lines.tell(result)


def test_the_page_has_the_table_of_the_results() -> None:
    page = summary.PAGE.read_text(encoding="utf-8")
    between = page[page.index(summary.BEGIN) + len(summary.BEGIN) : page.index(summary.END)]
    assert between == summary.table(), "run `make bench-table`"


def test_the_page_has_the_table_of_the_steps() -> None:
    page = summary.PAGE.read_text(encoding="utf-8")
    between = page[page.index(summary.STEPS_BEGIN) + len(summary.STEPS_BEGIN) : page.index(summary.STEPS_END)]
    assert between == summary.steps(), "run `make bench-table`"


def test_a_step_has_a_row_for_each_that_compiled_it(tmp_path: Path) -> None:
    figures = "117.6 GB, 13.30 TFLOP, 944 MB sent, 1602 kernels, 29.9 ms, 3.9 GB of memory"
    numbers = "117.6 | 13.30 | 944 | 1602 | 29.9 | 3.9"
    one, other = (
        Result(what="v5e:2x2, 124M, 4 x 1,024: bytes", against=against, measured=0.9, note=note)
        for against, note in (
            ("x flax and optax alone", f"{figures}; plain {figures}"),
            ("x MaxText", f"MaxText {figures}"),
        )
    )
    flops = Result(what="v5e:2x2, 124M, 4 x 1,024: FLOPs", against="x flax and optax alone", measured=1.0)
    failed = Result(what="h100:1x8: 124M", against="", measured=None, failed="TimeoutError: not compiled")
    written(tmp_path, "compiled", one, flops, other, failed)
    assert summary.steps(tmp_path).splitlines()[2:] == [
        f"| v5e:2x2, 124M, 4 x 1,024 | roxxel-dist | {numbers} |",
        f"|  | flax and optax | {numbers} |",
        f"|  | MaxText | {numbers} |",
    ]


def test_the_table_has_at_most_twenty_numbers_each_with_a_result_a_peer_or_limit_and_conditions() -> None:
    results, _ = summary.read()
    assert len(summary.ROWS) <= summary.MOST
    for row in summary.ROWS:
        assert row.source.number(results) is not None, row.asked
        assert row.other is None or row.other.number(results) is not None, row.asked
        assert row.beside, row.asked
        assert row.conditions, row.asked


def test_the_page_has_the_medians_of_the_schedulers() -> None:
    results, _ = summary.read()
    row = r"^\| (.*) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    page = summary.PAGE.read_text(encoding="utf-8")
    rows = re.findall(row, page.partition("## Schedulers of sweeps")[2].partition("\n## ")[0], re.MULTILINE)
    said = {name: list(map(float, numbers)) for name, *numbers in rows}
    measured: dict[str, list[float]] = {}
    for result in results["sweep_schedulers"]:
        if result.what.startswith("all kinds"):
            assert result.measured is not None
            measured.setdefault(result.against, []).append(float(f"{result.measured:.2g}"))
    assert said == measured


def test_a_number_is_that_of_its_result_or_of_its_note(tmp_path: Path) -> None:
    grain = Result(what="16x1025 to numpy", against="x grain", measured=19.84, target=12)
    absent = Result(what="16x1025 to numpy", against="x torch DataLoader", measured=None, target=2.5)
    note = "3.35 GB of a device, 4% of its memory"
    compiled = Result(what="h100:1x8, 8 x", against="x one device, 1.3B parameters", measured=1.0, note=note)
    written(tmp_path, "data_read", grain, absent)
    written(tmp_path, "compiled", compiled)
    text = summary.table(tmp_path)
    assert "| **19.8** x | grain (MapDataset by index) = 1 |" in text
    assert "| not measured | torch DataLoader = 1 |" in text
    assert "| **3.35** GB | 80 GB, the device |" in text
    assert "- `data_read`, short form: 2026-01-02 03:04 UTC, commit abc, 2 cores (a processor), load 0, jax" in text


def test_a_group_that_fails_is_a_line_and_the_next_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, second = (Result(what=what, against="s", measured=0.5, target=0.2) for what in ("reading", "first batch"))

    def broken():
        yield first
        raise ValueError("no such thing\nmore of it")

    lines = Lines(tmp_path / "lines.jsonl")
    lines.add("a broken group", broken)
    lines.add("a good group", lambda: [second])
    assert lines.end() == 1
    seen = [Result.of(json.loads(line)) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    failed = Result(what="a broken group", against="", measured=None, failed="ValueError: no such thing")
    assert seen == [first, failed, second]
    assert "no such thing" in capsys.readouterr().out


def test_a_program_that_falls_before_its_first_line_is_written_down_as_failed(tmp_path: Path) -> None:
    program = next(program for program in bench.PROGRAMS if program.name == "decode")
    written(tmp_path, "decode", Result(what="a token", against="s", measured=1.0))
    assert bench.measure(program, True, tmp_path, programs=tmp_path) == 2  # where there is none
    begin, end = map(json.loads, (tmp_path / "decode.jsonl").read_text().splitlines())
    assert begin["begin"]["quick"]
    assert begin["begin"]["cores"] >= 1
    assert "No such file" in end["end"]["failed"]


@one_test("program", bench.PROGRAMS)
def test_every_program_is_there(program: bench.Program) -> None:
    assert (ROOT / "benchmarks" / f"{program.name}.py").exists()
