"""The command `sweep` with a W&B server that leads: created there, joined by its id, and taken up again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, run
from sweep_desk import write_base, write_sweep
from wandb_sweeps import SweepServer

from roxxel_dist.cli import main
from roxxel_dist.sweep.study.folder import read_study

ROOT = Path(__file__).parents[2]
WORDS = ("sweep", "--config", "base.yaml", "--data_path", "text.txt")
SWEEP = {
    "method": "random",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "program": "train_sweep.py",
    "command": ["${env}", "python", "${program}", "${args}"],
    "parameters": {"dim": {"values": [16, 32]}, "lr": {"min": 0.001, "max": 0.01}},
}


@pytest.fixture
def server():
    with SweepServer() as found:
        yield found


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(2000)))
    write_base(tmp_path, 4, 2, tokenizer_type="byte")
    write_sweep(tmp_path, SWEEP)
    return tmp_path


def told(desk, server):
    # The words "python" of a YAML's command find this one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**server.environment, "WANDB_ERROR_REPORTING": "false", "HOME": str(desk), "PATH": path}


def search(desk, server, *words):
    done = run(*WORDS, *words, cwd=desk, **told(desk, server))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.long
def test_a_login_and_a_project_let_the_server_lead_and_the_study_goes_on_with_it(desk, server):
    words = ("--sweep_config", "sweep.yaml", "--wandb_project", "mine", "--study", "study")
    first = search(desk, server, *words, "--count", 1)
    assert "W&B login found" in first.stderr
    (sweep,) = server.sweeps.values()
    assert sweep.project == "mine"
    again = search(desk, server, "--study", "study", "--wandb_project", "mine", "--count", 2)
    assert len(server.sweeps) == 1
    assert f"local/mine/{sweep.name}" in again.stderr + again.stdout
    trials = read_study(desk / "study").done
    assert {one.number for one in trials} == {0, 1}
    for trial in trials:
        assert trial.params in list(server.params.values())  # chosen by the server, not here
        assert [step for step, _ in trial.reports] == [1, 2, 4]
    values = sorted(min(row["val_loss"] for row in server.runs[name].history) for name in sweep.runs)
    assert values == [one.value for one in trials]


@pytest.mark.long
def test_a_sweep_is_joined_by_its_id(desk, server):
    search(desk, server, "--sweep_config", "sweep.yaml", "--wandb", "online", "--study", "a", "--dry_run")
    assert not server.sweeps
    env = environment(**server.environment, HOME=str(desk), WANDB_ERROR_REPORTING="false")
    made = [sys.executable, "-m", "wandb", "sweep", "--project", "theirs", "sweep.yaml"]
    subprocess.run(made, cwd=desk, env=env, check=True)
    (sweep,) = server.sweeps.values()
    words = ("--sweep_id", f"local/theirs/{sweep.name}", "--count", "1")
    failed = run(*WORDS, *words, "--study", "failed", cwd=desk, **told(desk, server))
    assert failed.returncode == 1
    assert "trial 0 failed: python: can't open file" in failed.stdout  # the program that its YAML names
    shutil.copy(ROOT / "sweeps" / "train_sweep.py", desk)
    search(desk, server, *words)
    (trial,) = read_study(desk / "studies" / sweep.name).done
    assert trial.params == list(server.params.values())[-1]


def test_no_login_searches_here(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HOME", str(desk))
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert main([*WORDS, "--sweep_config", "sweep.yaml", "--wandb_project", "mine", "--dry_run"]) == 0
    said = capsys.readouterr()
    assert "no W&B login: this machine chooses the trials" in said.err
    assert "random search over 2 parameters" in said.out
    assert "WANDB_SERVICE" not in os.environ  # trials have a service of their own


@pytest.mark.parametrize(
    ("rule", "words", "said"),
    [
        ({"type": "asha", "min_iter": 1}, (), "early_terminate.type: asha: W&B's server leads this sweep"),
        (None, ("--max_steps_total", "9"), "--max_steps_total: W&B's server leads this sweep"),
    ],
)
def test_a_server_that_leads_cannot_pause_trials(desk, server, monkeypatch, capsys, rule, words, said):
    write_sweep(desk, SWEEP if rule is None else SWEEP | {"early_terminate": rule})
    monkeypatch.chdir(desk)
    for name, value in told(desk, server).items():
        monkeypatch.setenv(name, value)
    asked = [*WORDS, "--sweep_config", "sweep.yaml", "--wandb", "online", "--study", "study", *words]
    assert main(asked) == 2
    assert said in capsys.readouterr().err
    assert not server.sweeps
    assert not (desk / "study").exists()
    # The same without the server is no mistake.
    assert main([*asked, "--wandb", "offline", "--dry_run"]) == 0
