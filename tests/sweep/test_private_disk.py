"""Trials of a study in a bucket, on hosts that have nothing but the bucket: each has a cache of its own."""

import json
import subprocess
import sys

import pytest
from commands import environment, make_corpus, wait_for
from trials import BASE, task

from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.sweep.driver.bucket import run_in_bucket

RUNNER = """
import json, sys
from roxxel_dist.sweep.driver.bucket import run_in_bucket
for event in run_in_bucket(json.loads(sys.argv[1])):
    print(json.dumps(event), flush=True)
"""
STEPS, EVERY = 400, 100
PHASE = {"steps": STEPS, "batch_size": 8, "seq_len": 33}
LONG = {**BASE, "phases": [PHASE], "eval_every": EVERY, "checkpoint_every": EVERY}


@pytest.fixture
def study(server, tmp_path):
    make_corpus(tmp_path)
    with server.environment():
        yield ObjectStore.open(server.url("studies/x"), timeout_s=10)


def in_bucket(study, folder, attempt, trial=0, **more):
    """A trial as the controller makes it."""
    paths = {"run_dir": "x-1a2b/trials/0", "log": f"x-1a2b/logs/0.{attempt}.log", "bucket": str(study.url)}
    return task(folder / "study", trial, attempt=attempt, config=LONG, **{**paths, **more})


def reports(events):
    """(step, value) of each report, and the last event."""
    return [tuple(event["report"].values()) for event in events if "report" in event], events[-1]


@pytest.mark.cluster
def test_a_trial_of_a_host_that_is_gone_goes_on_elsewhere_from_the_bucket(study, tmp_path, monkeypatch):
    words = [sys.executable, "-c", RUNNER, json.dumps(in_bucket(study, tmp_path, 0))]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "one"))
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as first:
        wait_for(lambda: study.list("trials/0/checkpoints/100"), what="a checkpoint in the bucket")
        first.kill()
        said, _ = first.communicate()
    before, _ = reports([json.loads(line) for line in said.splitlines()])
    assert 0 < len(before) < 1 + STEPS // EVERY

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    after, end = reports(list(run_in_bucket(in_bucket(study, tmp_path, 1))))
    assert after[: len(before)] == before  # the rows of the first host came with the run
    assert [step for step, _ in after] == list(range(EVERY, STEPS + 1, EVERY))
    assert end["result"]["value"] == min(value for _, value in after)
    assert "from step" in study.read("logs/0.1.log").decode()
    assert study.read("logs/0.1.yaml") == (tmp_path / "two/roxxel-dist/studies/x-1a2b/logs/0.1.yaml").read_bytes()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))  # a driver that did not hear of its end
    again, last = reports(list(run_in_bucket(in_bucket(study, tmp_path, 2))))
    assert (again, last["result"]["value"]) == (after, end["result"]["value"])


@pytest.mark.cluster
def test_one_that_fails_names_its_log_in_the_bucket(study, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    own = {"trial": 1, "run_dir": "x-1a2b/trials/1", "log": "x-1a2b/logs/1.0.log", "params": {"lr": 1e30}}
    failure = list(run_in_bucket(in_bucket(study, tmp_path, 0, **own)))[-1]["fail"]
    assert (failure["kind"], failure["log"]) == ("nan", str(study.url.join("logs", "1.0.log")))
    assert failure["reason"] in study.read("logs/1.0.log").decode()
    assert study.read("logs/1.0.yaml")
