"""The real W&B client against a server of our own on the loopback, with processes that are killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from wandb_server import WandbServer

from roxxel_dist.process.exit_codes import pip_install
from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.log.wandb import WandbTracker

# Trains as the trainer does: the row is in the tables first. "killed" ends it by SIGKILL with its last row, "stopped"
# by closing, "crashed" by an exception. At step `wait` it waits for the file "go".
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.log.choose import trackers_for
from roxxel_dist.train.log.wandb import WandbTracker
mode, restored, last, end, wait = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
wandb = WandbTracker(Path("run"), mode, "tests", config={"lr": 0.5, "dim": 8})
log = LogQueue([*trackers_for(Path("run"), 60, restored), wandb])
def train(first, last, shift=0.0):
    for step in range(first, last + 1):
        row = {"step": step, "train_loss": 1.0 / step + shift}
        if step % 10 == 0:
            row |= {"val_loss": abs(step - 30) / 100 + 1 + shift}
        log.row(row)
        while step == wait and not Path("go").exists():
            time.sleep(0.02)
began = time.monotonic()
with log:
    train(restored + 1, last)
    if end == "rewound":
        log.rewind(last - 10)
        train(last - 9, last + 5, shift=100.0)
    trained = time.monotonic() - began
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "crashed":
        raise RuntimeError("a bad batch")
Path("waited").write_text(str(time.monotonic() - began - trained))
"""
LIMIT_S = 120


