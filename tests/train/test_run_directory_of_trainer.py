"""What a Trainer does to its run directory, and when: nothing before `run`, and one process at a time."""

import os
import subprocess
import sys
import threading
import time

import pytest
from flax import nnx
from runs import PHASES, Bigram, make, rows
from small_disks import mounted_disk

from roxxel_dist.checkpoint.store import SaveError
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.process.file_lock import is_held_here


def contents(path):
    """Every file, and when it was changed; the lock is there as long as somebody looks."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


HOLDER = """
import sys
from pathlib import Path
from roxxel_dist.process.file_lock import hold_folder
hold_folder(Path(sys.argv[1]), "training in")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_only_opened_changes_nothing(corpus, run):
    (run / "checkpoints" / "13").rename(run / "away")  # the log is ahead of the newest checkpoint now
    before = contents(run)
    make(corpus, run, max_to_keep=None).close()
    assert contents(run) == before
    assert len(rows(run)) == 13


def test_another_process_that_trains_there_is_told_of(corpus, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "held\n"
        (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp-1").mkdir(parents=True)  # what it is saving
        with pytest.raises(ValueError, match=r"another process .*is training in"):
            make(corpus, tmp_path)
        assert (tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp-1").exists()
    finally:
        child.communicate("")
    first, second = make(corpus, tmp_path), make(corpus, tmp_path)  # of one process, as in a notebook
    second.close()
    first.close()
    assert not is_held_here(tmp_path)


class Unknowable(Bigram):
    @property
    def flops_per_token(self):
        raise RuntimeError("not known")


def test_a_trainer_that_cannot_be_opened_leaves_nothing_behind(corpus, tmp_path):
    shape = ModelConfig(dim=16, vocab_size=500)
    others = {*threading.enumerate()}  # of tests before, which may have left some
    with pytest.raises(RuntimeError, match="not known"):
        make(corpus, tmp_path, model=lambda: Unknowable(shape, nnx.Rngs(0)))
    assert not is_held_here(tmp_path)
    end = time.monotonic() + 60
    while any(t.name.startswith(("roxxel-", "checkpoint")) for t in {*threading.enumerate()} - others):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.05)


def test_a_run_whose_first_checkpoint_cannot_be_written_ends(corpus, tmp_path):
    with mounted_disk(tmp_path / "disk", "64k") as disk:
        made = make(corpus, disk / "run", PHASES)
        with pytest.raises(SaveError, match=r"step 1 could not be saved in .*No space left on device.* none yet"):
            made.run()
        made.close()
        assert made.step <= 1
        assert os.listdir(disk / "run" / "checkpoints") == []
