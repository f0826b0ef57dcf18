"""Where the time of a run went: kept through kills, torn rows and full disks, and added up."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from commands import environment, wait_for
from runs import make, train

from roxxel_dist import Phase
from roxxel_dist.process.progress import Progress
from roxxel_dist.train.log.timeline import SPENT, Timeline, TimeSpent, read_timeline, time_spent


def row(attempt, activity, begin, seconds, steps=None):
    return {"attempt": attempt, "activity": activity, "begin": begin, "seconds": seconds, "steps": steps}


def steps_of(rows):
    """Every step that the rows say was done, in order."""
    return [step for one in rows if one.get("steps") for step in range(one["steps"][0], one["steps"][1] + 1)]


def end_of(row):
    return row["begin"] + row["seconds"]


def check_whole(rows):
    """Of one attempt: no two rows overlap, and next to nothing is between them."""
    for first, second in itertools.pairwise(rows):
        if first["attempt"] == second["attempt"]:
            assert end_of(first) <= second["begin"] + 0.05
            assert second["begin"] - end_of(first) < 0.5 or second["activity"] == "finished", (first, second)


def test_a_run_accounts_for_its_time(corpus, tmp_path):
    begun = time.time()
    train(corpus, tmp_path)
    took = time.time() - begun
    rows = read_timeline(tmp_path)
    assert steps_of(rows) == list(range(1, 14))
    assert [one["activity"] for one in (rows[0], rows[-1])] == ["start", "finished"]
    assert {one["attempt"] for one in rows} == {0}
    # Steps 1, 4, 5, 8, 10, 12 and 13 are saved or validated.
    assert [one["activity"] for one in rows].count("eval") == 4
    check_whole(rows)
    spent = time_spent(rows)
    assert 0 < spent["training"] < sum(spent.values()) < took
    assert spent["down"] == spent["repeated"] == spent["restoring"] == 0


def test_a_run_that_goes_on_says_so_and_a_finished_one_was_not_down(corpus, tmp_path):
    phases = [Phase(13, 8, 17)]
    train(corpus, tmp_path, phases, max_steps=5)
    time.sleep(1.2)
    train(corpus, tmp_path, phases)
    train(corpus, tmp_path, phases)  # it is finished, and says so
    rows = read_timeline(tmp_path)
    assert steps_of(rows) == list(range(1, 14))
    assert [one["attempt"] for one in rows if one["activity"] == "finished"] == [0, 1, 2]
    assert [one["activity"] for one in rows if one["attempt"] == 1][:3] == ["start", "restore", "start"]
    spent = time_spent(rows)
    assert spent["restoring"] > 0
    assert spent["down"] == spent["repeated"] == 0


def test_steps_that_are_not_logged_are_in_the_next_row(corpus, tmp_path):
    train(corpus, tmp_path, [Phase(11, 8, 17)], log_every=4, eval_every=100, checkpoint_every=100)
    rows = [one["steps"] for one in read_timeline(tmp_path) if one["activity"] == "step"]
    assert rows == [[1, 1], [2, 4], [5, 8], [9, 11]]


RUN = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from runs import make
from roxxel_dist import Phase, Roxxel
with Roxxel({corpus!r}) as corpus:
    trainer = make(corpus, Path(sys.argv[1]), [Phase(40, 8, 17)], checkpoint_every=10, eval_every=1000,
                   trackers=[type("Slow", (), {{"durable": True, "row": lambda s, row: time.sleep(0.05),
                                                "close": lambda s: None}})()])
    trainer.run()
    trainer.close()
"""


