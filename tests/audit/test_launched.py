"""A run of two processes in a bucket, audited by one process from there."""

import json

import pytest
import yaml
from commands import run
from servers import S3Server

pytestmark = pytest.mark.xdist_group("bucket")
FIELDS = {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 32, "dropout_rate": 0.1, "log_every": 2, "eval_iters": 1,
    "checkpoint_every": 4, "phases": [{"steps": 8, "batch_size": 4, "seq_len": 17}],
}  # fmt: skip


@pytest.mark.long
def test_a_run_of_two_processes_in_a_bucket_is_audited_by_one(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FIELDS))
    with S3Server(tmp_path / "s3") as server, server.environment():
        url = server.url("run")
        words = ["--config", "run.yaml", "--data_path", tokens, "--run_dir", url, "--local_dir", "local"]
        options = ["--nprocs", 2, "--devices-per-proc", 2, "--max-restarts", 0]
        done = run("launch", "local", *options, "--", "train", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        done = run("audit", url, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "run": url, "equal": True, "problem": "", "steps": 8, "rows": 5, "checkpoints": 3, "digests": True,
        }  # fmt: skip