def environment(server=None, **more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {
        **clean,
        **(server.environment if server else {}),
        "WANDB_CACHE_DIR": "cache",
        "HOME": "/nonexistent",
        **more,
    }


def train(folder, env, mode, restored, last, end="stopped", wait=0, until=None, program=PROGRAM):
    """Run the program to its end; it waits at step `wait` until `until` holds."""
    (folder / "go").unlink(missing_ok=True)
    command = [sys.executable, "-c", program, mode, str(restored), str(last), end, str(wait)]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            limit = time.monotonic() + LIMIT_S
            while until is not None and not until():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < limit, "what shall come first never came"
                time.sleep(0.05)
            (folder / "go").touch()
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == {"killed": -signal.SIGKILL, "crashed": 1}.get(end, 0), err
    return out, err


def run_id(folder):
    return json.loads((folder / "run" / "wandb.json").read_text())["id"]


def holds(server, rows):
    return any(len(run.lines) == rows for run in list(server.runs.values()))


def written(folder):
    """The offline folders that have more in them than the beginning of a run."""
    return {file for file in (folder / "run" / "wandb").glob("offline-run-*/*.wandb") if file.stat().st_size > 4000}


def steps(run):
    return [row["_step"] for row in run.history]


@pytest.fixture
def server():
    with WandbServer() as server:
        yield server
    assert server.unknown == []


@pytest.mark.cluster
def test_kills_and_restarts_make_one_run_and_no_step_is_sent_twice(tmp_path, server):
    # The client sends often, so that the first process dies when the server has some of its rows and not the others.
    often = environment(server, WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")

    train(tmp_path, often, "online", 0, 40, "killed", wait=20, until=lambda: holds(server, 20))
    run = server.run(run_id(tmp_path))
    assert 20 <= len(run.lines) < 40
    # It resumes first before the server's last row, and later after it: rows that the killed run did not send are lost.
    train(tmp_path, environment(server), "online", 10, 50, "killed")
    assert len(run.lines) < 50
    out, _ = train(tmp_path, environment(server), "online", 45, 60)
    assert list(server.runs) == [run.name]
    assert steps(run) == sorted(set(steps(run)))
    assert {*range(1, 21), *range(46, 61)} <= set(steps(run)) <= set(range(1, 61))
    assert run.twice == []
    assert all(row["train_loss"] == 1 / row["_step"] for row in run.history)
    assert (run.config["lr"], run.config["dim"]) == (0.5, 8)
    assert (run.summary["best_val_loss"], run.summary["best_step"]) == (1.0, 30)
    assert run.exit_code == 0
    assert f"/runs/{run.name}" in out
    assert not (tmp_path / "wandb").exists(), "its files are in the run directory"


def wrote(folder):
    """The steps in the tables, which no trouble with W&B may touch."""
    return [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_without_the_package_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with LogQueue([WandbTracker(tmp_path, "online", "tests")]) as log:
        for step in (1, 2):
            log.row({"step": step, "train_loss": 1.0})
    assert capsys.readouterr().err == (
        f"W&B is off now: the package wandb is missing: {pip_install('wandb')}. Training continues, and the "
        "rows are in metrics.jsonl\n"
    )


BROKEN_OFF = """
import importlib.abc, sys
class Once(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "wandb.sdk":
            sys.meta_path.remove(self)
            print("broken off", flush=True)
            raise SystemError("AST constructor recursion depth mismatch (before=213, after=100)")
sys.meta_path.insert(0, Once())
"""


def test_without_a_login_one_line_says_so(tmp_path):
    """Of the client itself, whose import is begun anew where Python breaks it off."""
    out, _ = train(tmp_path, environment(), "online", 0, 60, program=BROKEN_OFF + PROGRAM)
    assert out.count("broken off") == 1
    assert out.count("W&B is off now: No API key configured.") == 1
    assert wrote(tmp_path) == list(range(1, 61))


@pytest.mark.long
def test_offline_needs_no_account_and_a_sync_sends_all_folders(tmp_path, server):
    # The client writes often, so that the processes that are killed leave folders with some of their rows.
    often = environment(WANDB__TRANSACTION_LOG_FLUSH_INTERVAL="1")
    train(tmp_path, often, "offline", 0, 20)
    for restored in (20, 10):
        before = written(tmp_path)
        train(
            tmp_path, often, "offline", restored, restored + 30, "killed",
            wait=restored + 20, until=lambda before=before: written(tmp_path) - before,
        )  # fmt: skip
    train(tmp_path, environment(), "offline", 35, 60)
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 4, "a folder a process; nobody touches that of another one"
    sync = [sys.executable, "-m", "wandb", "sync", "--yes", *folders]
    subprocess.run(sync, env=environment(server), cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT_S)
    run = server.runs[run_id(tmp_path)]
    assert list(server.runs) == [run.name]
    assert {*range(1, 21), *range(36, 61)} <= set(steps(run)) <= set(range(1, 61))
    assert (run.summary["best_val_loss"], run.summary["best_step"]) == (1.0, 30)
    assert run.config["dim"] == 8


@pytest.mark.long
def test_a_server_that_is_not_there_costs_a_line_and_the_next_start_goes_on(tmp_path):
    server = WandbServer()
    port = server.server_address[1]
    server.close()
    impatient = environment(server, WANDB_INIT_TIMEOUT="3")
    out, _ = train(tmp_path, impatient, "online", 0, 40)
    assert out.count("W&B is off now: ") == 1
    assert float((tmp_path / "waited").read_text()) > 1, "who waits for it is the end, not training"
    with WandbServer(port) as server:
        train(tmp_path, environment(server), "online", 40, 60)
        assert steps(server.runs[run_id(tmp_path)]) == list(range(41, 61))


@pytest.mark.long
def test_a_server_that_answers_no_more_costs_a_line_and_the_next_start_goes_on(tmp_path, server):
    impatient = environment(server, WANDB_FINISH_TIMEOUT="3", WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")

    def cut_off():
        if holds(server, 20):
            server.answering.clear()
        return not server.answering.is_set()

    out, _ = train(tmp_path, impatient, "online", 0, 40, wait=20, until=cut_off)
    assert out.count("W&B did not take everything in time: the rows are in metrics.jsonl") == 1
    assert wrote(tmp_path) == list(range(1, 41))
    server.answering.set()
    train(tmp_path, environment(server), "online", 40, 60)
    run = server.runs[run_id(tmp_path)]
    assert {*range(1, 21), *range(41, 61)} <= set(steps(run))
    assert steps(run) == sorted(set(steps(run)))


@pytest.mark.long
def test_going_back_logs_no_step_twice_and_says_so(tmp_path, server):
    often = environment(server, WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")
    out, _ = train(tmp_path, often, "online", 0, 40, "rewound", wait=40, until=lambda: holds(server, 40))
    run = server.runs[run_id(tmp_path)]
    assert steps(run) == list(range(1, 46))
    assert run.twice == []
    losses = {row["_step"]: row["train_loss"] for row in run.history}
    assert losses[40] == 1 / 40
    assert losses[41] == 1 / 41 + 100
    assert out.count("W&B cannot take back steps 31 to 40") == 1
    assert wrote(tmp_path) == list(range(1, 46))


@pytest.mark.long
def test_a_crash_ends_the_run_as_failed(tmp_path, server):
    train(tmp_path, environment(server), "online", 0, 5, "crashed")
    run = server.runs[run_id(tmp_path)]
    assert steps(run) == [1, 2, 3, 4, 5]
    assert run.exit_code == 1
