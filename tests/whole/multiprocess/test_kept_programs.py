"""A job that is started again compiles nothing, on any rank, and computes the same bits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, rows
from corpora import write_corpus

SCRIPT = Path(__file__).parent / "kept_programs.py"
CONFIG = """
dim: 16
num_blocks: 1
kv_heads: 1
head_size: 8
max_context: 64
dropout_rate: 0.1
phases: [{steps: 14, batch_size: 4, seq_len: 17}]
log_every: 1
eval_every: 6
eval_iters: 1
checkpoint_every: 4
"""


def compiled(folder, attempt):
    """What each rank has compiled in an attempt, in order."""
    return [(folder / f"events-{attempt}-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.cluster
def test_a_second_attempt_compiles_nothing_on_any_rank(tmp_path):
    data = write_corpus(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    train = ["--config", "config.yaml", "--data_path", data, "--run_dir", "run", "--memory_checkpoint_every", "0"]
    words = [sys.executable, "-m", "roxxel_dist", "launch", "local", "--nprocs", 2, "--devices-per-proc", 2]
    words += ["--max-restarts", 1, "--", "python", SCRIPT, tmp_path, *train]
    env = environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"), KILL_AT="10")
    result = subprocess.run([*map(str, words)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    resumed = re.search(r"resuming after step (\d+)", result.stdout)
    assert resumed, result.stdout
    for first, second in zip(compiled(tmp_path, 0), compiled(tmp_path, 1), strict=True):
        assert {"jit(make)", "jit(step)", "jit(evaluate)"} <= set(first)
        assert second == []
    before = [json.loads(line) for line in (tmp_path / "before.jsonl").read_text().splitlines()]
    after = rows(tmp_path / "run")
    again = [row for row in before if row["step"] > int(resumed[1])]
    assert again
    for row in again:
        assert row["train_loss"] == after[row["step"]]["train_loss"]
        assert row.get("val_loss") == after[row["step"]].get("val_loss")
    assert max(after) == 14
