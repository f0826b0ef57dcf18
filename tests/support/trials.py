"""Small trials for the tests of sweeps: tasks as the controller makes them."""

import sys
from typing import Any

import yaml
from commands import TINY, environment

PHASE = {"steps": 12, "batch_size": 8, "seq_len": 33}
BASE = {name: value for name, value in yaml.safe_load(TINY).items() if name != "phases"} | {
    "phases": [PHASE], "export_weights": False,
}  # fmt: skip


def task(study, trial=0, **more):
    """The task of a trial of a study that lies beside its data."""
    return {
        "trial": trial,
        "params": {"lr": 1e-3},
        "attempt": 0,
        "run_dir": str(study / "trials" / str(trial)),
        "log": str(study / "logs" / f"{trial}.log"),
        "metric": "val_loss",
        "goal": "minimize",
        "config": BASE,
        "data_path": str(study.parent / "data"),
        "program": None,
        "hosts": 1,
        "procs_per_host": 1,
        "gpus_per_host": None,
        "max_time_s": None,
        "environment": {},
        "ray_address": None,
    } | more


def program(text, *words):
    """The words of a Python program."""
    return [sys.executable, "-c", text, *words]


def split(events: Any):
    """(pid, reports as (step, value), what came last) of a whole trial, whose events came in their order."""
    found = list(events)
    kinds = [next(iter(event)) for event in found]
    assert kinds[:1] == ["start"] or "start" not in kinds
    assert set(kinds[1:-1]) <= {"report"}
    reports = [(event["report"]["step"], event["report"]["value"]) for event in found if "report" in event]
    return (found[0]["start"]["pid"] if kinds[0] == "start" else None), reports, found[-1]


__all__ = ["BASE", "environment", "program", "split", "task"]
