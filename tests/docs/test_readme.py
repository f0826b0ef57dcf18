"""README.md: its five tasks, one after the other, as a person would copy them into an empty folder."""

from functools import partial
from pathlib import Path

import pytest
from commands import losses, rows
from machines import missing
from ray_nodes import RayNodes, ray_nodes
from reader import ROOT, Reader, blocks, in_processes

from roxxel_dist.settings.config import Config
from roxxel_dist.sweep.study.folder import read_study

PAGE = ROOT / "README.md"

pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def nodes():
    """The page's two hosts, with sshd and Ray on both; ssh on the machine beside them needs no options."""
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false"), names=("node1", "node2")) as started:
        started.hosts.bind("controller", started.hosts.ssh_config, "/etc/ssh/ssh_config")
        yield started


@pytest.fixture
def person(tmp_path: Path) -> Reader:
    """Someone in an empty folder with the page's two folders of text."""
    person = Reader(tmp_path, start=in_processes, HOME=str(tmp_path))
    for block in blocks(PAGE, "Five tasks")[:2]:
        if not block.note:
            person.follow(block)
    return person


def job(heading: str):
    """The one block of a job."""
    (block,) = blocks(PAGE, heading)
    return block


@pytest.mark.timeout(1000)  # a dozen commands, each a program of jax; the longest file, which begins first
def test_the_five_tasks_are_done_by_copying_them(person: Reader, nodes: RayNodes) -> None:
    hosts, runs = nodes.hosts, person.folder / "runs"
    person.follow(job("1. Train my model on my tokens"))
    assert max(rows(runs / "mine")) > 1
    assert person.said[-1].strip()
    person.follow(job("2. A curriculum with a blend of data sets"))
    assert max(rows(runs / "blend")) == 40

    person.start = hosts.run
    person.follow(job("3. Many hosts"))
    assert "rank 0 of 2: " in (runs / "two" / "logs" / "rank-0.log").read_text()
    assert "node2 1 | " in (runs / "two" / "logs" / "rank-1.log").read_text()
    assert max(rows(runs / "two")) == 40

    person.start = partial(hosts.run, on="node1")
    person.environment |= nodes.environment
    person.follow(job("4. A sweep on a Ray cluster"))
    assert len(read_study(person.folder / "studies" / "sweep").done) == 4
    assert Config.from_yaml(person.folder / "best.yaml").dim in (64, 128)

    person.start = in_processes
    said = person.follow(job("5. Resume after a crash"))
    assert "resuming after step 20 of" in said
    assert losses(runs / "crash") == losses(runs / "blend")
