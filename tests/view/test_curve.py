"""Pictures show what happened: curves of any length, in every view, however a run was watched."""

import contextlib
import io
import json
import math
import os
import random
from dataclasses import replace

import pytest
from browser import data_of

from roxxel_dist.cli import main
from roxxel_dist.run.report import read_runs
from roxxel_dist.sweep.study.journal import Trial
from roxxel_dist.train.log.csv_jsonl import Tail
from roxxel_dist.view import run as run_file
from roxxel_dist.view.curve import MOST, Curve, Curves, curve_of, points_of, reduce_buckets
from roxxel_dist.view.frame import Look, chart, frame
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web.sections import LISTED_BUCKETS, columns, sections

SPIKE = 9.0


def rows_of(count, every=5, seed=0):
    """Rows with noise, a spike in the middle of each metric, and a validation every 20 rows."""
    noise, rows = random.Random(seed), []
    for number in range(1, count + 1):
        row = {
            "step": number * every,
            "train_loss": 3 + noise.random(),
            "tokens": 64 * number,
            "own/aux": noise.random(),
        }
        if number % 20 == 0 or number == count // 2:
            row["val_loss"] = 4 + noise.random()
        if number == count // 2:
            row |= {"train_loss": SPIKE, "val_loss": SPIKE, "own/aux": SPIKE, "lr": SPIKE, "ms_per_step": SPIKE}
        rows.append({"lr": 0.001, "ms_per_step": 7.0} | row)
    return rows


def same(one, other):
    """Whether two states of a run are the same, whatever the order of additions."""
    curves = [{name: fields(buckets) for name, buckets in state.buckets.items()} for state in (one, other)]
    return curves[0] == curves[1] and replace(one, buckets={}) == replace(other, buckets={})


def write(run, rows, mode="w"):
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return run


def fields(buckets):
    """All of buckets but their sums, whose last digit depends on the order of the additions."""
    return [(bucket[:3], bucket[4:]) for bucket in buckets]


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize(
    "count", [1, 2, MOST - 1, MOST, MOST + 1, 5 * MOST, pytest.param(20_000, marks=pytest.mark.long)]
)
def test_a_curve_depends_on_its_rows_and_not_on_how_they_came(count, every):
    rows, noise = rows_of(count, every), random.Random(1)
    whole = Curves(("step",))
    whole.add(rows)
    one_by_one, portions, place = Curves(("step",)), Curves(("step",)), 0
    for row in rows:
        one_by_one.add([row])
    while place < count:
        size = noise.choice((1, 7, 500, 3000))
        portions.add(rows[place : place + size])
        place += size
    for name, curve in whole.curves.items():
        buckets = curve.buckets
        assert len(buckets) <= MOST
        for other in (one_by_one, portions):
            found = other.curves[name].buckets
            assert fields(found) == fields(buckets)
            assert [bucket.mean for bucket in found] == pytest.approx([bucket.mean for bucket in buckets])
        values = {row["step"]: row[name] for row in rows if name in row}
        assert sum(bucket.rows for bucket in buckets) == len(values)
        assert min(bucket.low for bucket in buckets) == min(values.values())
        assert max(bucket.high for bucket in buckets) == max(values.values())
        assert all(values[step] == value for step, value in points_of(buckets)), "points are rows"
        if len(values) <= MOST:
            assert points_of(buckets) == sorted(values.items()), "a short one is exact"


def test_buckets_are_as_dense_at_every_age():
    rows = rows_of(10_000)
    curves = Curves(("step",))
    for row in rows:
        curves.add([row])
    counts = [bucket.rows for bucket in curves.curves["train_loss"].buckets]
    assert MOST / 2 < len(counts) <= MOST
    assert max(counts[:-1]) - min(counts[1:-1]) <= 1
    low, high = ([f(b) for b in curves.curves["train_loss"].buckets[1:-1]] for f in (lambda b: b.low, lambda b: b.high))
    assert max(low) < 3.5 < min(high), "noise is a band all along"


