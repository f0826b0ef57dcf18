import errno
import json
import math
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from roxxel_dist.process.durable import FormatError
from roxxel_dist.sweep.study.journal import History, Journal, read_history

STUDY = {
    "event": "study",
    "metric": "val_loss",
    "goal": "minimize",
    "method": "random",
    "seed": 3,
    "driver": {},
    "format": 1,
}


def ask(trial, **params):
    return {"event": "ask", "trial": trial, "params": params, "point": [0.5]}


def start(trial, attempt=0):
    return {"event": "start", "trial": trial, "attempt": attempt, "node": "h1", "pid": 7}


def report(trial, step, value):
    return {"event": "report", "trial": trial, "step": step, "value": value}


def result(trial, value, stopped=None):
    told = {"params": {"x": trial}, "metric": "val_loss", "seconds": 1.5, "more": {"tokens": 8}}
    return {"event": "result", "trial": trial, "value": value, "stopped": stopped, **told}


def fail(trial, kind="error"):
    return {"event": "fail", "trial": trial, "params": {}, "kind": kind, "reason": "dim", "log": "logs/1.log"}


def quiet(line):
    raise AssertionError(line)


def test_what_is_written_is_read(tmp_path):
    with Journal(tmp_path / "study", quiet) as journal:
        journal.append(STUDY)
        journal.append(ask(0, x=0), start(0))
        journal.append(report(0, 10, 2.0))
        journal.append(report(0, 20, 1.0))
        journal.append(start(0, 1))
        journal.append(report(0, 20, 1.25))
        journal.append({"event": "stop", "trial": 0, "step": 20, "value": 1.25, "rule": "hyperband", "reason": "poor"})
        journal.append(result(0, 1.25, "hyperband"))
        journal.append(ask(1, x=1), ask(2, x=2), ask(3, x=3))
        journal.append(fail(1))
        journal.append(result(2, 0.5))
        history = read_history(tmp_path / "study")
        assert history == journal.history
    first = history.trials[0]
    assert (first.state, first.value, first.reports) == ("stopped", 1.25, [(10, 2.0), (20, 1.25)])
    assert (first.attempts, first.node, first.seconds, first.more) == (2, "h1", 1.5, {"tokens": 8})
    assert first.stop == {"step": 20, "value": 1.25, "rule": "hyperband", "reason": "poor"}
    assert (history.trials[1].state, history.trials[1].kind, history.trials[1].reason) == ("failed", "error", "dim")
    assert (history.trials[3].state, history.trials[3].value) == ("running", None)
    assert history.best is history.trials[2]
    assert (history.metric, history.goal, history.method, history.seed) == ("val_loss", "minimize", "random", 3)
    assert [history.count(state) for state in ("running", "done", "stopped", "failed")] == [1, 1, 1, 1]


def test_the_best_follows_the_goal(tmp_path):
    with Journal(tmp_path, quiet) as journal:
        assert journal.history.best is None
        journal.append({**STUDY, "goal": "maximize"}, ask(0), report(0, 1, 4.0), report(0, 2, 3.0), ask(1))
        assert journal.history.best_report(0) == 4.0
        assert journal.history.best_report(1) is None
        journal.append(result(0, 4.0), result(1, 5.0))
        assert journal.history.best.number == 1


def test_failures_in_a_row_begin_again_with_a_driver(tmp_path):
    with Journal(tmp_path, quiet) as journal:
        journal.append(STUDY, *(ask(trial) for trial in range(4)))
        journal.append(fail(0), result(1, 1.0), fail(2), fail(3))
        assert journal.history.failures_in_row == 2
        journal.append(STUDY)
        assert journal.history.failures_in_row == 0


@pytest.mark.parametrize("torn", [b'{"event": "ask", "tri', b"\0" * 40, b"\0" * 40 + b"\n", b'{"event": "ask"', b"{\n"])
def test_a_torn_last_line_is_passed_over_and_cut(tmp_path, torn):
    with Journal(tmp_path, quiet) as journal:
        journal.append(STUDY, ask(0))
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(read_history(tmp_path).trials) == [0]
    assert path.read_bytes() == whole + torn
    with Journal(tmp_path, quiet) as journal:
        assert path.read_bytes() == whole
        journal.append(ask(1))
    assert list(read_history(tmp_path).trials) == [0, 1]


def test_every_cut_of_a_journal_can_be_read(tmp_path):
    with Journal(tmp_path, quiet) as journal:
        journal.append(STUDY, ask(0, x=1.0), start(0), report(0, 1, 2.0), result(0, 2.0))
    path = tmp_path / "journal.jsonl"
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = data[:size].count(b"\n")
        assert (read_history(tmp_path).best is not None) == (whole == 5)
        assert bool(read_history(tmp_path).trials) == (whole >= 2)


