"""docs/howto/slurm.md: every block, at the login node of a real SLURM of two nodes."""

import pytest
import slurm_cluster
from commands import rows
from hosts import Cluster
from howto import STEPS, on_hosts
from machines import missing

pytestmark = pytest.mark.docs


@pytest.fixture
def reader(tmp_path):
    if why := missing() or slurm_cluster.missing():
        pytest.skip(why)
    (tmp_path / "home").mkdir()
    with Cluster(2) as hosts, slurm_cluster.Slurm(hosts, tmp_path / "home") as slurm:
        doing = on_hosts(hosts, tmp_path / "work", **slurm.environ)
        yield doing


def test_a_job_is_submitted_and_looked_at(reader):
    reader.page("slurm.md", "Run it")
    run = reader.folder / "runs" / "mine"
    assert set(rows(run)) == STEPS
    assert " h2 1 | " in (run / "logs" / "rank-1.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_is_queued_again_and_goes_on(reader):
    reader.page("slurm.md", "Time limit, preemption and restarts", "Inside a job of your own")
    assert set(rows(reader.folder / "runs" / "own")) == STEPS
