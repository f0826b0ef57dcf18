"""docs/howto/ssh.md, elastic.md and docs/two-hosts.md: every block, on two hosts with a real sshd each."""

import pytest
from commands import rows
from hosts import Cluster
from howto import STEPS, on_hosts, python_path
from machines import missing
from reader import ROOT, blocks

pytestmark = pytest.mark.docs


@pytest.fixture
def reader(tmp_path):
    if why := missing():
        pytest.skip(why)
    with Cluster(2, ("node1", "node2")) as hosts:
        doing = on_hosts(hosts, tmp_path / "work")
        for name in hosts.names:
            hosts.set_env(name, PYTHONPATH=python_path(doing.folder), XLA_FLAGS=doing.environment["XLA_FLAGS"])
        yield doing


def test_two_hosts_train_together(reader):
    reader.page("ssh.md", "What you need", "Run it")
    runs = reader.folder / "runs"
    assert set(rows(runs / "mine")) == STEPS
    assert " node2 1 | " in (runs / "mine" / "logs" / "rank-1.log").read_text()


def test_the_tutorial_of_two_hosts(reader):
    for block in blocks(ROOT / "docs" / "two-hosts.md"):
        reader.follow(block)
    assert set(rows(reader.folder / "runs" / "hosts")) == STEPS


@pytest.mark.long
def test_a_host_joins_and_leaves(reader):
    reader.page("elastic.md", "A list", "Join and leave")
    log = (reader.folder / "runs" / "night" / "logs" / "launcher.log").read_text()
    assert "node2 can join the job" in log
    assert "resuming after step" in log


@pytest.mark.long
def test_a_run_on_two_hosts_is_left_alone(reader):
    reader.page("ssh.md", "Run it in the background")
    runs = reader.folder / "runs"
    assert set(rows(runs / "night")) == STEPS
    assert "resuming after step" in (runs / "night" / "logs" / "rank-0.log").read_text()
