"""The tables and the lines; what goes through a queue is in test_log_queue.py."""

import csv
import json
import math

import pytest

from roxxel_dist.train.log.console import TextTracker, format_row
from roxxel_dist.train.log.csv_jsonl import CsvTracker, JsonlTracker, Tail, UnreadableLogError, keep_rows, read_rows

ROWS = [{"step": s, "train_loss": 1 / s, "train_bal": 0.0, "accuracy": 0.5} for s in (1, 10, 20)]


def write(path, rows, restored=0):
    for tracker in (CsvTracker(path / "log.csv", restored), JsonlTracker(path / "log.jsonl", restored)):
        for row in rows:
            tracker.row(row)
        tracker.close()


def table(path):
    with (path / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps(path):
    objects = [json.loads(line)["step"] for line in (path / "log.jsonl").read_text().splitlines()]
    return [int(row["step"]) for row in table(path)], objects


def test_a_resume_leaves_one_row_a_step(tmp_path):
    write(tmp_path, ROWS)
    for name, torn in (("log.csv", "30,0.0"), ("log.jsonl", '{"step": 30, "trai')):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    write(tmp_path, [ROWS[2]], restored=10)
    assert steps(tmp_path) == ([1, 10, 20], [1, 10, 20])


def test_a_run_that_begins_anew_starts_with_empty_logs(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS[:1], restored=0)
    assert steps(tmp_path) == ([1], [1])


@pytest.mark.parametrize(("tracker", "name"), [(CsvTracker, "log.csv"), (JsonlTracker, "log.jsonl")])
def test_a_rewind_cuts_the_rows_after_it_and_goes_on(tmp_path, tracker, name):
    log = tracker(tmp_path / name, 0)
    for row in ROWS:
        log.row(row)
    log.rewind(10)
    log.row({**ROWS[2], "train_loss": 7.5})
    log.close()
    text = (tmp_path / name).read_text()
    assert text.count("7.5") == 1
    assert "0.05" not in text, "the row of the step that was taken back"
    assert len([line for line in text.splitlines() if line[:4] != "step"]) == 3


def test_columns_are_the_promised_ones_first(tmp_path):
    write(tmp_path, ROWS)
    header = (tmp_path / "log.csv").read_text().splitlines()[0]
    assert header.startswith("step,train_loss,val_loss,train_bal,val_bal,ms_per_step,")
    assert header.endswith(",accuracy")


def test_a_new_metric_gets_a_column_and_old_rows_stay(tmp_path):
    write(tmp_path, ROWS[:2])
    before = table(tmp_path)
    write(tmp_path, [{**ROWS[2], "val_loss": 0.25, "val_loss/code": 0.5}], restored=10)
    *old, new = table(tmp_path)
    assert old == [{**row, "val_loss/code": ""} for row in before]
    assert (new["step"], new["val_loss"], new["val_loss/code"]) == ("20", "0.25", "0.5")
    assert list(new)[-2:] == ["accuracy", "val_loss/code"]


def test_a_row_without_some_metrics_leaves_them_empty(tmp_path):
    write(tmp_path, [ROWS[0], {"step": 2, "train_loss": math.nan}])
    assert table(tmp_path)[1]["train_loss"] == "nan"
    assert table(tmp_path)[1]["accuracy"] == ""


def test_rows_are_kept_of_what_is_a_row(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n[]\nnonsense\n{"step": 2}\n{"step": 3}')
    keep_rows(path, math.inf, lambda line: json.loads(line)["step"])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_file_is_followed_and_begun_anew_when_it_is_cut(tmp_path):
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert tail.rows() == tail.objects() == read_rows(path) == [], "not there yet"
    log = JsonlTracker(path)
    log.row({"step": 1, "train_loss": math.inf})
    log.row({"step": 2, "train_loss": 1.5})
    assert tail.rows() == [{"step": 1, "train_loss": None}, {"step": 2, "train_loss": 1.5}]
    assert read_rows(path) == [{"step": 1}, {"step": 2, "train_loss": 1.5}]
    assert tail.rows() == []
    with path.open("a") as file:
        file.write('{"step": 3, "tra')
        file.flush()
        assert tail.rows() == [], "half a row is none"
        file.write('in_loss": 1.25}\n')
    assert (tail.rows(), tail.restarted) == ([{"step": 3, "train_loss": 1.25}], False)
    log.rewind(1)
    log.row({"step": 2, "train_loss": 9.5})
    log.close()
    assert (tail.rows(), tail.restarted) == ([{"step": 1, "train_loss": None}, {"step": 2, "train_loss": 9.5}], True)


@pytest.mark.parametrize("line", ["[1]", "{torn", "", '{"step": 4}, {"step": 5}'])
def test_a_line_that_is_no_row_is_named_or_skipped(line, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    strict, other = Tail(path), Tail(path)
    assert strict.rows() == other.objects() == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write(f'{{"step": 3}}\n{line}\n')
    assert other.objects()[0] == {"step": 3}
    with pytest.raises(ValueError, match=r"line 4: .* is no JSON object"):
        strict.rows()


def test_a_log_that_cannot_be_read_is_named_or_empty(tmp_path):
    assert Tail(tmp_path).objects() == []
    with pytest.raises(UnreadableLogError, match="Is a directory"):
        Tail(tmp_path).rows()


def test_a_row_for_people():
    row = {"step": 50, "train_loss": 4.12041, "val_loss": 4.156, "train_bal": 0.0452, "val_bal": 0.0461}
    row |= {"vram_gb": 3.418, "ms_per_step": 279.4, "tokens_per_s": 7394.6, "grad_norm": 1.0}
    losses = "Step   50/4200 | Train: 4.1204 (Bal: 0.0452)"
    rest = "VRAM: 3.42GB | 279 ms/step | 7,395 tokens/s | 19:19 left"
    assert format_row(row, 4200) == f"{losses} | Val: 4.1560 (Bal: 0.0461) | {rest}"
    assert format_row(row | {"mfu": 0.4137}, 4200).endswith("7,395 tokens/s | MFU: 41.4% | 19:19 left")
    del row["val_loss"], row["val_bal"]
    assert format_row(row, 4200) == f"{losses} | {rest}"
    del row["vram_gb"]
    assert (
        format_row(row | {"ram_gb": 1.234}, 4200)
        == f"{losses} | RAM: 1.23GB | 279 ms/step | 7,395 tokens/s | 19:19 left"
    )
    assert format_row({"step": 7, "train_loss": 2.5}, 100) == "Step   7/100 | Train: 2.5000"
    own = {"step": 7, "train_loss": 2.5, "grad_norm": 1.0, "loss/code": 2.0, "accuracy": 0.25}
    assert format_row(own, 100) == "Step   7/100 | Train: 2.5000 | accuracy: 0.2500"


def test_a_row_of_other_metrics_shows_them_all():
    assert format_row({"step": 7, "loss": 2.5, "note": "x"}, 0) == "Step 7 | loss: 2.5000 | note: x"


def test_lines_in_a_file_have_the_time(tmp_path):
    log = TextTracker(tmp_path / "logs" / "rank-0.log", 20)
    log.text("two\nlines")
    log.row(ROWS[0])
    log.crash("Traceback")
    log.close()
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert [line.split(" | ", 1)[1] for line in lines] == [
        "two",
        "lines",
        "Step  1/20 | Train: 1.0000 | accuracy: 0.5000",
        "Traceback",
    ]
    assert all(line[2] == line[5] == ":" for line in lines)
