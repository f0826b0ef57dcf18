import errno
import os

import pytest

from roxxel_dist.cluster.mailbox import post_answer, post_request, sweep, take_answer, take_requests, withdraw
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
    post_request(tmp_path)
    post_answer(tmp_path, "0123", {"step": 1})
    (tmp_path / ".save-answer-4567.part").touch()
    run = RunDirectory(tmp_path)
    run.claim(resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml"]
    second = post_request(tmp_path)
    with pytest.raises(ValueError, match=r"another process .*is training"):
        RunDirectory(tmp_path).claim(resume=True)
    assert take_requests(tmp_path) == [second], "a run that could not begin swept another's"
    run.release()
    sweep(tmp_path / "nowhere")


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        post_request(tmp_path / "gone")
