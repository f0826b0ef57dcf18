import csv
import json

import pytest

from roxxel_dist.train.logger import Logger
from roxxel_dist.train.trackers.console import TextTracker, format_row
from roxxel_dist.train.trackers.table import CsvTracker, JsonlTracker

ROWS = [{"step": s, "train_loss": 1 / s, "train_bal": 0.0, "accuracy": 0.5} for s in (1, 10, 20)]


class Memory:
    def __init__(self):
        self.seen, self.closed = [], False

    def row(self, row):
        self.seen.append(row)

    def text(self, text):
        self.seen.append(text)

    def close(self):
        self.closed = True


class Broken(Memory):
    def row(self, row):
        raise OSError("disk full")


def test_everything_arrives_in_order():
    memory = Memory()
    with Logger([memory]) as logger:
        logger.text("begin")
        for row in ROWS:
            logger.row(row)
    assert memory.seen == ["begin", *ROWS]
    assert memory.closed


def test_a_broken_tracker_stops_nobody(capsys):
    memory, broken = Memory(), Broken()
    with Logger([broken, memory]) as logger:
        for row in ROWS:
            logger.row(row)
    assert memory.seen == ROWS
    assert capsys.readouterr().err.count("Broken failed and writes no more: OSError('disk full')") == 1


def test_a_crash_is_written_before_it_goes_on(tmp_path):
    def crash():
        with Logger([TextTracker(tmp_path / "rank-0.log", 20)]) as logger:
            logger.row(ROWS[0])
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        crash()
    text = (tmp_path / "rank-0.log").read_text()
    assert "step  1/20" in text
    assert "ZeroDivisionError: division by zero" in text


def write(path, rows, restored=0):
    trackers = [CsvTracker(path / "log.csv", restored), JsonlTracker(path / "log.jsonl", restored)]
    with Logger(trackers) as logger:
        for row in rows:
            logger.row(row)


def read(path):
    with (path / "log.csv").open(newline="") as file:
        table = [int(row["step"]) for row in csv.DictReader(file)]
    return table, [json.loads(line)["step"] for line in (path / "log.jsonl").read_text().splitlines()]


def test_a_resume_leaves_one_row_a_step(tmp_path):
    write(tmp_path, ROWS)
    for name, torn in (("log.csv", "30,0.0"), ("log.jsonl", '{"step": 30, "trai')):
        with (tmp_path / name).open("a") as file:
            file.write(torn)
    write(tmp_path, [ROWS[2]], restored=10)
    assert read(tmp_path) == ([1, 10, 20], [1, 10, 20])


def test_a_run_that_begins_anew_starts_with_empty_logs(tmp_path):
    write(tmp_path, ROWS)
    write(tmp_path, ROWS[:1], restored=0)
    assert read(tmp_path) == ([1], [1])


def test_columns_are_the_promised_ones_first(tmp_path):
    write(tmp_path, ROWS)
    header = (tmp_path / "log.csv").read_text().splitlines()[0]
    assert header.startswith("step,train_loss,val_loss,train_bal,val_bal,ms_per_step,")
    assert header.endswith(",accuracy")


def test_a_row_for_people():
    row = {"step": 7, "train_loss": 2.5, "val_loss": 2.75, "ms_per_step": 12.3, "tokens_per_s": 45678.9}
    assert format_row(row, 100) == "step   7/100 | train 2.5000 | val 2.7500 | 12 ms/step | 45,679 tokens/s"