def pictures(run, tmp_path):
    """The largest value of each metric, by view."""
    state, brief = RunReader(run).read(), RunReader(run).read(brief=True)
    seen = {}
    for metric, points in state.curves.items():
        seen["state", metric] = max(value for _, value in points)
    for name, given in (("page", sections(state)), ("list", sections(brief, brief=True))):
        for section, text in given.items():
            if section.startswith("curve/"):
                seen[name, section[6:]] = max(value for column in json.loads(text)[1:] for value in column)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["top", "--json", str(run)]) == 0
    for metric, points in json.loads(out.getvalue())[0]["curves"].items():
        seen["json", metric] = max(value for _, value in points)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    (item,) = data_of((tmp_path / "report" / "report.html").read_text())["items"].values()
    for section, curve in item.items():
        if section.startswith("curve/"):
            seen["report", section[6:]] = max(value for column in curve[1:] for value in column)
    for metric in ("train_loss", "val_loss"):
        seen["png", metric] = max(value for _, value in read_runs([run])[0].points(metric))
    top = [line.plain for line in frame([state], Look(width=100, height=30))]
    seen["terminal", "train_loss"] = next(float(line.split("│")[0]) for line in top if line.lstrip().startswith("9 │"))
    (listed,) = chart([brief.losses], 100, 10)[:1]
    seen["terminal list", "train_loss"] = float(listed[0][0].strip(" │"))
    return seen


@pytest.mark.parametrize("count", [600, 5000])
def test_a_spike_of_one_row_is_in_every_picture(tmp_path, count):
    seen = pictures(write(tmp_path / "run", rows_of(count)), tmp_path)
    metrics = {"train_loss", "val_loss", "own/aux", "lr", "ms_per_step"}
    assert {name for view, name in seen if view == "report"} >= metrics
    assert {key: value for key, value in seen.items() if key[1] in metrics and value != SPIKE} == {}


def test_a_report_of_a_trial_with_many_validations_keeps_its_spike():
    trial = Trial(number=0, params={}, reports=[(step, SPIKE if step == 777 else 1.0) for step in range(5000)])
    steps, _, _, high = columns(reduce_buckets(curve_of(trial.reports), LISTED_BUCKETS))
    assert (max(high), len(steps) <= LISTED_BUCKETS + 2, steps[0], steps[-1]) == (SPIKE, True, 0, 4999)


def test_the_message_of_a_page_is_bounded(tmp_path):
    short, long = (
        sum(map(len, sections(RunReader(write(tmp_path / str(count), rows_of(count))).read()).values()))
        for count in (3_000, 20_000)
    )
    assert long < 1.3 * short


@pytest.mark.parametrize(
    "value",
    ["NaN", "1" + "0" * 400, *(pytest.param(v, marks=pytest.mark.long) for v in ("null", "Infinity", "-Infinity"))],
    ids=["NaN", "a whole number that no float is", "null", "Infinity", "-Infinity"],
)
def test_a_value_that_is_not_finite_is_counted_in_every_view(tmp_path, capsys, value):
    run = write(tmp_path / "run", rows_of(1200))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for place in (100, 101, 1199):
        lines[place] = f'{{"step": {5 * (place + 1)}, "train_loss": {value}, "tokens": 1}}\n'
    (run / "metrics.jsonl").write_text("".join(lines))
    state = RunReader(run).read()
    assert sum(count for _, count in state.gaps["train_loss"]) == 3
    assert not math.isfinite(state.row["train_loss"])
    assert all(math.isfinite(number) for _, number in state.losses)
    seen = "\n".join(line.plain for line in frame([state], Look(width=100, height=30)))
    assert "train_loss: 3 values not finite, first at step 505" in seen
    assert f"loss {state.row['train_loss']}" in seen
    found = sections(state)
    assert json.loads(found["gaps"])["train_loss"][0][0] == 505
    assert json.loads(found["head"])["row"]["train_loss"] is None
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    assert "run: train_loss: 3 values not finite, first at step 505" in out
    assert any(line.split() == ["train_loss", "not", "finite"] for line in out.splitlines())


