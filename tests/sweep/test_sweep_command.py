"""The command `sweep`, as a person types it: a search in its own Ray, taken up again, looked at before, refused."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import process_ray
import psutil
import pytest
from commands import TERMINAL, command, environment, gone, on_terminal, run, wait_for
from sweep_desk import write_base, write_sweep

from roxxel_dist.checkpoint.metadata import read_cursor
from roxxel_dist.cli import main
from roxxel_dist.sweep.driver import controller
from roxxel_dist.sweep.driver import run as sweep_run
from roxxel_dist.sweep.local_ray import PREFIX
from roxxel_dist.sweep.study.folder import read_study

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


@pytest.fixture
def sweep(desk, monkeypatch, capsys):
    """The command in this process: (exit code, what it printed, what it said)."""

    def ask(*more):
        code = main([*WORDS, *map(str, more)])
        return code, *capsys.readouterr()

    monkeypatch.chdir(desk)
    return ask


def events(study, kind):
    lines = (study / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.timeout(900)
@pytest.mark.cluster
def test_a_killed_sweep_goes_on_and_its_best_can_be_trained(desk, monkeypatch):
    study = desk / "studies" / "small"
    with tempfile.TemporaryDirectory(prefix="r") as temporary:
        env = environment(TMPDIR=temporary, RAY_ADDRESS="192.0.2.1:6379")  # of a cluster that it must not join
        words = command(*WORDS, "--count", 2)
        with subprocess.Popen(words, cwd=desk, env=env, stderr=subprocess.DEVNULL) as first:
            wait_for(lambda: (study / "journal.jsonl").exists() and len(events(study, "start")) == 2, what="trial 1")
            family = psutil.Process(first.pid).children(recursive=True)
            # A terminal that is closed tells all that it has started: Ray's processes stay until the driver ends them.
            told = [one.pid for one in family if os.getpgid(one.pid) == os.getpgid(first.pid)]
            assert told
            assert all(_blocks(pid, signal.SIGHUP) for pid in told)
            links = [link for one in family for link in one.net_connections() if link.status == "LISTEN"]
            first.kill()
        assert {link.laddr.ip.removeprefix("::ffff:") for link in links} == {"127.0.0.1"}
        assert len(events(study, "result")) == 1
        wait_for(lambda: all(gone(one.pid) for one in family), what="the end of its Ray and of its trial")
        assert list(Path(temporary).glob(f"{PREFIX}*"))
        text, code = sweep_on_terminal(desk, env, "--study", "studies/small", "--count", "2")  # it remembers all else
        assert not list(Path(temporary).glob(f"{PREFIX}*"))
    assert code == 0, text
    assert "1 of 2 trials: 1 running" in text
    assert "2 of 2 trials: 0 running, 2 done" in text
    assert re.search(r"best val_loss: [\d.]+, trial [01]: dim (16|32), lr 0\.\d+", text)
    assert {path.name for path in study.iterdir()} >= {"study.yaml", "config.yaml", "journal.jsonl", "trials", "report"}
    assert (study / "report" / "report.html").is_file()
    done = read_study(study).done
    assert sorted((trial.number, trial.attempts) for trial in done) == [(0, 1), (1, 2)]
    assert done[0].params != done[1].params
    for trial in done:
        folder = study.joinpath("trials", str(trial.number))
        assert [step for step, _ in trial.reports] == [3, 6]
        assert list(folder.glob("wandb/offline-run-*/*.wandb"))
        assert not (folder / "data").exists()  # the shards are the study's

    monkeypatch.chdir(desk)
    assert main(["report", "studies/small", "--best_config", "best.yaml"]) == 0
    words = ("--config", "best.yaml", "--data_path", "studies/small/data/byte", "--run_dir", "r")
    trained = run("train", *words, cwd=desk)  # with one device, as the trial
    assert trained.returncode == 0, trained.stderr
    lines = (desk / "r" / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line)["val_loss"] for line in lines if "val_loss" in line]
    assert min(values) == done[0].value  # the trial again, to the bit


def _blocks(pid, number):
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return int(mask, 16) >> (number - 1) & 1 == 1


def sweep_on_terminal(desk, env, *words):
    """What a sweep shows on a terminal, and its exit code."""

    env = env | TERMINAL | {"COLUMNS": "140", "LINES": "40"}

    def start(theirs):
        line = command("sweep", *words)
        return subprocess.Popen(line, cwd=desk, env=env, stdin=theirs, stdout=theirs, stderr=theirs)

    process, text = on_terminal(start)
    return text, process.wait(60)


@pytest.mark.long
def test_ctrl_c_and_on(desk):
    write_base(desk, 100_000, 100, tokenizer_type="byte")
    with subprocess.Popen(
        command(*WORDS, "--count", 1),
        cwd=desk,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        study = desk / "studies" / "small"
        wait_for(lambda: (study / "journal.jsonl").exists() and len(events(study, "report")) >= 2, what="a report")
        process.send_signal(signal.SIGINT)
        last_words, said = process.communicate(timeout=90)
    assert process.returncode == 42, said
    assert "watch it: roxxel-dist top studies/small, or in a browser: roxxel-dist top studies/small --web" in said
    assert "1 trial(s): 1 interrupted; " in last_words, "the folder is still held, and nothing runs any more"
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


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_sweep_whose_terminal_is_closed_lets_its_trial_save_and_goes_on(desk):
    """The shell ends with it, and all processes that it started get the signal, Ray's too."""
    write_base(desk, 100_000, 100, tokenizer_type="byte", checkpoint_every=10**9)
    study = desk / "studies" / "small"
    shell = ["setsid", "--ctty", "sh", "-c", f"{shlex.join(command(*WORDS, '--count', 1))}; true"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(shell, cwd=desk, env=environment(**TERMINAL), stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)

        def reported():  # somebody must read what the terminal shows
            while select.select([ours], [], [], 0)[0]:
                os.read(ours, 4096)
            return (study / "journal.jsonl").exists() and len(events(study, "report")) >= 2

        wait_for(reported, what="a report")
        (driver,) = [event["driver"]["pid"] for event in events(study, "study")]
        family = [driver, *(one.pid for one in psutil.Process(driver).children(recursive=True))]
        os.close(ours)
    wait_for(lambda: all(gone(pid) for pid in family), what="the end of all")
    assert "asked to stop: step" in (study / "logs" / "0.log").read_text()
    saved = read_cursor(study / "trials" / "0")["step"]
    assert saved >= events(study, "report")[-1]["step"]
    assert read_study(study).history.trials[0].state == "running"  # it waits to be taken up
    with subprocess.Popen(command(*WORDS, "--count", 1), cwd=desk, env=environment()) as again:
        wait_for(lambda: events(study, "report")[-1]["step"] > saved, what="a report of the second start")
        again.send_signal(signal.SIGTERM)
    assert again.returncode == 42
    assert [event["attempt"] for event in events(study, "start")] == [0, 1]


def test_what_it_would_take(desk, sweep):
    before = sorted(desk.rglob("*"))
    code, out, err = sweep("--count", 8, "--workers", 2, "--dry_run")
    assert code == 0, err
    assert "bayes search over 2 parameters, minimize val_loss" in out
    assert "trials: 8 trials; 2 at once" in out
    assert "devices: 1 host(s) and 1 process(es) a trial, in a private Ray on this machine" in out
    assert len(re.findall(r"^  example: dim (16|32), lr 0\.\d+$", out, re.MULTILINE)) == 2
    assert "hours: not known before the first trial has ended (--max_trial_time would bound them)" in out
    assert sorted(desk.rglob("*")) == before


def test_what_can_never_run_is_told_by_a_dry_run(desk, sweep):
    (desk / "rules.yaml").write_text("constraints: [dim > 100]\n")
    code, _, err = sweep("--count", 8, "--extras", "rules.yaml", "--dry_run")
    assert code == 2
    assert "there is no configuration that can be run: the constraint 'dim > 100' does not hold" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sweep_config", "none.yaml"], "none.yaml: cannot be read"),
        (["--data_path", "none"], "/none: no such file or folder"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--hosts_per_trial", "2"], "this machine is one host: name a cluster with --ray_address"),
        (["--gpus_per_trial", "3", "--procs_per_host", "2"], "is not a multiple of --procs_per_host"),
        (["--max_trial_time", "soon"], "--max_trial_time soon: write seconds"),
        (["--method", "guess"], "guess"),
        (["--lr", "-1"], "lr"),
        (["--study", "text"], "--study text exists and is not a study"),
        (["--ray_address", "nowhere"], "write `auto`, or HOST:PORT"),
    ],
)
def test_slips_leave_nothing_behind(desk, sweep, options, said):
    before = sorted(desk.rglob("*"))
    code, _, err = sweep(*options)
    assert code == 2, err
    assert said in err
    assert sorted(desk.rglob("*")) == before


