"""Checkpoints of real processes: all ranks agree on what is saved, and other ranks restore it."""

import os

import pytest
from commands import run

SCRIPT = os.path.join(os.path.dirname(__file__), "saving.py")


def launch(processes, devices, what, cwd):
    """What each rank saw, by rank."""
    words = ["--nprocs", processes, "--devices-per-proc", devices, "--", "python", SCRIPT, what, "c"]
    result = run("launch", "local", *words, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    saw = [cwd / f"saw-{rank}" for rank in range(processes)]
    lines = [path.read_text().splitlines() for path in saw]
    for path in saw:
        path.unlink()
    return lines


@pytest.mark.cluster
def test_a_write_that_fails_on_one_rank_fails_on_all(tmp_path):
    first, second = launch(2, 2, "save", tmp_path)
    lost = "the checkpoint of step {} could not be saved in {}/c (rank {}: File too large); {}"
    two, three = (
        lost.format(step, tmp_path, rank, "the newest complete one is of step 1") for step, rank in ((2, 1), (3, 0))
    )
    assert first == [
        "refused rank 1 does not see it; every rank must see the same folder",
        "latest 1",
        "1: saved",
        f"2: {two}",
        "latest 1",
        f"3: {three}",
        f"error {three}",
        "left ['.lock', '1']",
        "steps [4, 5] best 4",
    ]
    assert second == first
    # What 2 processes with 2 devices each have saved.
    assert launch(1, 2, "restore", tmp_path) == [["restored {'rows': 7} on 2 devices"]]
