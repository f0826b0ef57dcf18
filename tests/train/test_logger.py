"""The logger that stands alone, in processes of its own where it counts."""

import csv
import logging
import sys

import numpy as np
import warm
from commands import TERMINAL, environment, on_terminal

from roxxel_dist import Logger

CRASH = """
import os, sys
from roxxel_dist import Logger
with Logger(sys.argv[1], "run") as logger:
    sys.excepthook = lambda *error: os._exit(7)  # at once: what is not on its way to the disk is lost
    logger.log_message("begin")
    for step in range(1, 4):
        logger.log_metrics_summary(step, {"loss": 1 / step})
    raise RuntimeError("the third batch is bad")
"""
BAR = """
from roxxel_dist import Logger
with Logger(".", "run") as logger:
    logger.init_pbar(total_steps=300, initial_step=100)
    for step in range(101, 301):
        logger.update_pbar(step)
    logger.log_metrics_summary(step=300, metrics={"loss": 0.125})
"""


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def said(path):
    return [line.split(" | ", 1)[1] for line in path.read_text().splitlines()]


def test_a_table_and_a_log(tmp_path, capsys):
    with Logger(log_dir=tmp_path / "logs", filename_prefix="tiny") as logger:
        logger.log_message("two\nlines", level=logging.INFO)
        logger.log_message("careful", level=logging.WARNING)
        logger.init_pbar(total_steps=20)
        logger.log_metrics_summary(5, {"loss": np.float32(0.5), "perplexity": np.float64(1.25)})
        logger.log_metrics_summary(step=10, metrics={"loss": 0.25, "perplexity": 1.0, "val_loss": 0.75})
    lines = ["two", "lines", "WARNING: careful", "Step  5/20 | loss: 0.5000 | perplexity: 1.2500"]
    assert said(tmp_path / "logs" / "tiny_system.log")[:4] == lines
    assert capsys.readouterr().out.splitlines()[:4] == lines
    assert rows(tmp_path / "logs" / "tiny_metrics.csv") == [
        {"step": "5", "loss": "0.5", "perplexity": "1.25", "val_loss": ""},
        {"step": "10", "loss": "0.25", "perplexity": "1.0", "val_loss": "0.75"},
    ]


def test_a_run_that_goes_on_repeats_no_row(tmp_path):
    for start in (0, 3):
        with Logger(tmp_path, "run") as logger:
            logger.init_pbar(total_steps=8, initial_step=start)
            for step in range(start + 1, start + 6):
                logger.log_metrics_summary(step, {"loss": float(step)})
    assert [int(row["step"]) for row in rows(tmp_path / "run_metrics.csv")] == list(range(1, 9))


def test_without_a_bar_an_earlier_table_is_continued(tmp_path):
    for step in (1, 2):
        with Logger(tmp_path, "run") as logger:
            logger.log_metrics_summary(step, {"loss": 1.0})
    assert [row["step"] for row in rows(tmp_path / "run_metrics.csv")] == ["1", "2"]


def test_nothing_is_said_after_the_end(tmp_path, capsys):
    logger = Logger(tmp_path, "run")
    logger.close()
    logger.log_message("late")
    logger.close()
    assert capsys.readouterr() == ("", "")


def test_a_crash_is_on_the_disk_before_it_goes_on(tmp_path):
    result = warm.run([str(tmp_path)], tmp_path, environment(), source=CRASH)
    assert result.returncode == 7, result.stderr
    lines = said(tmp_path / "run_system.log")
    assert lines[0] == "begin"
    assert "Traceback (most recent call last):" in lines
    assert lines[-1] == "RuntimeError: the third batch is bad"
    assert [row["step"] for row in rows(tmp_path / "run_metrics.csv")] == ["1", "2", "3"]


def test_a_bar_on_a_terminal_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(BAR)  # without a terminal
    assert capsys.readouterr().out == "Step 300/300 | loss: 0.1250\n"

    def start(theirs):
        with open(theirs, "wb", closefd=False) as terminal:
            return warm.start(BAR, [], tmp_path, environment(**TERMINAL), (terminal, sys.__stderr__))

    program, text = on_terminal(start)
    assert program.wait() == 0
    assert "300/300 loss 0.1250" in text
    assert "Step 300/300 | loss: 0.1250" in text
