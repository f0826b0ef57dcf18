"""Asking a job of several processes for a checkpoint: the same steps on all ranks."""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import run, start, wait_for

from roxxel_dist.place.run_place import ask_for_checkpoint
from roxxel_dist.process.durable import SAVE_FOLDER

LOOP = os.path.join(os.path.dirname(__file__), "save_loop.py")


@pytest.fixture
def folder(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    (run_dir / "training_cursor.json").touch()  # the first file of a run
    return run_dir


@pytest.fixture
def job(folder):
    """Starts `job(processes)` under the launcher; ends it, if it still runs."""
    started = []

    def begin(processes):
        words = ["--nprocs", processes, "--devices-per-proc", 1, "--", "python", LOOP, folder]
        started.append(start("launch", "local", *words, cwd=folder.parent))
        wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(processes)), what="all ranks")
        return started[-1]

    yield begin
    for launcher in started:
        launcher.kill()
        launcher.wait()


def seen(folder, processes):
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]


def log(folder):
    return (folder.parent / "started.log").read_text()


def test_all_ranks_save_the_steps_that_were_asked_for(folder, job):
    launcher = job(2)

    def ask(_):
        time.sleep(random.uniform(0, 2))
        return ask_for_checkpoint(folder, 60)

    with ThreadPoolExecutor(12) as people:
        answers = list(people.map(ask, range(12)))
    said = run("save", folder, cwd=folder.parent)
    (folder / "stop").touch()
    assert launcher.wait(60) == 0, log(folder)
    first, second = seen(folder, 2)
    assert first == second
    assert sorted(set(first)) == first, "a step was saved twice"
    assert said.stdout == f"saved: step {first[-1]}\n", said.stderr
    assert {*answers} <= {*first}
    assert len(first) > 1, "all at once: nothing was tried"
    assert not (folder / SAVE_FOLDER).exists()
