"""Checkpoints that are damaged: none is used, the next older whole one is, and the run is what it would have been."""

import re
import shutil

import pytest
from damage import KINDS, copy_damaged, rows_of, state_of
from runs import make, saved, told

SEEDS = 15
LAST = 13


def check_resumed(corpus, finished_run, tmp_path, kind, seed, newest=1):
    run, step = copy_damaged(finished_run, tmp_path / "damaged", kind, seed, newest)
    resumed = make(corpus, run, max_to_keep=None)
    assert resumed.start_step == step, (kind, seed)
    resumed.run()
    resumed.close()
    assert (run / "checkpoints" / f"{LAST}.damaged").is_dir()
    log = told(run)[len(told(finished_run)) :]
    assert re.search(rf"step {LAST} in .* is damaged: .*written by rank 0.*it is kept as {LAST}.damaged", log), log
    assert rows_of(run) == rows_of(finished_run), (kind, seed)
    assert saved(run) == saved(finished_run)
    assert state_of(run, LAST) == state_of(finished_run, LAST), (kind, seed)
    shutil.rmtree(run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_older_whole_one_is_taken(corpus, finished_run, tmp_path, kind):
    check_resumed(corpus, finished_run, tmp_path, kind, seed=0, newest=1 + (kind == "flip"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages(corpus, finished_run, tmp_path, kind):
    for seed in range(1, 1 + SEEDS):
        check_resumed(corpus, finished_run, tmp_path, kind, seed, newest=1 + seed % 2)
