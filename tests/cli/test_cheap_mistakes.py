"""Mistakes that can be known without jax are one line before its import, of `train` and of a launch on this machine."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import environment

from roxxel_dist.cli import main
from roxxel_dist.data.dataset import Roxxel

SMALL = ["--dim", "32", "--num_blocks", "1", "--max_context", "32"]
PHASES = "[{steps: 5, batch_size: 2, seq_len: 33}]"
MISTAKES = [
    ([], "no data: name a text file"),
    (["--data_path", "nowhere"], "data_path nowhere: no such file or folder"),
    (["--data_path", "empty"], "data_path empty: there is no file in this folder"),
    (["--data_path", "text.txt", "--batch_size", "3", "--grad_accum", "2"], "is not a multiple of grad_accum (2)"),
    (["--data_path", "text.txt", "--phases", PHASES, "--warmup_steps", "9"], "warmup_steps is 9: it must be below the"),
    (
        ["--data_path", "data", "--batch_size", "2", "--warmup_steps", "100000"],
        "warmup_steps is 100000: it must",
    ),
    (["--data_path", "data", "--phases", "[{steps: 5, batch_size: 2, seq_len: 99}]"], "phase 1: seq_len is 99"),
    (["--data_path", "data", "--phases", "[{steps: 5, batch_size: 640, seq_len: 33}]"], "phase 1"),
    (["--data_path", "text.txt", "--learningrate", "3"], "did you mean --lr?"),
]
PROGRAM = """
import contextlib, io, sys
from roxxel_dist.cli import main
for words in {lines}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(words)
    print([code, "jax" in sys.modules, said.getvalue()])
"""


def test_they_are_one_line_before_jax_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    (tmp_path / "data").mkdir()
    Roxxel(tmp_path / "data" / "x.rox").write([np.arange(3000, dtype=np.uint16) % 50], vocab_size=50)
    before = sorted(path.name for path in tmp_path.iterdir())
    starts = (["train"], ["launch", "local", "--", "train"])
    lines = [[*start, *SMALL, *words] for words, _ in MISTAKES for start in starts]
    program = [sys.executable, "-c", PROGRAM.format(lines=lines)]
    done = subprocess.run(
        program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    answers = [eval(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines), done.stderr
    for (code, has_jax, said), (_, message) in zip(answers, [row for row in MISTAKES for _ in starts], strict=True):
        assert (code, has_jax, said.count("\n")) == (2, False, 1), said
        assert message in said
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("word", "hint"), [("tarin", "did you mean 'train'?"), ("evla", "did you mean 'eval'?"), ("no_such", "full path")]
)
def test_a_program_that_is_not_there_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], word: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "local", "--nprocs", "2", "--", word, "--lr", "3"]) == 2
    said = capfd.readouterr().err
    assert f"program not found: {word!r}; " in said
    assert hint in said
    assert list(tmp_path.iterdir()) == []
