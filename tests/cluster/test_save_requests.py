"""Files that ask and answer; and, in one process, which step is saved. tests/multiprocess/test_save.py has several."""

import errno
import os

import pytest

from roxxel_dist.cluster.save_requests import (
    SaveRequests,
    post_answer,
    post_request,
    sweep,
    take_answer,
    take_requests,
    withdraw,
)
from roxxel_dist.run_directory import RunDirectory


def test_everybody_who_asks_gets_an_answer_of_their_own(tmp_path):
    asked = {post_request(tmp_path) for _ in range(3)}
    assert len(asked) == 3
    assert set(take_requests(tmp_path)) == asked
    assert take_requests(tmp_path) == []
    assert {request: take_answer(tmp_path, request) for request in asked} == dict.fromkeys(asked)
    for step, request in enumerate(sorted(asked)):
        post_answer(tmp_path, request, {"step": step})
    assert [take_answer(tmp_path, request) for request in sorted(asked)] == [{"step": step} for step in range(3)]
    assert list(tmp_path.iterdir()) == []


def test_what_is_withdrawn_is_not_asked(tmp_path):
    first, second = post_request(tmp_path), post_request(tmp_path)
    withdraw(tmp_path, first)
    assert take_requests(tmp_path) == [second]
    post_answer(tmp_path, second, {"step": 1})
    withdraw(tmp_path, second)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_begins_does_not_see_what_a_dead_one_was_asked(tmp_path):
    keep = tmp_path / "config.yaml"
    keep.touch()
    (tmp_path / "training_cursor.json").touch()
    post_request(tmp_path)
    post_answer(tmp_path, "0123", {"step": 1})
    (tmp_path / ".save-answer-4567.part").touch()
    run = RunDirectory(tmp_path)
    run.claim(resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "training_cursor.json"]
    second = post_request(tmp_path)
    with pytest.raises(ValueError, match=r"this process is training in .* already"):
        RunDirectory(tmp_path).claim(resume=True)
    assert take_requests(tmp_path) == [second], "a run that could not begin swept another's"
    run.release()
    sweep(tmp_path / "nowhere")


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        post_request(tmp_path / "gone")


def every_fifth(step: int) -> bool:
    return step % 5 == 0


def test_the_next_logged_step_saves_once_and_answers_everybody(tmp_path):
    requests = SaveRequests(tmp_path, every_fifth)
    assert not any(requests.should_save(step) for step in range(1, 12))
    first, second = post_request(tmp_path), post_request(tmp_path)
    assert [step for step in range(12, 40) if requests.should_save(step)] == [15]
    requests.saved(14)  # one that was begun before is complete now: not what was asked for
    assert take_answer(tmp_path, first) is None
    requests.saved(15)
    assert take_answer(tmp_path, first) == take_answer(tmp_path, second) == {"step": 15}
    third = post_request(tmp_path)
    assert [step for step in range(6, 20) if requests.should_save(step)] == [10], "steps may go back"
    requests.failed(10, "no space left")
    assert take_answer(tmp_path, third) == {"error": "step 10 could not be saved: no space left"}


def test_asked_too_late_for_a_step_the_last_checkpoint_is_the_answer(tmp_path):
    requests = SaveRequests(tmp_path, every_fifth)
    early = post_request(tmp_path)
    assert requests.should_save(5)
    late = post_request(tmp_path)
    requests.finish(7)
    assert take_answer(tmp_path, early) == take_answer(tmp_path, late) == {"step": 7}


def test_a_folder_that_cannot_be_used_does_not_stop_training(tmp_path):
    away, back = tmp_path / "away", tmp_path / "run"
    back.mkdir()
    requests = SaveRequests(back, every_fifth)
    request = post_request(back)
    assert requests.should_save(5)
    os.rename(back, away)
    requests.saved(5)
    assert not requests.should_save(10)
    os.rename(away, back)
    assert not requests.should_save(15)
    assert take_answer(back, request) == {"step": 5}
