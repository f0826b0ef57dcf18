"""The page of benchmarks: made from the recorded results, with missed targets, absences and failures marked."""

import json
import sys
from pathlib import Path

import matplotlib.image
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench
import overview
import page
import pictures
from measure import Lines, Result
from tables import TABLES

ABOUT = {"date": "2026-01-02 03:04 UTC", "commit": "abc", "cores": 2, "cpu": "a processor", "memory_gib": 8}
ABOUT |= {"kernel": "6.1", "python": "3.11.7", "versions": {"jax": "0.10.2"}, "load": 0.4}
RESULTS = [
    Result(what="reading", against="x a copy", measured=0.5, target=0.2),
    Result(what="first batch", against="s", measured=0.9, target=0.3, at_most=True),
    Result(what="reading", against="x another_loader", measured=None, target=2.5),
    Result(what="a kill", against="s", measured=0.4, target=1, at_most=True, failed="1 of 3 went wrong: a | rank"),
    Result(what="a peer", against="", measured=None, failed="OSError: no such file"),
    Result(what="steps lost", against="", measured=0.0, target=0, at_most=True),
    Result(what="size", against="MB", measured=12.0),
]


def written(folder, results, name="data_read", **end):
    lines = Lines(folder / "lines.jsonl")
    for result in results:
        lines.tell(result)
    begin = json.dumps({"begin": ABOUT | {"table": name, "quick": True}})
    end = json.dumps({"end": {"seconds": 90.0, "load": 3.5} | end})
    text = f"{begin}\n{(folder / 'lines.jsonl').read_text()}{end}\n"
    (folder / "lines.jsonl").unlink()
    (folder / f"{name}.jsonl").write_text(text)
    return text


def line_of(text, what):
    return next(line for line in text.splitlines() if line.startswith(f"| {what}"))


def test_says_which_targets_are_missed_what_is_absent_and_what_failed(tmp_path):
    written(tmp_path, RESULTS)
    text = page.page(page.read(tmp_path))
    assert line_of(text, "reading") == "| reading | 0.5 | x a copy | >= 0.2 | 2.50 | reached |"
    assert line_of(text, "first batch") == "| first batch | 0.9 | s | &lt;= 0.3 | 3.00 | **MISSED** |"
    assert "| reading | not installed | x another\\_loader | >= 2.5 |  |  |" in text
    assert line_of(text, "a kill").endswith("| 0.40 | **MISSED**: 1 of 3 went wrong: a \\| rank |")
    assert line_of(text, "a peer") == "| a peer | failed: OSError: no such file |  |  |  | **failed** |"
    assert line_of(text, "steps lost") == "| steps lost | 0 |  | &lt;= 0 |  | reached |"
    assert line_of(text, "size") == "| size | 12 | MB |  |  |  |"
    assert "- MISSED: Reading data: first batch: 0.9 s, target &lt;= 0.3" in text
    assert "2 of the 4 targets that were measured are reached." in text
    assert "- Reading data: reading, x another\\_loader: not installed" in text
    assert "- Reading data: a peer: failed: OSError: no such file" in text


def test_says_which_form_a_table_is_and_how_busy_the_machine_was(tmp_path):
    written(tmp_path, RESULTS)
    text = page.page(page.read(tmp_path))
    assert "Short form (3 rounds, not 9), measured 2026-01-02 03:04 UTC in 1.5 minutes, commit abc." in text
    assert "Load average 0.4 at the start and 3.5 at the end." in text
    assert "- 2 cores (a processor), 8 GiB of memory, Linux 6.1, Python 3.11.7, jax 0.10.2." in text


def test_tables_that_were_not_measured_or_did_not_end_are_told(tmp_path):
    written(tmp_path, RESULTS[:1], failed="ImportError: no <jax>")
    whole = written(tmp_path, RESULTS[:1], name="decode")
    (tmp_path / "decode.jsonl").write_text("\n".join(whole.splitlines()[:-1]) + "\n")
    text = page.page(page.read(tmp_path))
    assert "**failed: ImportError: no &lt;jax>**" in text
    assert "- Decoding with a cache: failed: stopped before its end" in text
    assert text.count("**Not measured yet**") == len(TABLES) - 2


def test_a_picture_has_a_bar_for_each_target_that_was_measured_and_another_colour_for_the_missed(tmp_path):
    pictures.draw("Reading data", RESULTS, tmp_path / "both.png")
    pictures.draw("Reading data", RESULTS[:1], tmp_path / "reached.png")
    assert [result.what for result in pictures.drawn(RESULTS)] == ["reading", "first batch", "a kill"]
    missed = [int(pictures.MISSED[at : at + 2], 16) for at in (1, 3, 5)]

    def has(name):
        pixels = (matplotlib.image.imread(tmp_path / name)[..., :3] * 255).round()
        return bool((pixels == missed).all(-1).any())

    assert has("both.png")
    assert not has("reached.png")


def test_a_group_that_fails_is_a_line_and_the_next_is_measured(tmp_path, capsys):
    def broken():
        yield RESULTS[0]
        raise ValueError("no such thing\nmore of it")

    lines = Lines(tmp_path / "lines.jsonl")
    lines.add("a broken group", broken)
    lines.add("a good group", lambda: RESULTS[1:2])
    assert lines.end() == 1
    seen = [Result.of(json.loads(line)) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    failed = Result(what="a broken group", against="", measured=None, failed="ValueError: no such thing")
    assert seen == [RESULTS[0], failed, RESULTS[1]]
    assert "no such thing" in capsys.readouterr().out


def test_a_program_that_falls_before_its_first_line_is_written_down_as_failed(tmp_path):
    table = next(table for table in TABLES if table.name == "decode")
    written(tmp_path, RESULTS, name="decode")
    assert bench.measure(table, True, tmp_path, programs=tmp_path) == 2  # where there is none
    found = page.parse((tmp_path / "decode.jsonl").read_text())
    assert found.results == []
    assert "No such file" in found.failed
    assert found.begin["quick"]
    assert found.begin["cores"] >= 1


def test_the_page_of_the_repository_is_made_from_the_results_that_stand_beside_it():
    found = page.read(page.RESULTS)
    assert (page.DOCS / "benchmarks.md").read_text() == page.page(found), "run `make bench-page`"
    pictures_there = {file.stem for file in (page.DOCS / "benchmarks").iterdir()}
    assert pictures_there == {"overview"} | {name for name, one in found.items() if pictures.drawn(one.results)}


@pytest.mark.parametrize("one", overview.COMPARISONS, ids=lambda one: one.title)
def test_the_picture_at_the_top_has_every_peer_and_limit_that_it_names(one):
    results = page.read(page.RESULTS)[one.table].results
    assert set(one.speeds(results, one.peers)) == set(one.peers.values())
    assert set(one.speeds(results, one.limit)) == set(one.limit.values())


def test_the_speed_of_a_peer_is_over_ours(tmp_path):
    one = overview.Comparison(title="x", table="t", what="a batch", peers={"x it": "it", "of it": "other"}, limit={})
    results = [
        Result(what="a batch", against="x it", measured=4.0, target=2.0),  # we are four times as fast
        Result(what="a batch", against="of it", measured=0.5, target=1.0, at_most=True),  # in half of its time
        Result(what="a batch, later", against="x it", measured=9.0),
    ]
    assert one.speeds(results, one.peers) == {"it": 0.25, "other": 0.5}
    assert not overview.draw_overview({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_has_its_program(table):
    assert (ROOT / "benchmarks" / f"{table.name}.py").exists()
