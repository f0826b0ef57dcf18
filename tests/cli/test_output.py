"""Output that cannot be written: a full disk is 1, a reader that has left is 141, as the page of exit codes says."""

import json
import os
from pathlib import Path
from typing import IO, Any

import pytest
import warm
from commands import environment

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


def ended(words: list[str], folder: Path, stdout: IO[Any], stderr: IO[Any] | None = None) -> tuple[int, str]:
    """The exit code of a command with these streams, and its messages where they are to be read."""
    with (folder / "messages").open("w+") as messages:
        code = warm.begin({"words": words}, folder, environment(), (stdout, stderr or messages)).wait(120)
        messages.seek(0)
        return code, messages.read()


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_full_disk_is_1(run: Path, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        said = ended(words, run, full)
    assert said == (1, "roxxel-dist: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_reader_that_has_left_is_141(run: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # before it writes
    with open(writer, "wb") as pipe:
        assert ended(words, run, pipe) == (141, "")


@pytest.mark.parametrize(("words", "code"), [(["train", "--data_path", "nowhere"], 2), (["ps", "--all"], 0)])
def test_messages_that_cannot_be_written_change_no_code(run: Path, words: list[str], code: int) -> None:
    with Path("/dev/full").open("w") as full, Path("/dev/null").open("w") as null:
        assert ended(words, run, null, full) == (code, "")
