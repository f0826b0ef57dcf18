"""A process whose training is done ends with its code, whatever its trackers wait for, and shows no traceback."""

import subprocess
import sys

import pytest
from commands import environment

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
from roxxel_dist import __main__ as program
from roxxel_dist import cli
from roxxel_dist.process import interrupt
from roxxel_dist.train.log import wandb as module
from roxxel_dist.train.log.base import LogQueue
interrupt.EXIT_WAIT_S = 2.0

def signal_service(number):
    [service] = module._services()
    os.kill(service, number)
    while number == signal.SIGKILL and module._services():
        time.sleep(0.05)

class Stuck:
    def row(self, row):
        pass
    def close(self):
        time.sleep(1000)

def command(words):
    Path("run").mkdir()
    with_wandb = "wandb" in words
    trackers = [module.WandbTracker(Path("run"), "offline", "tests")] if with_wandb else [Stuck()]
    queue = LogQueue(trackers)
    queue.row({"step": 1, "train_loss": 1.0})
    EVENT
    queue.row({"step": 2, "train_loss": 0.5})
    queue.close(LIMIT)
    print("done", flush=True)
    return 7

cli.main = command
sys.argv[1:] = WORDS
program.main()
"""
BEGUN = "while not list(Path('run').glob('wandb/*run-*/*.wandb')): time.sleep(0.05)\n    "
CASES = {
    "wandb goes on": (["wandb"], BEGUN, 30),
    "its service is killed in mid run": (["wandb"], f"{BEGUN}signal_service(signal.SIGKILL)", 30),
    "its service hangs in mid run": (["wandb"], f"{BEGUN}signal_service(signal.SIGSTOP)", 3),
    "a tracker that hangs": ([], "", 1),
    "one that left a function for the end": ([], "import atexit; atexit.register(time.sleep, 1000)", 1),
    "one that left a thread": ([], "threading.Thread(target=time.sleep, args=(1000,)).start()", 1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case == "wandb goes on" else case for case in CASES]
)
def test_the_process_ends_with_its_code(tmp_path, case):
    words, event, limit = CASES[case]
    text = BEGIN.replace("EVENT", event).replace("WORDS", repr(words)).replace("LIMIT", str(limit))
    env = {**environment(), "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    ran = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (7, "done\n"), ran.stderr
    assert "Traceback" not in ran.stderr
    assert ("still busy after" in ran.stderr) == (limit < 30)
