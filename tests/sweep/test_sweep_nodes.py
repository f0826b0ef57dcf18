"""A sweep on a real Ray cluster of two nodes, with GPUs that Ray only counts."""

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import trial_bodies
from machines import missing
from ray_nodes import ray_nodes
from sweep_runs import ONE, Study

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ray")]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def nodes():
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as started:
        ask = [sys.executable, "-c", "import ray, time\nray.init('auto')\nwhile len(ray.nodes()) < 2: time.sleep(0.2)"]
        done = started.hosts.run(ask, on="h1", cwd=started.folder, env=started.environment, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        yield started


def start(nodes, study, body, resources, **options):
    told = {"sweep": ONE, "options": {"ray_address": "auto", **options}, "body": body, "resources": resources}
    words = [sys.executable, trial_bodies.__file__, str(study.path), json.dumps(told)]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return nodes.hosts.popen(words, on="h1", cwd=study.path, env=nodes.environment, **pipes)


def test_a_trial_never_sees_the_devices_of_another(nodes, tmp_path):
    study = Study(tmp_path, None)
    driver = start(nodes, study, "devices", count=8, workers=4, resources={"GPU": 2})
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    trials = list(study.history.trials.values())
    assert len({trial.node for trial in trials}) == 2
    seen = [(trial.node, set(trial.more["seen"].split(",")), trial) for trial in trials]
    together = 0
    for node, devices, trial in seen:
        assert len(devices) == 2
        assert devices <= {"0", "1", "2", "3"}
        for other_node, others, other in seen:
            apart = trial.more["ended"] <= other.more["began"] or other.more["ended"] <= trial.more["began"]
            if other is not trial and other_node == node and not apart:
                together += 1
                assert not devices & others
    assert together, "no two trials ran at the same time on one node"


def test_what_no_node_has_is_told_with_what_there_is(nodes, tmp_path):
    study = Study(tmp_path, None)
    driver = start(nodes, study, "devices", count=1, resources={"GPU": 5})
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 1
    assert b"a trial needs 1 CPU and 5 GPU on one node" in said
    assert said.count(b"2 CPU and 4 GPU") == 2
    assert not study.events


@pytest.mark.long
def test_a_trial_of_a_node_that_dies_runs_again_on_another(nodes, tmp_path):
    study = Study(tmp_path, None)
    driver = start(nodes, study, "leaves", count=2, workers=2, resources={"CPU": 2})
    end = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("up.*"))) < 2:
        assert time.monotonic() < end
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.1)
    nodes.kill("h2")
    (tmp_path / "go").touch()
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, said
    assert study.ends() == [0, 1]
    assert b"was lost (" in said
    assert sorted(trial.attempts for trial in study.history.trials.values()) == [1, 2]
    assert {trial.node for trial in study.history.trials.values()} == {nodes.hosts.address("h1")}
