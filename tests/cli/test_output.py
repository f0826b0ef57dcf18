"""Output that cannot be written: a full disk is 1, a reader that has left is 141, as the page of exit codes says."""

import json
import subprocess
from pathlib import Path

import pytest
from commands import command, environment

from roxxel_dist.place.directory import CONFIG, METRICS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder that the readers take for a run."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("dim: 32\n")
    rows = [{"step": step, "train_loss": 3.0 - step / 100} for step in range(1, 90)]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


WORDS = [["report", "runs/one"], ["top", "--once", "runs/one"], ["train", "--help"]]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_disk_is_1(run: Path, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words), cwd=run, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr == "roxxel-dist: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_reader_that_has_left_is_141(run: Path, words: list[str]) -> None:
    with subprocess.Popen(
        command(*words), cwd=run, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before it writes
        assert (process.wait(120), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize(("words", "code"), [(["train", "--data_path", "nowhere"], 2), (["ps", "--all"], 0)])
def test_messages_that_cannot_be_written_change_no_code(run: Path, words: list[str], code: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words), cwd=run, env=environment(), stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert done.returncode == code
