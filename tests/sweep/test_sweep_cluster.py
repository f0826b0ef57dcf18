"""The command `sweep` on a real Ray cluster of two nodes: as a Ray job, and with trials that span both nodes."""

import sys

import pytest
from commands import make_corpus
from machines import missing
from ray_nodes import RAY, ray_nodes
from sweep_desk import write_base, write_sweep

from roxxel_dist.sweep.study.folder import read_study

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]
SWEEP = {"method": "random", "metric": {"name": "val_loss"}, "parameters": {"lr": {"min": 0.001, "max": 0.01}}}


@pytest.fixture(scope="module")
def nodes():
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2) as started:
        yield started


@pytest.fixture
def desk(tmp_path):
    make_corpus(tmp_path)
    write_base(tmp_path, 4, 2)
    write_sweep(tmp_path, SWEEP)
    return tmp_path


def words(desk, *more):
    given = {"sweep_config": "sweep.yaml", "config": "base.yaml", "data_path": "data", "study": "study"}
    flags = [part for name, path in given.items() for part in (f"--{name}", str(desk / path))]
    return [sys.executable, "-m", "roxxel_dist", "sweep", "--ray_address", "auto", "--wandb", "off", *flags, *more]


def test_trials_of_two_hosts_each(nodes, desk):
    more = ("--count", "2", "--workers", "1", "--hosts_per_trial", "2", "--gpus_per_trial", "2")
    env = nodes.environment | {"JAX_PLATFORMS": "cpu"}
    done = nodes.hosts.run(words(desk, *more), on="h1", cwd=desk, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_study(desk / "study").done) == 2
    log = (desk / "study" / "logs" / "0.log").read_text()
    assert "2 device(s)" in log
    assert not nodes.ours()


def test_as_a_job_of_ray(nodes, desk):
    server = ("--address", "http://127.0.0.1:8265")
    env = {name: value for name, value in nodes.environment.items() if name != "RAY_ADDRESS"} | {"JAX_PLATFORMS": "cpu"}
    submit = [*RAY, "job", "submit", *server, "--", *words(desk, "--count", "3", "--workers", "2")]
    done = nodes.hosts.run(submit, on="h1", env=env, cwd=desk, timeout=280)
    for _ in range(60):  # until the server of jobs is up
        if "Failed to connect" not in done.stderr + done.stdout:
            break
        done = nodes.hosts.run(submit, on="h1", env=env, cwd=desk, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    study = read_study(desk / "study")
    assert len(study.done) == 3
    assert "best val_loss" in done.stdout