def test_a_cluster_that_does_not_answer_leaves_nothing_behind(desk, sweep, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    before = sorted(desk.rglob("*"))
    code, _, err = sweep("--count", 1, "--ray_address", "127.0.0.1:9")
    assert code == 69, err
    assert "no head of a Ray cluster answers there" in err
    assert sorted(desk.rglob("*")) == before


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ("none_such: 1", "0 none_such"),
        ("CPU: 0.00001", "resources"),  # finer than Ray counts
        ("slot: 0.00001", "resources"),
        ("GPU: 1.5", "resources"),  # Ray divides one GPU alone
    ],
)
def test_a_first_start_that_was_refused_can_be_mended(desk, sweep, monkeypatch, resources, said):
    monkeypatch.setattr(controller, "connected", process_ray.connected)
    monkeypatch.setattr(process_ray, "MORE", {"GPU": 2.0, "slot": 1.0})
    (desk / "more.yaml").write_text(f"resources: {{{resources}}}")
    words = ("--extras", "more.yaml", "--count", 1, "--ray_address", process_ray.ADDRESS)
    code, _, err = sweep(*words)
    assert code == 2, err
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not (desk / "studies").exists()
    (desk / "more.yaml").write_text("resources: {CPU: 1}")
    code, _, err = sweep(*words, "--dry_run", "--procs_per_host", 2)
    assert code == 0, err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameters": {"lrr": {"min": 0.1, "max": 0.2}}}, "did you mean 'lr'?"),
        ({"parameters": {"dim": {"values": [15]}, "lr": {"min": 0.1, "max": 0.2}}}, "dim"),
        ({"parameters": {"lr": {"min": 0.2, "max": 0.1}}}, "small.yaml, line "),
        ({"method": "grid"}, "a grid needs values that can be counted"),
        ({"program": "mine.py"}, "program: mine.py is not there"),
        (
            {"program": "base.yaml", "early_terminate": {"type": "asha", "min_iter": 1}},
            "early_terminate.type: asha: it pauses trials, and a program of your own does not go on from a checkpoint",
        ),
        ({"method": "tpe"}, "--method also takes tpe"),
        ({"metric": {"name": "vall_loss"}}, "no training logs 'vall_loss': did you mean 'val_loss'?"),
    ],
)
def test_slips_in_the_file(desk, sweep, change, said):
    write_sweep(desk, SWEEP | change, "small.yaml")
    code, _, err = sweep("--count", 1)
    assert code == 2, err
    assert said in err
    assert not (desk / "studies").exists()


def test_a_study_is_of_one_sweep_and_one_base(desk, sweep, monkeypatch):
    monkeypatch.setattr(sweep_run, "search", lambda run, write: 0)  # it is begun, and no trial is run
    assert sweep("--count", 1, "--wandb", "off")[0] == 0
    for more, said in (
        (["--seed", "7"], "started with other settings (seed 42 -> 7)"),
        (["--wandb", "offline"], "started with other settings (wandb off -> offline)"),
        (["--data_path", "base.yaml"], "was started with"),
        (["--wandb", "online"], "chooses its own trials, so a W&B server (--wandb online) cannot choose them"),
    ):
        code, _, err = sweep("--count", 1, *more)
        assert code == 2
        assert said in err
    write_sweep(desk, {**SWEEP, "parameters": {"dim": {"values": [16, 64]}}}, "small.yaml")
    code, _, err = sweep("--count", 1, "--wandb", "off")
    assert code == 2
    assert "differs from the file that studies/small started with (parameters.dim.values is [16, 64], and [" in err