def test_a_run_that_goes_back_shows_the_last_truth(tmp_path):
    """As a resume leaves the log: without the rows behind the checkpoint, and then with others."""
    first, again = rows_of(3000), rows_of(4500, seed=5)
    first[2500]["train_loss"] = 99.0  # it diverged, and went back before that
    run = write(tmp_path / "run", first)
    reader = RunReader(run)
    assert max(value for _, value in reader.read().losses) == 99.0
    for end in (2000, 2750, 4500):  # the second is as long as before, in another file
        write(tmp_path / "new", [*first[:2000], *again[2000:end]])
        (tmp_path / "new" / "metrics.jsonl").rename(run / "metrics.jsonl")
        assert same(reader.read(), RunReader(run).read())
    assert max(value for _, value in reader.read().losses) == SPIKE
    write(run, first[:2000])  # in place
    assert same(reader.read(), RunReader(run).read())


@pytest.mark.parametrize("count", [500, 5000])
def test_rows_that_repeat_steps_replace_those_before(count):
    """In a log that was not cut off."""
    first, again = rows_of(count), rows_of(count, seed=3)[count // 3 :]
    first[-2]["train_loss"] = 99.0
    back, whole = Curves(("step",)), Curves(("step",))
    back.add([*first, *again])
    whole.add([*first[: count // 3], *again])
    for name, curve in whole.curves.items():
        ends = [[bucket.end for bucket in one.curves[name].buckets] for one in (back, whole)]
        assert ends[0] == sorted(set(ends[0]))
        assert max(bucket.high for bucket in back.curves[name].buckets) == max(bucket.high for bucket in curve.buckets)
        if count <= MOST:
            assert back.curves[name].buckets == curve.buckets
    one_by_one = Curves(("step",))
    for row in [*first, *again]:
        one_by_one.add([row])
    assert fields(one_by_one.curves["val_loss"].buckets) == fields(back.curves["val_loss"].buckets)


def test_two_rows_of_one_step_are_both_taken():
    curves = Curves(("step",))
    curves.add([{"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 1, "a": 3.0}, {"b": 4.0}, {"step": math.nan}])
    assert {name: points_of(curve.buckets) for name, curve in curves.curves.items()} == {
        "a": [(1, 3.0)],
        "b": [(1, 2.0)],
    }


def test_a_curve_is_cut_inside_of_a_bucket():
    curve = Curve()
    curve.add(range(0, 10 * MOST), [float(step % 100) for step in range(0, 10 * MOST)])
    curve.cut(5 * MOST + 1)
    assert curve.buckets[-1].end <= 5 * MOST
    assert all(step <= 5 * MOST and value == step % 100 for step, value in points_of(curve.buckets))


def test_the_resumes_of_a_run_and_its_times_are_those_of_its_whole_timeline(tmp_path):
    run = write(tmp_path / "run", rows_of(10))
    rows, begin = [], 0.0
    for attempt, (first, last) in enumerate([(1, 9000), (8001, 12_000), (12_001, 20_000)]):
        rows.append({"attempt": attempt, "activity": "start", "begin": begin, "seconds": 5.0})
        for step in range(first, last + 1):
            rows.append(
                {"attempt": attempt, "activity": "step", "begin": begin + 5, "seconds": 1.0, "steps": [step] * 2}
            )
            begin += 1.0
        begin += 100.0
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"attempt": 3}]))
    state = RunReader(run).read()
    assert (state.resumes, state.attempts) == ((8001, 12_001), 3)
    assert state.spent == pytest.approx(read_runs([run])[0].spent), "the page and the table of a report agree"
    assert json.loads(sections(state)["resumes"]) == [8001, 12_001]


@pytest.mark.parametrize("brief", [False, True])
def test_a_long_log_is_read_in_portions_that_give_the_same_picture(tmp_path, monkeypatch, brief):
    monkeypatch.setattr(run_file, "LEAST_BYTES", 50_000)
    run = write(tmp_path / "run", rows_of(4000))
    (run / "timeline.jsonl").write_text('{"attempt": 0, "activity": "save", "begin": 0, "seconds": 1.0}\n' * 1500)
    reader, shares = RunReader(run), [0.0]
    while (state := reader.read(brief=brief, deadline=0.0)) and shares[-1] < 1.0:
        assert state.step == 20_000, "the newest numbers are there at once"
        assert state.read_share > shares[-1]
        shares.append(state.read_share)
        if shares[-1] < 1.0:
            seen = frame([state], Look(width=100, height=30))[0].plain
            assert f"reading {shares[-1]:.0%}" in seen
    assert len(shares) > 4
    assert same(state, RunReader(run).read(brief=brief))
    assert "reading" not in frame([state], Look(width=100, height=30))[0].plain


def test_a_copy_that_grows_is_not_read_again(tmp_path):
    """As the copy of a run in a bucket: a new file each time, which begins as the one before."""
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    for size in (10, 20, 30):
        (tmp_path / "new").write_bytes(b"".join(b'{"n": %d}\n' % number for number in range(size)))
        (tmp_path / "new").rename(path)
        assert tail.objects() == [{"n": number} for number in range(size - 10, size)]
        assert tail.restarted == (size == 10)


def test_a_log_that_is_deleted_leaves_what_was_read(tmp_path):
    run = write(tmp_path / "run", rows_of(40))
    reader = RunReader(run)
    before = reader.read()
    (run / "metrics.jsonl").unlink()
    assert (reader.read().buckets, reader.read(deadline=0.0).read_share) == (before.buckets, 1.0)
    write(run, rows_of(7))
    assert reader.read().step == 35


@pytest.mark.parametrize("size", [30, 40])
@pytest.mark.parametrize("in_place", [False, True])
def test_another_file_is_read_from_its_beginning(tmp_path, size, in_place):
    """Also one that is as long as the first was, or that has its number."""
    path, tail = tmp_path / "log", Tail(tmp_path / "log")
    path.write_bytes(b"".join(b'{"n": %d}\n' % (100 + number) for number in range(30)) + b"torn")
    assert len(tail.objects()) == 30
    if not in_place:
        os.unlink(path)
    path.write_bytes(b"".join(b'{"n": %d}\n' % (105 + number) for number in range(size)))
    assert tail.objects()[0] == {"n": 105}
    assert tail.restarted


@pytest.mark.parametrize(
    "junk",
    [
        b'{"step": 1' + b"0" * 400 + b"}\n",
        b"\0\0\0\n",
        b"{torn\n",
        b"[1]\n",
        b"\xff\n",
        b"3\n",
        b"\n",
        b'{"step": "x"}\n',
        b'{"step": null}\n',
    ],
)
def test_lines_that_are_no_rows_are_passed_over(tmp_path, junk):
    run = write(tmp_path / "run", rows_of(40))
    whole = RunReader(run).read()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:20], junk, *lines[20:]]))
    assert RunReader(run).read().buckets == whole.buckets


def test_a_metric_that_is_never_finite_has_its_place(tmp_path):
    run = write(tmp_path / "run", [{"step": step, "never": None, "train_loss": 1.0} for step in range(1, 51)])
    found = sections(RunReader(run).read())
    assert (json.loads(found["curve/never"]), len(json.loads(found["gaps"])["never"])) == ([[], []], 50)


def test_spikes_to_both_sides_of_zero_are_kept():
    values = [math.sin(step) for step in range(16_000)]
    values[7000], values[9000] = -50.0, 30.0
    points = dict(points_of(curve_of([*enumerate(values)])))
    assert (points[7000], points[9000]) == (-50.0, 30.0)


def test_a_curve_wider_than_a_float_can_say_is_drawn():
    assert len(chart([[(0, 1e308), (1, 0.0), (2, -1e308)]], 40, 8)) == 8


def test_a_report_leaves_texts_in_a_log_out(tmp_path):
    run = write(tmp_path / "run", [{"step": 1, "note": "a", "train_loss": 1.0}, {"step": 2, "note": "b", "x": None}])
    (found,) = read_runs([str(run)])
    assert found.rows == [{"step": 1, "train_loss": 1.0}, {"step": 2}]
    assert list(found.gaps) == ["x"]
