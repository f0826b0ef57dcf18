"""Files that ask and answer, in one process. tests/whole/multiprocess/test_save.py has several."""

import errno
import os

import pytest

from roxxel_dist.place.directory import RunDirectory
from roxxel_dist.process import durable as mailbox
from roxxel_dist.process.durable import Mailbox, SaveRequests, save_mailbox


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Those of a job that looks whenever it is asked."""
    monkeypatch.setattr(mailbox, "LOOK_EVERY_S", 0.0)
    return SaveRequests(tmp_path)


def test_a_request_is_open_until_its_step_is_saved(requests, tmp_path):
    box = save_mailbox(tmp_path)
    assert not requests.is_open()
    one = box.post({})
    assert requests.is_open()
    assert requests.is_open(), "what is announced may be dropped, and announced again"
    requests.begin(15)
    assert not requests.is_open()
    requests.saved(14)  # one that was begun before is complete now: not what was asked for
    assert box.take_answer(one) is None
    requests.saved(15)
    assert not requests.is_open()
    two = box.post({})
    assert box.take_answer(two) is None, "an older answer"
    assert box.take_answer(one) == {"step": 15}
    assert box.take_answer(one) is None
    assert requests.is_open()
    requests.begin(10)  # steps may go back
    requests.failed(10, "no space left")
    assert box.take_answer(two) == {"error": "step 10 could not be saved: no space left"}
    assert list(tmp_path.iterdir()) == []


def test_who_asks_during_a_save_is_answered_by_the_next_one(requests, tmp_path):
    box = save_mailbox(tmp_path)
    early, same = box.post({}), box.post({})
    assert requests.is_open()
    requests.begin(5)
    late = box.post({})
    requests.saved(5)
    assert [box.take_answer(name) for name in (early, same, late)] == [{"step": 5}, {"step": 5}, None]
    assert requests.is_open()
    requests.begin(9)
    requests.saved(9)
    assert box.take_answer(late) == {"step": 9}


@pytest.mark.parametrize("begun", [True, False])
def test_asked_too_late_for_a_step_the_last_checkpoint_is_the_answer(requests, tmp_path, begun):
    box = save_mailbox(tmp_path)
    names = [box.post({})]
    if begun:
        assert requests.is_open()
        requests.begin(5)
        names.append(box.post({}))
    requests.finish(7)
    assert [box.take_answer(name) for name in names] == [{"step": 7}] * len(names)


def test_a_run_that_begins_does_not_see_what_a_dead_one_was_asked(tmp_path):
    box = save_mailbox(tmp_path)
    for name in ("config.yaml", "training_cursor.json"):
        (tmp_path / name).touch()
    box.post({})
    box.answer("old", {"step": 1})
    (box.folder / ".old.answer.part").touch()
    run = RunDirectory(tmp_path)
    run.claim(resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml", "training_cursor.json"]
    name = box.post({})
    with pytest.raises(ValueError, match=r"this process is training in .* already"):
        RunDirectory(tmp_path).claim(resume=True)
    assert [request for request, _ in box.take_requests()] == [name], "a run that could not begin cleared another's"
    run.release()
    save_mailbox(tmp_path / "nowhere").clear()


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        save_mailbox(tmp_path / "gone").post({})


def test_a_folder_that_cannot_be_used_does_not_stop_training(tmp_path, monkeypatch):
    monkeypatch.setattr(mailbox, "LOOK_EVERY_S", 0.0)
    run, away = tmp_path / "run", tmp_path / "away"
    run.mkdir()
    requests, box = SaveRequests(run), save_mailbox(run)
    name = box.post({})
    assert requests.is_open()
    requests.begin(5)
    os.rename(run, away)
    requests.saved(5)
    assert not requests.is_open()
    os.rename(away, run)
    assert not requests.is_open()
    assert box.take_answer(name) == {"step": 5}


def test_requests_are_taken_once_and_one_that_cannot_be_read_is_left(tmp_path):
    box = Mailbox(tmp_path / "box")
    assert box.take_requests() == []
    names = [box.post({"hosts": [host]}) for host in "ab"]
    (box.folder / "torn.request").write_text("{")
    assert sorted(box.take_requests()) == sorted(zip(names, ({"hosts": ["a"]}, {"hosts": ["b"]}), strict=True))
    assert box.take_requests() == []
    assert [path.name for path in box.folder.iterdir()] == ["torn.request"]
    box.withdraw("torn")
    box.withdraw("nobody")
    box.clear()
    assert not box.folder.exists()
