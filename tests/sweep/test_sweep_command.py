"""The command `sweep`, as a person types it: a search in its own Ray, taken up again, looked at before, refused."""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from commands import command, environment, on_terminal, run, wait_for
from sweep_desk import write_base, write_sweep

from roxxel_dist.sweep.study import read_study

SWEEP = {
    "method": "bayes",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {
        "dim": {"values": [16, 32]},
        "lr": {"distribution": "log_uniform_values", "min": 1e-3, "max": 1e-1},
    },
}
WORDS = ("sweep", "--sweep_config", "small.yaml", "--config", "base.yaml", "--data_path", "text")


@pytest.fixture
def desk(tmp_path):
    """A folder as somebody has it who begins: text, a base, a sweep."""
    (tmp_path / "text").mkdir()
    source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    (tmp_path / "text" / "argparse.txt").write_text(source.read_text())
    write_base(tmp_path, 6, 3, tokenizer_type="byte")
    write_sweep(tmp_path, SWEEP, "small.yaml")
    return tmp_path


def events(study, kind):
    lines = (study / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_sweep_and_its_continuation(desk):
    first = run(*WORDS, "--count", 2, "--workers", 2, cwd=desk)
    assert first.returncode == 0, first.stdout + first.stderr
    study = desk / "studies" / "small"
    assert {path.name for path in study.iterdir()} >= {"study.yaml", "config.yaml", "journal.jsonl", "trials", "report"}
    assert (study / "report" / "report.html").is_file()
    done = read_study(study).done
    assert len(done) == 2
    for trial in done:
        folder = study.joinpath("trials", str(trial.number))
        assert [step for step, _ in trial.reports] == [1, 3, 6]
        assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
        assert not (folder / "data").exists()  # the shards are the study's
    assert re.search(r"best val_loss: [\d.]+, trial [01]: dim (16|32), lr 0\.\d+", first.stdout)

    again = run("sweep", "--study", "studies/small", "--count", 3, cwd=desk)  # it remembers all else
    assert again.returncode == 0, again.stdout + again.stderr
    history = read_study(study).history
    assert [trial.number for trial in history.trials.values()] == [0, 1, 2]
    assert history.trials[0].attempts == history.trials[1].attempts == 1
    assert len({json.dumps(trial.params) for trial in history.trials.values()}) == 3

    made = run("report", "studies/small", "--best_config", "best.yaml", cwd=desk)
    assert made.returncode == 0, made.stderr
    trained = run(
        "train", "--config", "best.yaml", "--data_path", "studies/small/data/byte", "--run_dir", "r", cwd=desk
    )
    assert trained.returncode == 0, trained.stderr
    lines = (desk / "r" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line)["val_loss"] for line in lines if "val_loss" in line]
    assert min(values) == history.best.value  # the trial again, to the bit


@pytest.mark.long
def test_ctrl_c_and_on(desk):
    write_base(desk, 100_000, 100, tokenizer_type="byte")
    with subprocess.Popen(
        command(*WORDS, "--count", 1), cwd=desk, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        study = desk / "studies" / "small"
        wait_for(lambda: (study / "journal.jsonl").exists() and len(events(study, "report")) >= 2, what="a report")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=90)[1]
    assert process.returncode == 42, said
    reported = events(study, "report")[-1]["step"]
    history = read_study(study).history
    assert history.trials[0].state == "running"  # it waits to be taken up
    with subprocess.Popen(
        command(*WORDS, "--count", 1), cwd=desk, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: events(study, "report")[-1]["step"] > reported, what="a report of the second start")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
    assert process.returncode == 42
    assert events(study, "ask")[-1]["trial"] == 0
    assert [event["attempt"] for event in events(study, "start")] == [0, 1]
    assert "resuming after step" in (study / "logs" / "0.log").read_text()


def test_what_it_would_take(desk):
    before = sorted(desk.rglob("*"))
    done = run(*WORDS, "--count", 8, "--workers", 2, "--dry_run", cwd=desk)
    assert done.returncode == 0, done.stderr
    assert "bayes search over 2 parameters, minimize val_loss" in done.stdout
    assert "trials: 8 trials; 2 at once" in done.stdout
    assert "devices: 1 host(s) and 1 process(es) a trial, in a Ray of its own on this machine" in done.stdout
    assert re.search(r"6 to 6 steps, [\d,]+ to [\d,]+ parameters", done.stdout)
    assert re.search(r"hours: about [\d.e-]+ \(\d+:\d\d\) for 8 trial\(s\), \d+:\d\d a trial, from", done.stdout)
    assert sorted(desk.rglob("*")) == before