@pytest.mark.parametrize("torn", [b"", b'{"attempt": 1, "activity": "st', b"{", b'{"attempt": 9'])
def test_a_row_that_a_kill_tore_takes_no_other_with_it(tmp_path, torn):
    """Rows end with a newline, those of the attempt that follows have its number."""
    before = [row(1, "start", 0.0, 1.0), row(1, "step", 1.0, 1.0, [1, 2])]
    text = b"".join(json.dumps(one).encode() + b"\n" for one in before)
    (tmp_path / "timeline.jsonl").write_bytes(text + torn)
    timeline = Timeline(tmp_path, Progress(None, 0))
    timeline.open()
    timeline.close()
    *kept, added = read_timeline(tmp_path)
    assert kept == before
    assert (added["attempt"], added["activity"]) == (2, "start")
    lines = (tmp_path / "timeline.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert len(lines) == 4 + bool(torn)


@pytest.mark.long
def test_a_killed_run_was_down_and_repeats_steps(corpus_pattern, tmp_path):
    """What a kill loses is little: the step under way."""
    tests = os.path.join(os.path.dirname(__file__), "..", "support")
    words = [sys.executable, "-c", RUN.format(tests=tests, corpus=str(corpus_pattern)), tmp_path / "run"]

    def begin():
        with (tmp_path / "said.txt").open("a") as said:
            return subprocess.Popen(
                [*map(str, words)], env=environment(JAX_NUM_CPU_DEVICES="8"), stdout=said, stderr=subprocess.STDOUT
            )

    process = begin()
    try:
        wait_for(lambda: steps_of(read_timeline(tmp_path / "run"))[-1:] >= [16], what="step 16")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = read_timeline(tmp_path / "run")
    reached = steps_of(killed)[-1]
    with (tmp_path / "run" / "timeline.jsonl").open("a") as file:
        file.write('{"attempt": 0, "activity": "st')  # as a kill in the middle of a write leaves it
    time.sleep(1.0)
    process = begin()
    try:
        code = process.wait(200)
    finally:
        process.kill()
        process.wait()
    assert code == 0, (tmp_path / "said.txt").read_text()
    rows = read_timeline(tmp_path / "run")
    assert rows[: len(killed)] == killed
    again = [one for one in rows if one["attempt"] == 1]
    assert again[0]["activity"] == "start", "the row after the torn one is a row"
    restored = steps_of(again)[0] - 1
    assert restored in (10, 20, 30)
    assert steps_of(again) == list(range(restored + 1, 41))
    check_whole(rows)
    assert resumes_of(rows) == [restored + 1]
    spent = time_spent(rows)
    assert spent["down"] >= 1.0
    if restored < reached:
        assert spent["repeated"] > 0.04 * (reached - restored)
    total = end_of(rows[-1]) - rows[0]["begin"]
    assert sum(spent.values()) == pytest.approx(total, rel=0.05, abs=0.5)


def test_a_checkpoint_on_request_is_time_spent_on_saving(corpus, tmp_path):
    made = make(corpus, tmp_path, [Phase(9, 8, 17)], eval_every=100, checkpoint_every=100)
    agreement = made.loop.saves.agreement
    after = agreement.announcement
    agreement.announcement = lambda step: replace(after(step), save=step == 5)
    made.run()
    made.close()
    rows = read_timeline(tmp_path)
    index = next(i for i, one in enumerate(rows) if one.get("steps", [0, 0])[1] == 5)
    assert rows[index + 1]["activity"] == "save"


def test_all_kinds_are_added_up():
    rows = [
        row(0, "start", 100.0, 2.0),
        row(0, "compile", 102.0, 3.0),
        row(0, "step", 105.0, 10.0, [1, 10]),
        row(0, "eval", 115.0, 1.0),
        row(0, "save", 116.0, 0.5),
        row(0, "step", 116.5, 4.0, [11, 14]),
        row(1, "start", 130.5, 1.0),  # down for 10 s
        row(1, "restore", 131.5, 2.0),
        row(1, "step", 133.5, 8.0, [11, 18]),  # a half of it again
        row(1, "finished", 141.5, 0.0),
        row(2, "start", 900.0, 1.0),  # taken up when it pleased somebody
        row(2, "step", 901.0, 2.0, [19, 20]),
        row(3, "start", 900.5, 1.0),  # on a host whose clock is behind
    ]
    assert time_spent(rows) == {
        "training": 20.0,
        "repeated": 4.0,
        "starting": 5.0,
        "compiling": 3.0,
        "restoring": 2.0,
        "evaluating": 1.0,
        "saving": 0.5,
        "down": 10.0,
    }
    assert tuple(time_spent(rows)) == SPENT
    assert time_spent([]) == {}


def test_going_back_repeats_steps():
    rows = [row(0, "step", 0.0, 8.0, [1, 8]), row(0, "restore", 8.0, 1.0), row(0, "step", 9.0, 6.0, [5, 10])]
    spent = time_spent(rows)
    assert (spent["training"], spent["repeated"], spent["restoring"]) == (10.0, 4.0, 1.0)
    assert resumes_of(rows) == [5]


def test_each_start_after_the_first_is_a_resume():
    rows = [row(0, "step", 0.0, 1.0, [1, 4]), row(0, "step", 1.0, 1.0, [5, 8]), row(1, "start", 2.0, 1.0)]
    assert resumes_of(rows) == []
    assert resumes_of([*rows, row(1, "step", 3.0, 1.0, [9, 12]), row(2, "step", 5.0, 1.0, [11, 12])]) == [9, 11]


@pytest.mark.parametrize("wrong", [{"steps": None}, {"steps": [3, 1]}, {"seconds": "x"}, {"attempt": None}])
def test_a_row_that_is_none_changes_no_sum(wrong):
    times = TimeSpent()
    times.add(row(0, "save", 1.0, 2.0))
    before = dict(times.spent)
    with pytest.raises((KeyError, TypeError, ValueError)):
        times.add(row(0, "step", 3.0, 1.0, [1, 2]) | wrong)
    assert times.spent == before


def resumes_of(rows):
    times = TimeSpent()
    for one in rows:
        times.add(one)
    return times.resumes


def test_rows_that_are_none_are_passed_over(tmp_path):
    good = json.dumps(row(0, "save", 1.0, 2.0))
    lines = [good, '{"attempt": 0, "act', '{"attempt": 0}', "[]", "null", good + good, good, '{"attempt": 1, "activ']
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines))
    assert [one["seconds"] for one in read_timeline(tmp_path)] == [2.0, 2.0]
    assert read_timeline(tmp_path / "nowhere") == []


def test_a_disk_that_takes_nothing_ends_the_timeline_and_not_the_training(tmp_path, capsys):
    (tmp_path / "timeline.jsonl").symlink_to("/dev/full")
    progress = Progress(None, 0)
    timeline = Timeline(tmp_path, progress)
    timeline.open()
    progress.say("start")
    progress.enter(1)
    progress.finish(1)
    timeline.row({"step": 1})
    progress.say("save")
    timeline.close()
    told = capsys.readouterr().out
    assert told.count("No space left on device") == 1
    assert "timeline.jsonl" in told


def test_other_ranks_write_nothing(tmp_path):
    progress = Progress(None, 1)
    timeline = Timeline(None, progress)
    timeline.open()
    progress.enter(1)
    timeline.row({"step": 1})
    timeline.close()
    assert list(tmp_path.iterdir()) == []
