"""A rank of a real training with half of its CPU time: it is named, and the losses are those of a run without."""

import json
import re

import pytest
from commands import launched, losses, make_corpus, rows, run, start, wait_for
from cpu_quota import cpu_share, missing, quota

from roxxel_dist.cluster.exit_codes import EXIT_DRAINED

CONFIG = """
dim: 64
num_blocks: 2
kv_heads: 2
max_context: 64
phases:
  - {steps: 1000, batch_size: 16, seq_len: 65}
log_every: 1
eval_every: 50
eval_iters: 2
checkpoint_every: 50
"""


def ranks_now(folder):
    """The ranks of the job that runs, as `ps --json` has them."""
    jobs = json.loads(run("ps", "--json", cwd=folder, XDG_STATE_HOME=str(folder / "state")).stdout)
    return [rank for job in jobs for rank in job["ranks"]]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_rank_at_half_speed_is_named_and_no_bit_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make_corpus(tmp_path)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    slow, said = tmp_path / "slow", tmp_path / "started.log"
    launcher = start(*launched(2, 1, "slow"), cwd=tmp_path)
    try:
        wait_for(lambda: max(rows(slow), default=0) >= 60, what="step 60")
        assert {rank["slow"] for rank in ranks_now(tmp_path)} == {None}
        pid = next(rank["pid"] for rank in ranks_now(tmp_path) if rank["rank"] == 1)
        with quota(pid, cpu_share(pid) / 2):
            begun = max(rows(slow))
            wait_for(lambda: "is slow" in said.read_text() or max(rows(slow)) > begun + 150, what="its name")
            assert [rank["slow"] is None for rank in ranks_now(tmp_path)] == [True, False]
            launcher.send_signal(2)
            assert launcher.wait(120) == EXIT_DRAINED, said.read_text()
    finally:
        launcher.kill()
        launcher.wait()
    (name,) = re.findall(
        r"rank (\d+) on host \S+ is slow, ([\d.]+) x the others, after step (\d+): (.*)", said.read_text()
    )
    print(begun, name)
    assert name[0] == "1"
    assert float(name[1]) >= 1.5
    assert begun < int(name[2]) <= begun + 51  # the last row is a step behind
    assert "its cgroup was throttled for" in name[3]
    assert "no longer slow" not in said.read_text()
    last = max(rows(slow))
    again = run(*launched(2, 1, "whole", "--max_steps", last), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "whole").items() >= {k: v for k, v in losses(slow).items() if k < last}.items()
