"""Asking a job of several processes for a checkpoint: the same steps on all ranks."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import warm
from commands import environment, wait_for
from servers import free_port

from roxxel_dist.cli import main
from roxxel_dist.place.run_place import ask_for_checkpoint
from roxxel_dist.process.durable import SAVE_FOLDER

LOOP = (Path(__file__).parent / "save_loop.py").read_text()


@pytest.fixture
def folder(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    (run_dir / "training_cursor.json").touch()  # the first file of a run
    return run_dir


@pytest.fixture
def job(folder):
    """Starts `job(processes)`, without a launcher, and returns the ranks; ends them, if they still run."""
    started = []

    def begin(processes):
        job = {"COORDINATOR": f"127.0.0.1:{free_port()}", "NUM_PROCESSES": processes, "LOCAL_DEVICES": 1}
        for rank in range(processes):
            env = environment(**{f"ROXXEL_{name}": str(value) for name, value in (job | {"PROCESS_ID": rank}).items()})
            with (folder.parent / "started.log").open("a") as log:
                started.append(warm.start(LOOP, [folder], folder.parent, env, [log, log]))
        wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(processes)), what="all ranks")
        return started

    yield begin
    for rank in started:
        with suppress(ProcessLookupError):
            rank.kill()


def seen(folder, processes):
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(processes)]


def log(folder):
    return (folder.parent / "started.log").read_text()


def test_all_ranks_save_the_steps_that_were_asked_for(folder, job, capsys):
    ranks = job(2)

    def ask(_):
        time.sleep(random.uniform(0, 1))
        return ask_for_checkpoint(folder, 60)

    with ThreadPoolExecutor(12) as people:
        answers = list(people.map(ask, range(12)))
    assert main(["save", str(folder)]) == 0
    (folder / "stop").touch()
    assert [rank.wait(60) for rank in ranks] == [0, 0], log(folder)
    first, second = seen(folder, 2)
    assert first == second
    assert sorted(set(first)) == first, "a step was saved twice"
    assert capsys.readouterr().out == f"saved: step {first[-1]}\n"
    assert {*answers} <= {*first}
    assert len(first) > 1, "all at once: nothing was tried"
    assert not (folder / SAVE_FOLDER).exists()
