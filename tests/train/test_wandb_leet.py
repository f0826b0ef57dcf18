"""`wandb leet`, W&B's own viewer for the terminal, opens the offline runs of ours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, wait_for
from job_desk import LIMIT_S

from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.log.wandb import WandbTracker

WANDB = str(Path(sys.executable).with_name("wandb"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run directory of an offline run, which is only read."""
    folder = tmp_path_factory.mktemp("run")
    with LogQueue([WandbTracker(folder, "offline", "tests", config={"lr": 0.5})]) as log:
        for step in range(1, 31):
            log.row({"step": step, "train_loss": 1 / step, "val_loss": 2 / step})
    return folder


def test_leet_reads_the_numbers(run, tmp_path):
    words = [WANDB, "leet", "inspect", "--summary", "--json", str(run / "wandb" / "latest-run")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(HOME=str(tmp_path)), timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["summary"]["train_loss"] == 1 / 30
    assert told["summary"]["best_step"] == 30
    assert told["config"]["lr"] == 0.5


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_leet_shows_the_curves_in_a_terminal(run, tmp_path):
    env = environment(HOME=str(tmp_path), TMUX_TMPDIR=str(tmp_path))
    env.pop("TMUX", None)
    tmux = ["tmux", "-u", "-f", "/dev/null"]

    def screen():
        return subprocess.run([*tmux, "capture-pane", "-p"], env=env, capture_output=True, text=True).stdout

    words = [WANDB, "leet", "run", str(run / "wandb" / "latest-run")]
    try:
        subprocess.run([*tmux, "new-session", "-d", "-x", "140", "-y", "40", *words], env=env, check=True)
        wait_for(lambda: "train_loss" in screen() and "val_loss" in screen(), LIMIT_S, "the curves")
    finally:
        subprocess.run([*tmux, "kill-server"], env=env, capture_output=True)
