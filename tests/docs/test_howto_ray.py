"""docs/howto/ray.md: every block, on a node of a real Ray of two nodes that is closed by a token.

A quick part of it is in launcher/test_ray.py, which has a cluster.
"""

import pytest
from commands import rows
from howto import STEPS, on_hosts
from machines import missing
from ray_nodes import ray_nodes, words

pytestmark = [pytest.mark.docs, pytest.mark.long, pytest.mark.xdist_group("ray")]  # one worker: a cluster at a time


@pytest.fixture
def reader(tmp_path):
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as nodes:
        command = words(nodes.address, 2, "--place-timeout", 120, "--run-id", "warm", "--", "true")
        for _ in range(3):  # Ray waits a fixed time for its head, which takes longer on a machine with much else to do
            done = nodes.hosts.run(command, on="h1", cwd=tmp_path, env=nodes.environment, timeout=240)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stderr
        yield on_hosts(nodes.hosts, tmp_path / "work", "h1", **nodes.environment)


@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_of_a_ray(reader):
    reader.page("ray.md")
    assert set(rows(reader.folder / "runs" / "mine")) == STEPS
