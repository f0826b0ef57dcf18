"""Files that ask and answer, in one process. tests/whole/multiprocess/test_save.py has several."""

import errno
import os

import pytest

from roxxel_dist.cluster import save_requests
from roxxel_dist.cluster.save_requests import ANSWER, REQUEST, SaveRequests, post_request, read_answer, sweep
from roxxel_dist.place.directory import RunDirectory


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Those of a job that looks whenever it is asked."""
    monkeypatch.setattr(save_requests, "LOOK_EVERY_S", 0.0)
    return SaveRequests(tmp_path)


def test_a_request_is_open_until_its_step_is_saved(requests, tmp_path):
    assert not requests.is_open()
    post_request(tmp_path)
    assert requests.is_open()
    assert requests.is_open(), "what is announced may be dropped, and announced again"
    requests.begin(15)
    assert not requests.is_open()
    requests.saved(14)  # one that was begun before is complete now: not what was asked for
    assert read_answer(tmp_path) is None
    requests.saved(15)
    assert read_answer(tmp_path) == {"step": 15}
    assert not requests.is_open()
    post_request(tmp_path)
    assert read_answer(tmp_path) is None, "an older answer"
    assert requests.is_open()
    requests.begin(10)  # steps may go back
    requests.failed(10, "no space left")
    assert read_answer(tmp_path) == {"error": "step 10 could not be saved: no space left"}


def test_who_asks_during_a_save_is_answered_by_the_next_one(requests, tmp_path):
    post_request(tmp_path)
    assert requests.is_open()
    requests.begin(5)
    os.utime(tmp_path / REQUEST, (1, 1))  # as if touched again, on a file system with coarse times too
    requests.saved(5)
    assert read_answer(tmp_path) is None
    assert requests.is_open()
    requests.begin(9)
    requests.saved(9)
    assert read_answer(tmp_path) == {"step": 9}


@pytest.mark.parametrize("begun", [True, False])
def test_asked_too_late_for_a_step_the_last_checkpoint_is_the_answer(requests, tmp_path, begun):
    post_request(tmp_path)
    if begun:
        assert requests.is_open()
        requests.begin(5)
    os.utime(tmp_path / REQUEST, (1, 1))
    requests.finish(7)
    assert read_answer(tmp_path) == {"step": 7}


def test_a_run_that_begins_does_not_see_what_a_dead_one_was_asked(tmp_path):
    for name in ("config.yaml", "training_cursor.json", REQUEST, ANSWER, ".save-answer.part"):
        (tmp_path / name).touch()
    run = RunDirectory(tmp_path)
    run.claim(resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "training_cursor.json"]
    post_request(tmp_path)
    with pytest.raises(ValueError, match=r"this process is training in .* already"):
        RunDirectory(tmp_path).claim(resume=True)
    assert (tmp_path / REQUEST).exists(), "a run that could not begin swept another's"
    run.release()
    sweep(tmp_path / "nowhere")


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        post_request(tmp_path / "gone")


def test_a_folder_that_cannot_be_used_does_not_stop_training(requests, tmp_path):
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    requests._folder = run
    post_request(run)
    assert requests.is_open()
    requests.begin(5)
    os.rename(run, away)
    requests.saved(5)
    assert not requests.is_open()
    os.rename(away, run)
    assert not requests.is_open()
    assert read_answer(run) == {"step": 5}
