"""Forks, and a run with another's weights, on two processes."""

import hashlib

import pytest
from commands import launched, losses, make_corpus, run


@pytest.mark.long  # the guide does it on two processes too, with fewer questions
def test_on_two_processes(tmp_path):
    make_corpus(tmp_path)
    first = run(*launched(2, 1, "run", "--num_blocks", 1, "--max_steps", 10), cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    whole = losses(tmp_path / "run")
    before = {f: hashlib.sha256(f.read_bytes()).digest() for f in (tmp_path / "run").rglob("*") if f.is_file()}

    words = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 1, "--", "train"]
    fork = run(*words, "--fork", "run@5", "--run_dir", "fork", cwd=tmp_path)
    assert fork.returncode == 0, fork.stdout + fork.stderr
    assert losses(tmp_path / "fork") == {step: loss for step, loss in whole.items() if step > 5}
    tuned = run(*launched(2, 1, "tuned", "--num_blocks", 1, "--init_from", "run", "--max_steps", 2), cwd=tmp_path)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert losses(tmp_path / "tuned")[1][0] < whole[1][0]
    assert before == {f: hashlib.sha256(f.read_bytes()).digest() for f in (tmp_path / "run").rglob("*") if f.is_file()}

    missing = run(*words, "--fork", "run@7", "--run_dir", "none", cwd=tmp_path)
    assert missing.returncode == 2
    assert "run has no checkpoint of step 7; nearest is 5 or 10, kept are 1, 5, " in missing.stdout + missing.stderr
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["logs"]  # of the launcher

    words += ["--fork", "run@5", "--skip_steps", "7:8", "--run_dir", "without", "--max_steps", 9]
    without = run(*words, cwd=tmp_path)
    assert without.returncode == 0, without.stdout + without.stderr
    again = losses(tmp_path / "without")
    assert sorted(again) == list(range(6, 10))
    assert again[6][0] == whole[6][0]
    assert again[7] != whole[7]
