"""From a Config to a learning rate: what comes out, and that nothing is left behind."""

import json
import os
import signal
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import run

from roxxel_dist import Config, Experiment
from roxxel_dist.cli import main
from roxxel_dist.corpus.build import build
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import temporary_folder
from roxxel_dist.train.step import compile

SMALL = {
    "dim": 16, "num_blocks": 1, "max_context": 16, "batch_size": 8, "dropout_rate": 0.0, "tokenizer_type": "char",
    "n_devices": 1,
}  # fmt: skip
OWN = SMALL | {"model": "runs:build"}
"""Where the model is not the matter: it compiles soon."""
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text beside an empty working directory."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return path


def test_a_sweep_of_text_and_its_command_leave_nothing_behind(text, tmp_path, capsys):
    config = Config(**OWN)
    before = config.to_dict()
    experiment = Experiment(config)
    suggested, rates, losses = experiment.find_lr(text, num_steps=40)
    assert len(rates) == len(losses)
    assert rates[0] == 1e-6
    assert 1e-3 < suggested <= rates[-1]
    assert suggested in rates
    assert min(losses) < losses[0] - 0.5
    assert config.to_dict() == experiment.config.to_dict() == before
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "text.txt"]
    Config(**OWN, datasets={"self": str(text)}).save_yaml("small.yaml")
    words = ["--config", "small.yaml", "--min_lr", "1e-6", "--max_lr", "1e-1", "--num_steps", "40", "--plot"]
    assert main(["find-lr", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Suggested LR: {suggested:.2e}"
    assert "picture: lr_finder.png" in lines
    assert Path("lr_finder.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path().iterdir()) == ["lr_finder.png", "small.yaml"]


@pytest.mark.long
def test_a_fine_tune_is_swept_from_its_weights(text, tmp_path):
    run = Experiment(Config(**SMALL, lr=1e-2, warmup_steps=0, max_steps=10)).fit(text, tmp_path / "run")
    _, _, fresh = Experiment(Config(**SMALL)).find_lr(text, num_steps=20)
    _, _, tuned = Experiment(Config(**SMALL, init_from=str(run))).find_lr(text, num_steps=20)
    assert tuned[0] < fresh[0] - 0.1
    with pytest.raises(UserError, match=r"init_from is .* is of another model"):
        Experiment(Config(**{**SMALL, "dim": 32}, init_from=str(run))).find_lr(text, num_steps=20)


def test_rates_and_trials_have_one_program(text, tmp_path, monkeypatch):
    """Rates, decay and seeds are arguments of a step: XLA compiles it once, and jax's cache has it for the others."""
    steps = []

    def note(lowered, options):
        if "module @jit_step " in (program := lowered.as_text()):
            steps.append((program, options))
        return nullcontext()

    monkeypatch.setattr(compile, "compile_lock", note)
    Experiment(Config(**OWN)).find_lr(text, num_steps=40)
    assert len(steps) == 1
    trial = {"lr": 1e-2, "weight_decay": 0.3, "warmup_steps": 2, "seed": 5}
    Experiment(Config(**OWN, **trial, max_steps=3)).fit(text, tmp_path / "run")
    of_rates, of_trial = steps
    assert of_rates == of_trial


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_folder(text, number):
    before = signal.getsignal(number)
    folders = []

    def sweep():
        with temporary_folder(text, "find-lr") as folder:
            folders.append(folder.parent)
            assert folder.parent.is_dir()
            os.kill(os.getpid(), number)
            time.sleep(30)

    with pytest.raises(SystemExit) as left:
        sweep()
    assert left.value.code == 128 + number
    assert not folders[0].exists()
    assert signal.getsignal(number) == before


def test_a_picture_that_cannot_be_drawn_costs_no_suggestion(text, capsys):
    words = [word for name, value in OWN.items() for word in (f"--{name}", str(value))]
    assert (
        main(["find-lr", *words, "--data_path", str(text), "--num_steps", "20", "--plot", "--out", "/proc/x.png"]) == 2
    )
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith("Suggested LR: ")
    assert "--out /proc/x.png cannot be written" in said.err


def test_what_cannot_be_swept(text, tmp_path):
    experiment = Experiment(Config(**OWN))
    with pytest.raises(UserError, match="no data: name a text file, a folder or shards with data_path=PATH"):
        experiment.find_lr(None)
    with pytest.raises(UserError, match="min_lr is -1: it must be above 0"):
        experiment.find_lr(text, min_lr=-1)
    with pytest.raises(UserError, match="the loss did not fall between learning rates"):
        experiment.find_lr(text, min_lr=1e-9, max_lr=1e-8, num_steps=30)
    with pytest.raises(UserError, match="use a smaller batch_size or seq_len, or more text"):
        Experiment(Config(**{**SMALL, "batch_size": 10_000_000})).find_lr(text)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["here", "text.txt"]


def test_the_command_says_what_is_wrong(text, capsys):
    assert main(["find-lr", "--data_path", str(text), "--max_lr", "1e-7"]) == 2
    assert "max_lr is 1e-07: it must be above min_lr (1e-06)" in capsys.readouterr().err
    assert main(["find-lr", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: cannot be read" in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.long
def test_two_processes_find_what_one_finds(text):
    words = ["find-lr", "--data_path", text, "--num_steps", "20", "--out", "here.png", "--plot"]
    words += [word for name, value in {**SMALL, "n_devices": 0}.items() for word in (f"--{name}", value)]
    said = []
    for processes, devices in ((1, 2), (2, 1)):
        ranks = ["--nprocs", processes, "--devices-per-proc", devices]
        result = run("launch", "local", *ranks, "--", *words, cwd=Path.cwd())
        assert result.returncode == 0, result.stdout + result.stderr
        said.append([line.split("Suggested LR: ")[1] for line in result.stdout.splitlines() if "Suggested" in line])
    assert len(said[0]) == 1
    assert said[0] == said[1]
    assert not list(Path().glob(".find-lr-*"))
    assert Path("here.png").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_with_it_is_near_the_best(tmp_path):
    """200 steps end within 3 % of the lowest final loss of seven rates, for two widths."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    build([folder / "email", folder / "asyncio"], tmp_path / "data", tokenizer="byte").close()
    phases = [{"steps": 200, "batch_size": 16, "seq_len": 65}]
    for dim, heads in ((32, 1), (96, 3)):
        fields = {"dim": dim, "n_heads": heads, "num_blocks": 2, "max_context": 64, "dropout_rate": 0.0}
        fields |= {"n_devices": 1, "phases": phases, "eval_every": 200, "checkpoint_every": 200, "seed": 0}
        suggested, _, _ = Experiment(Config(**fields)).find_lr(tmp_path / "data")
        final = {}
        for rate in (suggested, *RATES):
            run_dir = Experiment(Config(lr=rate, **fields)).fit(tmp_path / "data", tmp_path / f"{dim}-{rate}")
            final[rate] = last_val_loss(run_dir)
        assert final[suggested] <= 1.03 * min(final[rate] for rate in RATES), (dim, suggested, final)
        assert max(final.values()) > 1.1 * min(final.values())  # the rate matters


def last_val_loss(run_dir):
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
