"""docs/howto/wandb.md: every block, with W&B's real client and a server on the loopback."""

import pytest
import yaml
from commands import rows
from howto import STEPS, Follower
from wandb_sweeps import SweepServer

from roxxel_dist.sweep.study.folder import read_study

pytestmark = pytest.mark.docs
SWEEP = {
    "method": "random",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {"lr": {"min": 0.001, "max": 0.01}},
}


@pytest.fixture
def server():
    with SweepServer() as server:
        yield server


@pytest.fixture
def reader(tmp_path, server):
    """Someone who has an account at the server."""
    more = {"HOME": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_ERROR_REPORTING": "false"}
    doing = Follower(tmp_path / "work", **server.environment, **more)
    (doing.folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    return doing


def test_a_run_without_an_account_is_sent_later(reader, server):
    reader.page("wandb.md", "Log a run offline")
    (run,) = server.runs.values()
    written = rows(reader.folder / "runs" / "mine")
    assert set(written) == STEPS
    assert [row["train_loss"] for row in run.history] == [row["train_loss"] for row in written.values()]


@pytest.mark.long
def test_a_run_as_it_goes_and_once_more(reader, server):
    reader.page("wandb.md", "Log a run live")
    (run,) = server.runs.values()
    assert [row["_step"] for row in run.history] == sorted(STEPS)
    assert run.twice == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_trials_are_sent_later_and_a_server_leads(reader, server):
    reader.page("wandb.md", "Log the trials of a sweep")
    assert len(server.runs) == 1
    assert not server.sweeps
    reader.page("wandb.md", "Let a W&B server lead a sweep")
    (sweep,) = server.sweeps.values()
    assert sweep.project == "mine"
    (trial,) = read_study(reader.folder / "studies" / "led").done
    assert trial.params == server.params[sweep.runs[0]]
