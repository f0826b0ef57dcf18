"""One process: what is due, and what is answered. Several processes are in tests/multiprocess/test_save.py."""

import os

from roxxel_dist.cluster.mailbox import post_request, take_answer
from roxxel_dist.cluster.save_requests import SaveRequests


def every_fifth(step: int) -> bool:
    return step % 5 == 0


def test_the_next_logged_step_saves_once_and_answers_everybody(tmp_path):
    requests = SaveRequests(tmp_path, every_fifth)
    assert not any(requests.due(step) for step in range(1, 12))
    first, second = post_request(tmp_path), post_request(tmp_path)
    assert [step for step in range(12, 40) if requests.due(step)] == [15]
    requests.answered(14)  # one that was begun before is complete now: not what was asked for
    assert take_answer(tmp_path, first) is None
    requests.answered(15)
    assert take_answer(tmp_path, first) == take_answer(tmp_path, second) == {"step": 15}
    third = post_request(tmp_path)
    assert [step for step in range(6, 20) if requests.due(step)] == [10], "steps may go back"
    requests.failed(10, "no space left")
    assert take_answer(tmp_path, third) == {"error": "step 10 could not be saved: no space left"}


def test_asked_too_late_for_a_step_the_last_checkpoint_is_the_answer(tmp_path):
    requests = SaveRequests(tmp_path, every_fifth)
    early = post_request(tmp_path)
    assert requests.due(5)
    late = post_request(tmp_path)
    requests.finish(7)
    assert take_answer(tmp_path, early) == take_answer(tmp_path, late) == {"step": 7}


def test_a_folder_that_cannot_be_used_does_not_stop_training(tmp_path):
    away, back = tmp_path / "away", tmp_path / "run"
    back.mkdir()
    requests = SaveRequests(back, every_fifth)
    request = post_request(back)
    assert requests.due(5)
    os.rename(back, away)
    requests.answered(5)
    assert not requests.due(10)
    os.rename(away, back)
    assert not requests.due(15)
    assert take_answer(back, request) == {"step": 5}
