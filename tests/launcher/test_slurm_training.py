"""A training in a SLURM job that is requeued, loses a node, or meets its time limit: one run, and the same losses."""

import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from commands import FAST
from hosts import ROOT
from slurm_desk import LIMIT_S, OVER, Desk

from roxxel_dist.data.dataset import Roxxel

CONFIG = """
{dim: 16, num_blocks: 1, kv_heads: 1, head_size: 8, max_context: 64, dropout_rate: 0.1, grad_accum: 1, lr: 3.0e-3,
 phases: [{steps: STEPS, batch_size: 12, seq_len: 33}],
 log_every: 1, eval_every: 100, eval_iters: 1, checkpoint_every: 20}
"""
# In each rank, before anything else is imported: a step takes a while, so that there is time to disturb it.
SLOW = """
import os, time
from roxxel_dist.process.progress import Progress
enter = Progress.enter
def slowly(self, *step):
    time.sleep(float(os.environ["SECONDS_A_STEP"]))
    enter(self, *step)
if "SECONDS_A_STEP" in os.environ:
    Progress.enter = slowly
"""
Trained = Callable[..., tuple[Desk, str]]


@pytest.fixture
def train(desk: Callable[[int], Desk]) -> Trained:
    """Submit a training of so many steps, and wait until it has done some."""

    def begin(steps: int, *options: object, nodes: int = 2, until: int = 20, step_s: float = 0.05) -> tuple[Desk, str]:
        one = desk(nodes)
        tokens = np.random.default_rng(0).integers(0, 500, 1 << 17, np.uint16)
        Roxxel(one.folder / "corpus_*.rox").write([tokens], separator=None, vocab_size=500)
        (one.folder / "site").mkdir()
        (one.folder / "site" / "sitecustomize.py").write_text(SLOW)
        slow = {"PYTHONPATH": f"{one.folder / 'site'}:{ROOT}", "SECONDS_A_STEP": str(step_s)}
        (one.folder / "config.yaml").write_text(CONFIG.replace("STEPS", str(steps)))
        words = ["--nodes", 2, "--devices-per-proc", 1, *options, "--", *TRAIN, "--run_dir", "run"]
        number = one.launch(*words, XLA_FLAGS=FAST, **slow)
        one.until(lambda: one.step() >= until, f"step {until}")
        return one, number

    return begin


TRAIN = ("train", "--config", "config.yaml", "--data_path", "corpus")


def check(desk: Desk, number: str, steps: int) -> dict[str, str]:
    """The job goes on to its end, in one run directory, with the losses of a run that nothing has disturbed."""
    seen = set()
    end = time.monotonic() + LIMIT_S
    while (job := desk.slurm.job(number))["JobState"] not in OVER:
        seen.add(job["JobState"])
        assert time.monotonic() < end, desk.log()
        time.sleep(0.1)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), desk.log()
    assert "FAILED" not in seen
    local = [sys.executable, "-m", "roxxel_dist", "launch", "local", "--nprocs", 2, "--devices-per-proc", 1]
    env = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": FAST}
    told = desk.slurm.run(*local, "--", *TRAIN, "--run_dir", "alone", cwd=desk.folder, env=env, timeout=LIMIT_S)
    assert told.returncode == 0, told.stderr
    assert [row["step"] for row in desk.rows()] == list(range(1, steps + 1))
    assert desk.rows() == desk.rows("alone")
    assert not desk.left()
    return job


@pytest.mark.cluster
def test_a_training_goes_on_after_a_requeue(train: Trained) -> None:
    two, number = train(120)
    two.slurm.run("scontrol", "requeue", number)
    job = check(two, number, 120)
    assert job["Restarts"] == "1"
    assert "resuming after step" in two.log()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_is_longer_than_its_time_limit(train: Trained) -> None:
    # SLURM asks after 75 s (120 less the grace and the slack): all steps take 90 s, a start on a busy machine 40 s.
    two, number = train(600, "--slurm-time", 2, "--grace", 30, step_s=0.15)
    job = check(two, number, 600)
    assert int(job["Restarts"]) >= 1
    assert "SLURM asked it to end" in two.log()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["killed slurmd", "set DOWN"])
def test_a_lost_node_has_slurm_queue_the_job_again(how: str, train: Trained) -> None:
    two, number = train(300)
    if how == "killed slurmd":
        two.slurm.kill_node("h2")
    else:
        two.slurm.run("scontrol", "update", "nodename=h2", "state=DOWN", "reason=test")
    two.slurm.wait(number, "PENDING", limit=LIMIT_S)
    if how == "killed slurmd":
        two.slurm.start_node("h2")
    two.slurm.run("scontrol", "update", "nodename=h2", "state=RESUME")
    job = check(two, number, 300)
    assert job["Restarts"] == "1"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_goes_on_in_place_with_a_spare_node(train: Trained) -> None:
    three, number = train(300, "--spare-hosts", 1, nodes=3)
    three.slurm.run("scontrol", "update", "nodename=h2", "state=DOWN", "reason=test")
    job = check(three, number, 300)
    assert job["Restarts"] == "0"
    assert "going on without h2, with h3 instead" in three.log()
