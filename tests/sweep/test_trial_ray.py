"""A trial on two nodes of a real Ray cluster: a Ray task starts it through the launcher, inside the same cluster."""

import json
import sys

import pytest
from commands import make_corpus
from machines import missing
from ray_nodes import ray_nodes
from trials import program, split, task

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]
DRIVER = """
import json, sys
import ray
from roxxel_dist.sweep.trial.trial import run
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
events = ray.remote(max_calls=1, num_cpus=0.5, num_returns="streaming")(run).remote(json.loads(sys.argv[1]))
for event in events:
    print(json.dumps(ray.get(event)), flush=True)
"""
LOGS = """
import os, sys
import wandb
if os.environ["ROXXEL_PROCESS_ID"] == "0":
    run = wandb.init()
    run.log({"val_loss": run.config["lr"] * int(os.environ["ROXXEL_NUM_PROCESSES"])})
"""


@pytest.fixture(scope="module")
def nodes():
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as started:
        yield started


def events_of(nodes, folder, asked):
    env = nodes.environment | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", DRIVER, json.dumps(asked)]
    result = nodes.hosts.run(words, on="h1", cwd=folder, env=env, timeout=300)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ranks_on_two_nodes_are_one_trial(nodes, tmp_path):
    make_corpus(tmp_path)
    study = tmp_path / "study"
    asked = task(study, hosts=2, ray_address=nodes.address, environment={"JAX_PLATFORMS": "cpu"})
    _, reports, last = split(events_of(nodes, tmp_path, asked))
    log = (study / "logs" / "0.log").read_text()
    assert "result" in last, log
    assert [step for step, _ in reports] == [6, 12]  # not 1, where all trials are alike
    assert last["result"]["value"] == min(value for _, value in reports)
    assert "2 device(s)" in log
    assert nodes.ours() == {}


def test_ranks_of_an_own_program_have_its_variables(nodes, tmp_path):
    asked = task(
        tmp_path / "study",
        hosts=2,
        ray_address=nodes.address,
        directory=str(tmp_path),
        program=program(LOGS),
        environment={"HOME": str(tmp_path)},
    )
    _, reports, last = split(events_of(nodes, tmp_path, asked))
    assert list(tmp_path.glob("runs/run_*/logs"))  # of its launcher, beside what the program writes
    assert reports == [(0, 0.002)], (last, (tmp_path / "study" / "logs" / "0.log").read_text())
    assert last["result"]["value"] == 0.002
