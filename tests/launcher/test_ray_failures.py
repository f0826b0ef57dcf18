"""`launch ray` on a Ray that fails: a node dies, its link is cut, the head is gone."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import wait_for
from machines import missing
from ray_nodes import STAY, RayNodes, begin, ray_nodes

pytestmark = pytest.mark.xdist_group("ray")  # one worker: a cluster at a time
Until = Callable[[Callable[[], Any], str], None]


@pytest.mark.long
def test_a_node_that_dies_and_comes_back(nodes: RayNodes, tmp_path: Path, until: Until) -> None:
    script = "touch up.$ROXXEL_PROCESS_ID; echo attempt $ROXXEL_ATTEMPT of $ROXXEL_NUM_PROCESSES; "
    script += "[ $ROXXEL_ATTEMPT = 1 ] || sleep 1000"
    options = ["--min-hosts", 1, "--host-timeout", 1, "--", "bash", "-c", script]
    job = begin(nodes, tmp_path, *options)
    nodes.kill("h2")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert b"going on without 10.77.0.2" in err
    assert b"attempt 1 of 1\n" in out
    for mark in tmp_path.glob("up.*"):
        mark.unlink()
    nodes.start("h2")
    job = begin(nodes, tmp_path, "--place-timeout", 120, "--host-timeout", 120, "--", "bash", "-c", script)
    nodes.kill("h2")
    nodes.start("h2")
    out, err = job.communicate(timeout=180)
    assert job.returncode == 0, err
    assert b"attempt 1 of 2\n" in out
    until(lambda: not nodes.ours(), "everything to be gone")


@pytest.mark.long
def test_a_host_that_ray_moves_keeps_its_name(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    script = "rank=$ROXXEL_PROCESS_ID; hostname > on.$rank; mv on.$rank up.$rank; [ $ROXXEL_ATTEMPT = 1 ] || sleep 1000"
    with ray_nodes(3, head=("--include-dashboard", "false")) as nodes:
        job = begin(nodes, tmp_path, "--place-timeout", 120, "--host-timeout", 120, "--", "bash", "-c", script)
        used = {path.read_text().strip() for path in tmp_path.glob("up.*")}
        (spare,) = {*nodes.hosts.names} - used
        victim = next(name for name in used if name != "h1")
        nodes.kill(victim)
        _, err = job.communicate(timeout=240)
        assert job.returncode == 0, err
        before, now = nodes.hosts.address(victim), nodes.hosts.address(spare)
        assert f"Ray has moved host {before} to {now}; it keeps the name {before} until the end".encode() in err


@pytest.mark.long
def test_a_short_silence_is_survived_and_a_long_one_ends_the_ranks(tmp_path: Path, until: Until) -> None:
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2) as nodes:
        options = ["--place-timeout", 120, "--max-restarts", 0]
        job = begin(nodes, tmp_path, *options, "--", "bash", "-c", STAY)
        nodes.hosts.drop("h2")
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(5)
        nodes.hosts.restore("h2")
        with pytest.raises(subprocess.TimeoutExpired):  # longer than the heartbeat timeout, were it not heard again
            job.wait(11)
        nodes.hosts.drop("h2")
        _, err = job.communicate(timeout=60)
        assert job.returncode == 137
        assert b"host 10.77.0.2 has sent nothing for 10 s" in err
        # The actor itself lives as long as Ray on that node, which waits for its head.
        until(lambda: not any("RayNode" not in line for line in nodes.ours().get("h2", [])), "the ranks to be gone")


@pytest.mark.long
def test_a_head_that_is_gone_is_told(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as nodes:
        options = ["--place-timeout", 120, "--host-timeout", 2]
        job = begin(nodes, tmp_path, *options, "--", "bash", "-c", STAY)
        os.kill(nodes.pid("h1", "gcs_server"), signal.SIGKILL)
        _, err = job.communicate(timeout=180)
        assert job.returncode == 69, err
        assert b"the head of the Ray cluster is gone" in err
        # Ray's daemon of each node waits a minute for the head, from when it has seen that it is gone.
        wait_for(lambda: not any("sleep 1000" in line for lines in nodes.ours().values() for line in lines))
