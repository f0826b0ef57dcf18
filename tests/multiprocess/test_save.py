"""Asking a job of several processes for a checkpoint: the same steps on all ranks, and nobody waits for ever."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import environment, run, start, wait_for

from roxxel_dist.cluster.mailbox import post_request
from roxxel_dist.save import NotSaved, ask_for_checkpoint

LOOP = os.path.join(os.path.dirname(__file__), "save_loop.py")


@pytest.fixture
def folder(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    return run_dir


@pytest.fixture
def job(folder):
    """Starts `job(mode, processes)` under the launcher; ends it, if it still runs."""
    started = []

    def begin(mode, processes):
        words = ["--nprocs", processes, "--devices-per-proc", 1, "--", "python", LOOP, mode, folder]
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
    launcher = job("lockstep", 3)

    def ask(_):
        time.sleep(random.uniform(0, 5))
        return ask_for_checkpoint(folder, 60)

    with ThreadPoolExecutor(20) as people:
        answers = list(people.map(ask, range(20)))
    said = run("save", folder, cwd=folder.parent)
    (folder / "stop").touch()
    assert launcher.wait(60) == 0, log(folder)
    first, second, third = seen(folder, 3)
    assert first == second == third
    assert sorted(set(first)) == first, "a step was saved twice"
    assert said.stdout == f"saved: step {first[-1]}\n", said.stderr
    assert sorted({*answers, first[-1]}) == first
    assert len(first) > 5, "all at once: nothing was tried"
    assert not [path for path in folder.iterdir() if path.name.startswith(".save")]


def test_ranks_that_leave_do_not_keep_the_others(folder, job):
    """With nothing to hold the ranks together, a fast one leaves long before a slow one, whatever is asked then."""
    launcher = job("free", 3)
    asked = 0
    while launcher.poll() is None:
        post_request(folder)
        asked += 1
        time.sleep(random.uniform(0, 0.1))
    assert launcher.wait(60) == 0, log(folder)
    first, second, third = seen(folder, 3)
    assert first == second == third
    assert first
    assert asked > 20


def test_a_rank_that_does_not_answer_is_named(folder, job):
    launcher = job("late", 2)
    with pytest.raises(NotSaved, match="rank 1 of 2 did not say within 1 s which step it is in"):
        ask_for_checkpoint(folder, 60)
    (folder / "come").touch()
    assert ask_for_checkpoint(folder, 60) >= 0
    assert launcher.wait(60) == 0, log(folder)
    assert seen(folder, 2) == [[1], [1]]


def test_a_coordinator_that_dies_leaves_no_noise(folder):
    """Without a launcher: rank 1's thread waits in the key-value store when rank 0, which keeps it, is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    try:
        for rank in (0, 1):
            job = {"ROXXEL_COORDINATOR": f"127.0.0.1:{port}", "ROXXEL_NUM_PROCESSES": "2"}
            more = {"ROXXEL_PROCESS_ID": str(rank), "ROXXEL_LOCAL_DEVICES": "1"}
            words = [sys.executable, LOOP, "lockstep", str(folder)]
            ranks.append(subprocess.Popen(words, env=environment(**job, **more), stderr=subprocess.PIPE, text=True))
        wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)), what="both ranks")
        time.sleep(0.3)
        ranks[0].kill()
        _, text = ranks[1].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[1].returncode != 0
    assert "Exception in thread" not in text
    assert "save requests" not in text
