"""Damaged checkpoints on two processes: both take the next older complete one together."""

import json
import os
import re
from pathlib import Path

import pytest
from commands import run
from damage import KINDS

SCRIPT = Path(__file__).parent / "damaged_runs.py"


def train_damaged(folder, count, kinds, **more):
    path = os.pathsep.join([str(SCRIPT.parents[2] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--max-restarts", 0, "--", "python", SCRIPT]
    done = run(*words, folder, count, *kinds, cwd=folder, PYTHONPATH=path, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == len(kinds) * count
    assert not {name: problem for name, problem in results.items() if problem}
    said = re.findall(r"step 8 in .* is damaged: .*written by rank [01].*; it is kept as 8.damaged", done.stdout)
    assert len(said) == len(results), done.stdout


@pytest.mark.long
def test_two_ranks_take_the_next_older_one(corpus, tmp_path):
    train_damaged(tmp_path, 1, ["flip"])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_damages(corpus, tmp_path):
    train_damaged(tmp_path, 5, KINDS, timeout=1500)
