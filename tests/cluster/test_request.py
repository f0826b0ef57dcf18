"""One process: what is due, and what is answered. Several processes are in tests/multiprocess/test_save.py."""

import os
import threading
import time
from pathlib import Path

import pytest
from commands import wait_for

from roxxel_dist.cluster.mailbox import post_request, take_answer
from roxxel_dist.cluster.request import SaveRequests


def asked_for(requests: SaveRequests, step: int) -> int:
    """Call `due` for one step after the other until one is, and return it."""
    end = time.monotonic() + 30
    while not requests.due(step):
        assert time.monotonic() < end, "nothing was due"
        time.sleep(0.01)
        step += 1
    return step


def answer(folder: Path, request: str) -> dict:
    found = []
    wait_for(lambda: found.append(take_answer(folder, request)) or found[-1], limit_s=30, what="an answer")
    return found[-1]


def test_a_request_is_due_once_and_answered_when_it_is_saved(tmp_path):
    with SaveRequests(tmp_path) as requests:
        assert not any(requests.due(step) for step in range(100))
        request = post_request(tmp_path)
        step = asked_for(requests, 100)
        requests.answered(step - 1)  # one that was begun before is complete now: not what was asked for
        assert not any(requests.due(later) for later in range(step + 1, step + 100))
        time.sleep(0.5)
        assert take_answer(tmp_path, request) is None
        requests.answered(step)
        assert answer(tmp_path, request) == {"step": step}
        again = post_request(tmp_path)
        assert asked_for(requests, step + 100) > step
    assert take_answer(tmp_path, again) is None


def test_everybody_is_answered(tmp_path):
    with SaveRequests(tmp_path) as requests:
        waiting = {post_request(tmp_path), post_request(tmp_path)}
        step, saved = 0, []
        while waiting:
            step = asked_for(requests, step + 1)
            requests.answered(step)
            saved.append(step)
            time.sleep(0.5)
            answers = {request: take_answer(tmp_path, request) for request in waiting}
            assert {answer["step"] for answer in answers.values() if answer} == {step}
            waiting = {request for request, answer in answers.items() if answer is None}
        assert len(saved) in (1, 2)  # one look of rank 0 saw both, or not


def test_steps_may_go_back(tmp_path):
    with SaveRequests(tmp_path) as requests:
        assert not any(requests.due(step) for step in range(1000))
        request = post_request(tmp_path)
        step = asked_for(requests, 10)
        requests.answered(step)
        assert answer(tmp_path, request) == {"step": step}


def test_a_save_that_failed_is_told(tmp_path):
    with SaveRequests(tmp_path) as requests:
        request = post_request(tmp_path)
        step = asked_for(requests, 1)
        requests.failed(step, "no space left")
        assert answer(tmp_path, request) == {"error": f"step {step} could not be saved: no space left"}


def test_asked_too_late_for_a_step_the_last_checkpoint_is_the_answer(tmp_path):
    with SaveRequests(tmp_path) as requests:
        assert not any(requests.due(step) for step in range(1, 5))
        request = post_request(tmp_path)
        requests.answered(4)
    assert take_answer(tmp_path, request) == {"step": 4}
    with SaveRequests(tmp_path) as requests:
        assert not requests.due(5)
        request = post_request(tmp_path)
        requests.answered(4)  # the state of step 5 was not saved
    assert take_answer(tmp_path, request) is None
    with SaveRequests(tmp_path):  # of a run that was finished before
        request = post_request(tmp_path)
    assert take_answer(tmp_path, request) is None


def test_a_loop_that_fails_answers_nobody(tmp_path):
    def fail():
        with SaveRequests(tmp_path) as requests:
            assert not requests.due(5)
            asked.append(post_request(tmp_path))
            requests.answered(5)
            raise RuntimeError("a loop that failed")

    asked = []
    with pytest.raises(RuntimeError, match="a loop that failed"):
        fail()
    assert take_answer(tmp_path, asked[0]) is None


def test_a_folder_that_cannot_be_used_does_not_stop_training(tmp_path):
    away, back = tmp_path / "away", tmp_path / "run"
    back.mkdir()
    with SaveRequests(back) as requests:
        request = post_request(back)
        step = asked_for(requests, 1)
        os.rename(back, away)
        requests.answered(step)
        time.sleep(0.5)
        assert not requests.due(step + 1)
        os.rename(away, back)
        assert answer(back, request) == {"step": step}


def test_its_thread_ends_with_it(tmp_path):
    with SaveRequests(tmp_path):
        assert "save requests" in {thread.name for thread in threading.enumerate()}
    assert "save requests" not in {thread.name for thread in threading.enumerate()}
