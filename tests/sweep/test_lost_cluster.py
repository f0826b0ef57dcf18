"""A Ray cluster that dies under a sweep: its head and its raylet are killed, as by a machine that is switched off."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import trial_bodies
from commands import wait_for
from machines import missing
from ray_nodes import ray_nodes
from sweep_runs import ONE, Study

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]


def start(nodes, study):
    study.path.mkdir(exist_ok=True)
    told = {"sweep": ONE, "options": {"ray_address": "auto", "count": 1}, "body": "stays"}
    words = [sys.executable, trial_bodies.__file__, str(study.path), json.dumps(told)]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return nodes.hosts.popen(words, on="h1", cwd=study.path, env=nodes.environment, **pipes)


def kill_ray(nodes):
    for pid in nodes.hosts.processes("h1"):
        try:
            line = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        if "raylet/raylet" in line or "gcs_server" in line:
            os.kill(pid, signal.SIGKILL)


def test_a_cluster_that_dies_ends_the_sweep_which_goes_on_with_another(tmp_path):
    if why := missing():
        pytest.skip(why)
    lost, stopped = Study(tmp_path / "lost", None), Study(tmp_path / "stopped", None)
    with ray_nodes(1, head=("--include-dashboard", "false")) as nodes:
        nodes.wait_until_up("h1")
        drivers = [start(nodes, study) for study in (lost, stopped)]
        wait_for(lambda: all((study.path / "up.0").exists() for study in (lost, stopped)), what="trials")
        kill_ray(nodes)
        killed = time.monotonic()
        time.sleep(5)
        drivers[1].send_signal(signal.SIGINT)
        time.sleep(1)
        drivers[1].send_signal(signal.SIGINT)
        said, _ = drivers[1].communicate(timeout=20)
        assert drivers[1].returncode == 42, said
        said, _ = drivers[0].communicate(timeout=killed + 60 - time.monotonic())
        assert drivers[0].returncode == 69, said
        assert b"Ray was lost" in said
        assert lost.history.trials[0].reports == [(1, 3.0)]
    with ray_nodes(1, head=("--include-dashboard", "false")) as nodes:
        nodes.wait_until_up("h1")
        said, _ = start(nodes, lost).communicate(timeout=120)
        assert lost.ends() == [0], said