def test_what_can_never_run_is_told_by_a_dry_run(desk):
    (desk / "rules.yaml").write_text("constraints: [dim > 100]\n")
    done = run(*WORDS, "--count", 8, "--extras", "rules.yaml", "--dry_run", cwd=desk)
    assert done.returncode == 2
    assert "there is no configuration that can be run: the constraint 'dim > 100' does not hold" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep_config", "none.yaml"], "none.yaml: cannot be read"),
        (["--data_path", "none"], "/none: no such file or folder"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--hosts_per_trial", "2"], "this machine is one host: name a cluster with --ray_address"),
        (["--gpus_per_trial", "3", "--procs_per_host", "2"], "does not divide by --procs_per_host"),
        (["--max_trial_time", "soon"], "--max_trial_time soon: write seconds"),
        (["--method", "guess"], "guess"),
        (["--lr", "-1"], "lr"),
        (["--study", "text"], "--study text is there, and no study"),
        (["--ray_address", "nowhere"], "write `auto`, or HOST:PORT"),
    ],
)
def test_slips_leave_nothing_behind(desk, options, said):
    before = sorted(desk.rglob("*"))
    done = run(*WORDS, *options, cwd=desk)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(desk.rglob("*")) == before


def test_a_cluster_that_does_not_answer_leaves_nothing_behind(desk):
    before = sorted(desk.rglob("*"))
    done = run(*WORDS, "--count", 1, "--ray_address", "127.0.0.1:9", cwd=desk, RAY_AUTH_MODE="token")
    assert done.returncode == 69, done.stderr
    assert "no head of a Ray cluster answers there" in done.stderr
    assert sorted(desk.rglob("*")) == before


def test_a_first_start_that_was_refused_can_be_mended(desk):
    (desk / "more.yaml").write_text("resources: {none_such: 1}")
    refused = run(*WORDS, "--extras", "more.yaml", "--count", 1, cwd=desk)
    assert refused.returncode == 2, refused.stderr
    assert "0 none_such" in refused.stderr
    assert not (desk / "studies").exists()
    (desk / "more.yaml").write_text("resources: {CPU: 1}")
    looked = run(*WORDS, "--extras", "more.yaml", "--count", 1, "--dry_run", "--procs_per_host", 2, cwd=desk)
    assert looked.returncode == 0, looked.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": {"lrr": {"min": 0.1, "max": 0.2}}}, "did you mean 'lr'?"),
        ({"parameters": {"dim": {"values": [15]}, "lr": {"min": 0.1, "max": 0.2}}}, "dim"),
        ({"parameters": {"lr": {"min": 0.2, "max": 0.1}}}, "small.yaml, line "),
        ({"method": "grid"}, "a grid needs values that can be counted"),
        ({"program": "mine.py"}, "program: mine.py is not there"),
        ({"method": "tpe"}, "--method has others"),
        ({"metric": {"name": "vall_loss"}}, "no training logs 'vall_loss': did you mean 'val_loss'?"),
    ],
)
def test_slips_in_the_file(desk, change, said):
    write_sweep(desk, SWEEP | change, "small.yaml")
    done = run(*WORDS, "--count", 1, cwd=desk)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (desk / "studies").exists()


def test_a_study_is_of_one_sweep_and_one_base(desk):
    write_base(desk, 1, 3, tokenizer_type="byte")
    assert run(*WORDS, "--count", 1, "--wandb", "off", cwd=desk).returncode == 0
    for more, said in (
        (["--seed", "7"], "begun with other settings (seed 42 -> 7)"),
        (["--wandb", "offline"], "begun with other settings (wandb off -> offline)"),
        (["--data_path", "base.yaml"], "was begun with"),
        (["--wandb", "online"], "was begun with a search of its own, which a W&B server (--wandb online) cannot lead"),
    ):
        refused = run(*WORDS, "--count", 1, *more, cwd=desk)
        assert refused.returncode == 2
        assert said in refused.stderr
    write_sweep(desk, {**SWEEP, "parameters": {"dim": {"values": [16, 64]}}}, "small.yaml")
    refused = run(*WORDS, "--count", 1, "--wandb", "off", cwd=desk)
    assert refused.returncode == 2
    assert "is not what studies/small was begun with" in refused.stderr


def test_a_terminal_shows_a_table(desk):
    write_base(desk, 3, 3, tokenizer_type="byte")
    words = [sys.executable, "-m", "roxxel_dist", *WORDS, "--count", "1", "--wandb", "off"]
    env = environment(TERM="xterm", COLUMNS="140", LINES="40")

    def start(theirs):
        process = subprocess.Popen(words, cwd=desk, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        return process

    process, text = on_terminal(lambda theirs: start(os.dup(theirs)))
    assert process.wait(60) == 0
    assert "0 of 1 trials: 1 running" in text
    assert "1 of 1 trials: 0 running, 1 done" in text
