"""The sweeps that users of DantinoX have, in configs/ and sweeps/: planned as they stand, and run in a small form."""

import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import yaml
from commands import run
from reader import ROOT

from roxxel_dist.cli import main
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.settings.config import Config, load_yaml
from roxxel_dist.sweep.study.folder import read_study

pytestmark = [pytest.mark.xdist_group("seed sweeps"), pytest.mark.timeout(900)]
SWEEPS = {"configs/sweep.yaml": 9, "sweeps/sweep.yaml": 20}
"""And how many parameters each searches: one with a single value is none."""
SMALL = {
    "dim": [16, 32], "num_blocks": [1, 2], "max_context": [16, 32], "context_window": [4, 8, 16], "batch_size": [4, 8],
    "grad_accum": [1, 2], "warmup_steps": [1, 2, 4], "epochs": [1, 2],
}  # fmt: skip


@pytest.fixture
def desk(tmp_path):
    """As their users have it: a config, a text, and the sweep beside them."""
    for folder in ("configs", "sweeps"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "data").mkdir()
    source = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text() for path in sorted((source / "json").glob("*.py")))
    (tmp_path / "data" / "corpus.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize("file", SWEEPS)
def test_it_is_planned_as_it_stands(desk, file, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    words = ["--config", "configs/default_config.yaml", "--data_path", "data/corpus.txt", "--count", "50", "--dry_run"]
    assert main(["sweep", "--sweep_config", file, *words, "--procs_per_host", "2", "--max_trial_time", "1h"]) == 0
    said = capsys.readouterr().out
    assert f"bayes search over {SWEEPS[file]} parameters, minimize val_bpb" in said
    assert "trials: 50 trials" in said
    assert said.count("  example: ") == 2


@pytest.mark.docs
@pytest.mark.parametrize(
    ("file", "processes", "trials"),
    [
        ("configs/sweep.yaml", 1, 2),
        ("sweeps/sweep.yaml", 2, 1),
        pytest.param("configs/sweep.yaml", 2, 1, marks=pytest.mark.long),
        pytest.param("sweeps/sweep.yaml", 1, 2, marks=pytest.mark.long),
    ],
)
def test_a_small_form_is_run(desk, file, processes, trials):
    """The same parameters and distributions, with smaller shapes and fewer steps."""
    sweep = load_yaml(desk / file)
    sweep["parameters"] |= {name: {"values": SMALL[name]} for name in SMALL if name in sweep["parameters"]}
    (desk / file).write_text(yaml.safe_dump(sweep, sort_keys=False))
    words = ["--config", "configs/default_config.yaml", "--data_path", "data/corpus.txt", "--wandb_project", "mine"]
    less = ["--max_context", 32, "--max_steps", 2, "--eval_iters", 1, "--vocab_size", 300, "--cpus_per_trial", 1]
    asked = ["--count", trials, "--workers", 2, "--procs_per_host", processes]
    done = run("sweep", "--sweep_config", file, *words, *less, *asked, cwd=desk, HOME=str(desk))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no W&B login: this machine chooses the trials" in done.stderr
    history = read_study(desk / "studies" / "sweep").history
    assert [trial.state for trial in history.trials.values()] == ["done"] * trials, done.stdout
    assert re.search(r"best val_bpb: [\d.]+, trial [01]: ", done.stdout)
    for number in history.trials:
        kept = Config.from_yaml(desk / "studies" / "sweep" / "trials" / str(number) / "config.yaml")
        n_heads, kv_heads, head_size = kept.part(ModelConfig).heads()
        assert n_heads * head_size == kept.dim
        assert n_heads % kv_heads == 0