@pytest.mark.parametrize(("line", "said"), [("{]", "line 2: damaged"), ('{"event": "report", "trial": 9}', "line 2")])
def test_damage_before_the_end_is_an_error(tmp_path, line, said):
    good = json.dumps({**STUDY, "time": 1.0})
    (tmp_path / "journal.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=said):
        read_history(tmp_path)
    with pytest.raises(ValueError, match=said):
        Journal(tmp_path, quiet).__enter__()
    with Journal(tmp_path / "other", quiet):  # neither has left a lock behind
        pass


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            {},
            r"line 2: no format, and this version reads format 1: it was written by an earlier version of roxxel-dist",
        ),
        ({"format": 2}, r"line 2: format 2, and .* by a newer version of roxxel-dist, which reads it: update"),
    ],
)
def test_a_journal_of_another_format_is_refused(tmp_path, written, said):
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps({**STUDY, "time": 1.0}) + "\n")
    assert read_history(tmp_path).metric == "val_loss"
    other = {name: value for name, value in STUDY.items() if name != "format"} | written
    path.write_text(path.read_text() + json.dumps({**other, "time": 2.0}) + "\n")
    for read in (lambda: read_history(tmp_path), lambda: Journal(tmp_path, quiet).__enter__()):
        with pytest.raises(FormatError, match=rf"journal\.jsonl, {said}"):
            read()


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)  # as Lustre without `-o flock`
    said = []
    with Journal(tmp_path, said.append) as journal:
        journal.append(STUDY)
    assert len(said) == 1
    assert "this file system has no locks (No locks available)" in said[0]


def test_a_folder_without_a_journal_is_no_study(tmp_path):
    with pytest.raises(ValueError, match=r"journal\.jsonl: cannot be read .* is .* the folder of a study"):
        read_history(tmp_path)


def test_numbers_that_json_does_not_know_are_null(tmp_path):
    with Journal(tmp_path, quiet) as journal:
        journal.append(STUDY, ask(0))
        journal.append({**result(0, 1.0), "more": {"a": math.nan, "b": [math.inf, 2.0], "c": {"d": -math.inf}}})
    for line in (tmp_path / "journal.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert read_history(tmp_path).trials[0].more == {"a": None, "b": [None, 2.0], "c": {"d": None}}


def hold(path, ready, end):
    with Journal(path, quiet):
        ready.set()
        end.wait(60)


def test_a_second_driver_waits_with_a_limit_and_names_the_first(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path, ready, end))
    holder.start()
    assert ready.wait(60)
    said = []
    with pytest.raises(ValueError, match=rf"pid {holder.pid} on host .* is searching in"):
        Journal(tmp_path, said.append, wait_s=0.3).__enter__()
    assert f"pid {holder.pid}" in said[0]

    def let_go(line):
        said.append(line)
        end.set()

    with Journal(tmp_path, let_go, wait_s=60) as journal:
        journal.append(STUDY)
    holder.join()
    assert len(said) == 2


def test_a_journal_of_a_thousand_trials_is_read_soon(tmp_path):
    with (tmp_path / "journal.jsonl").open("w") as file:
        for number in range(1000):
            events = [ask(number, **{f"p{i}": i / 7 for i in range(22)}), start(number)]
            events += [report(number, step, 3.0 / step) for step in range(1, 11)]
            for event in [STUDY, *events, result(number, 0.3)] if number == 0 else [*events, result(number, 0.3)]:
                file.write(json.dumps({**event, "time": 1.0}) + "\n")
    began = time.process_time()
    history = read_history(tmp_path)
    assert len(history.trials) == 1000
    assert all(len(trial.reports) == 10 and trial.state == "done" for trial in history.trials.values())
    print(f"replayed in {time.process_time() - began:.3f} s CPU")


class Untouched(dict):
    """The trials of a long study: a line of the journal must not cost a loop over all of them."""

    def __iter__(self):
        raise AssertionError("all trials were gone through")

    values = items = keys = __iter__


def test_a_line_costs_the_same_in_a_long_study(tmp_path, capsys):
    from roxxel_dist.sweep.driver.live_view import LiveView

    with Journal(tmp_path, quiet) as journal:
        history, view = journal.history, LiveView(9, 2, ["x"])
        journal.append(STUDY, ask(0, x=0.0))
        view.show(history)
        history.trials = Untouched(history.trials)
        lines = [start(0), report(0, 1, 2.0), result(0, 2.0), ask(1, x=1.0), start(1), report(1, 1, 1.0), fail(1)]
        for event in [*lines, ask(2, x=2.0), start(2), report(2, 1, 1.5), result(2, 1.5, "hyperband")]:
            journal.append(event)
            view.show(history, event["trial"])
            view.counts(history)
        assert (history.best.number, history.timed, list(history.running)) == (2, 2, [])
        counts = [history.count(state) for state in ("running", "done", "stopped", "failed")]
    assert counts == [0, 1, 1, 1]
    assert "trial 2 stopped early: val_loss 1.5; best 1.5 of trial 2" in capsys.readouterr().err


def test_hours_are_those_of_a_driver_that_is_awake(tmp_path: Path):
    """A laptop that sleeps for eight hours, or a clock that is set, has not searched for so long."""
    history = History()
    history.apply({**STUDY, "time": 0.0, "awake": 1.0})
    history.apply({"event": "ask", "time": 60.0, "awake": 61.0, "trial": 0, "params": {}, "point": []})
    report = {"event": "report", "trial": 0, "value": 1.0}
    history.apply({**report, "step": 1, "time": 30_000.0, "awake": 121.0})
    assert history.hours(181.0) == pytest.approx(180 / 3600)
    history.apply({**STUDY, "time": 31_000.0, "awake": 5.0})  # another driver, with a clock of its own
    history.apply({**report, "step": 2, "time": 31_060.0, "awake": 65.0})
    assert history.hours(65.0) == pytest.approx(180 / 3600)
    with Journal(tmp_path, print) as journal:
        journal.append(STUDY)
        assert journal.history.hours(journal.awake) < 0.01
    assert json.loads((tmp_path / "journal.jsonl").read_text())["awake"] >= 0
