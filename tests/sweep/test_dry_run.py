"""What a sweep would take, before it runs."""

import re
import shutil
from pathlib import Path

import pytest
from made_study import made_study

from roxxel_dist.cli import main

HOURS = "hours: not known before the first trial has ended (--max_trial_time would bound them)"


@pytest.fixture
def dry(tmp_path, monkeypatch, capsys):
    """The dry run of a sweep: (exit code, what it printed, what it said)."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words\n" * 1000)
    Path("sweep.yaml").write_text("method: grid\nparameters: {dim: {values: [15, 16, 32, 48]}, n_heads: {value: 4}}\n")

    def run(*words):
        before = sorted(tmp_path.rglob("*"))
        code = main(["sweep", *map(str, words), "--dry_run"])
        assert sorted(tmp_path.rglob("*")) == before
        return code, *capsys.readouterr()

    return run


NEW = ("--sweep_config", "sweep.yaml", "--data_path", "text.txt")


def test_the_samples_are_configurations_that_can_be_trained(dry):
    code, out, err = dry(*NEW)
    assert code == 0, err
    assert re.findall("example: dim ([0-9]+)", out) == ["16", "32"]  # 4 heads do not divide 15
    assert "trials: 4 trials; the space has 4 points" in out
    assert HOURS in out


def test_where_none_can_be_trained_it_is_an_error(dry):
    Path("sweep.yaml").write_text("method: grid\nparameters: {dim: {values: [15, 17]}, n_heads: {value: 4}}\n")
    code, _, err = dry(*NEW)
    assert code == 2
    assert "there is no configuration that can be run: " in err


def test_bounds_that_look_like_values_where_exponents_are_meant(dry):
    bounds = "{distribution: log_uniform, min: 0.001, max: 0.1}"
    Path("sweep.yaml").write_text(f"method: random\nparameters: {{lr: {bounds}}}\n")
    code, out, err = dry(*NEW, "--count", 2)
    assert code == 0, err
    assert (
        "lr: log_uniform takes exponents, so its values are 1.001 to 1.105; for values of 0.001 to 0.1, use "
        "log_uniform_values" in out
    )


def test_a_limit_of_time_bounds_the_hours(dry):
    code, out, err = dry(*NEW, "--workers", 2, "--max_trial_time", "30m")
    assert code == 0, err
    assert "hours: about 1 (1:00:00) for 4 trial(s), 30:00 a trial, at most: --max_trial_time" in out


def test_hours_are_told_from_the_trials_that_have_ended(dry, tmp_path):
    made_study(tmp_path, 4)
    shutil.rmtree("study/trials")
    code, out, err = dry("--study", "study", "--count", 11, "--wandb", "off")
    assert code == 0, err
    assert "trials: 11 trials, 4 of them begun before" in out
    assert "hours: about 0.14 (8:08) for 8 trial(s), 1:01 a trial, as the 3 trial(s) that have ended took" in out
