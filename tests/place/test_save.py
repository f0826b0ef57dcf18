"""The command that asks; the job here is this process, which holds the run directory and looks into it."""

import threading
import time

import pytest
from commands import run

from roxxel_dist.cli import main
from roxxel_dist.place.directory import RunDirectory, is_held
from roxxel_dist.place.run_place import NotSaved, ask_for_checkpoint
from roxxel_dist.process.durable import SaveRequests


@pytest.fixture
def held(tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "training_cursor.json").touch()
    directory.claim(resume=True)
    yield directory
    directory.release()


def answering(folder, answer, release=None):
    """A thread that answers the next request."""

    def work():
        requests = SaveRequests(folder)
        while not requests.is_open():
            time.sleep(0.01)
        if answer is not None:
            requests.begin(3)
            answer(requests)
        if release is not None:
            release()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_it_waits_for_the_answer(held, tmp_path):
    job = answering(tmp_path, lambda job: job.saved(7))
    said = run("save", tmp_path, cwd=tmp_path)
    job.join()
    assert (said.returncode, said.stdout, said.stderr) == (0, "saved: step 7\n", "")
    job = answering(tmp_path, lambda job: job.saved(8), held.release)  # it answers and ends at once
    assert ask_for_checkpoint(tmp_path, 30) == 8
    job.join()


def test_it_says_why_nothing_was_saved(held, tmp_path, capsys):
    job = answering(tmp_path, lambda job: job.failed(3, "no space left"))
    code = main(["save", str(tmp_path)])
    job.join()
    said = capsys.readouterr()
    assert (code, said.out) == (1, "")
    assert said.err == "roxxel-dist: step 3 could not be saved: no space left\n"
    with pytest.raises(NotSaved, match=r"did not save within 0.3 s: see its log; wait longer with timeout=SECONDS"):
        ask_for_checkpoint(tmp_path, 0.3)
    job = answering(tmp_path, None, held.release)
    with pytest.raises(NotSaved, match="ended before it saved"):
        ask_for_checkpoint(tmp_path, 30)
    job.join()


def test_where_nobody_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "."):
        assert main(["save", name]) == 2
        assert f"{name} is not a run directory" in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    (tmp_path / "training_cursor.json").touch()
    directory = RunDirectory(tmp_path)
    directory.claim(resume=True)
    assert is_held(tmp_path)
    directory.release()
    assert not is_held(tmp_path)
    assert main(["save", "."]) == 2
    assert "no job trains in . now: its checkpoints are in checkpoints" in capsys.readouterr().err
    assert not list(tmp_path.glob(".save*"))
