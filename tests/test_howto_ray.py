"""docs/howto/ray.md: every block, on a node of a real Ray of two nodes that is closed by a token."""

import pytest
from commands import rows
from howto import STEPS, on_hosts
from machines import missing
from ray_nodes import ray_nodes


@pytest.fixture
def reader(tmp_path):
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as nodes:
        yield on_hosts(nodes.hosts, tmp_path / "work", "h1", **nodes.environment)


@pytest.mark.slow
def test_a_run_on_two_nodes_of_a_ray(reader):
    reader.page("ray.md")
    assert set(rows(reader.folder / "runs" / "mine")) == STEPS
