"""Runs that come from another run, from the config to the folder that they leave."""

import hashlib
import shutil

import pytest

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.cli import main
from roxxel_dist.cli.arguments import parse_train, step_range
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import load_yaml

SMALL = {
    "model": "runs:build",
    "dim": 16,
    "max_context": 16,
    "n_devices": 1,
    "batch_size": 8,
    "val_fraction": 0.0,
    "sample": "off",
    "log_every": 1,
    "max_to_keep": None,
    "tokenizer_type": "char",
}


def contents(path):
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of 6 steps on text, with checkpoints of the steps 1, 3 and 6."""
    folder = tmp_path_factory.mktemp("parent")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    run = Experiment(Config(**SMALL, max_steps=6, checkpoint_every=3)).fit(folder / "text.txt", folder / "run")
    (folder / "text.txt").unlink()
    return run


def test_a_fork_takes_config_and_data_and_remembers_where_it_came_from(parent, tmp_path):
    before = contents(parent)
    _, config = parse_train(["--fork", f"{parent}@3", "--max_steps", "8", "--lr", "1e-4"])
    assert (config.dim, config.max_steps, config.lr) == (16, 8, 1e-4)
    fork = Experiment(config).fit(run_dir=tmp_path / "fork", fork=f"{parent}@3")
    assert contents(parent) == before
    saved = load_yaml(fork / "config.yaml")
    assert saved["record"]["forked_from"] == {"run": str(parent), "step": 3}
    assert saved["record"]["data_path"] == str(parent / "data")
    assert saved["record"]["pjrt_nproc"] == load_yaml(parent / "config.yaml")["record"]["pjrt_nproc"]
    assert (fork / "tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    log = (fork / "logs" / "rank-0.log").read_text()
    assert f"changed since {parent}@3: lr 0.0003 -> 0.0001" in log
    assert "resuming after step 3 of 8" in log
    config.max_steps = 9
    Experiment(config).fit(run_dir=fork, resume=True)
    again = load_yaml(fork / "config.yaml")["record"]
    assert again["forked_from"] == saved["record"]["forked_from"]
    assert [resume["step"] for resume in again["resumes"]] == [8]
    with pytest.raises(UserError, match=f"was forked from {parent}@3: leave fork out, or name another run_dir"):
        Experiment(config).fit(run_dir=fork, resume=True, fork=f"{parent}@6")


def test_a_fork_that_is_started_again_has_its_own_config(parent, tmp_path, monkeypatch):
    """Whatever its parent's has become since."""
    words = ["--fork", f"{parent}@3", "--max_steps", "8"]
    Config.from_dict({**SMALL, "lr": 7e-4}).save_yaml(tmp_path / "config.yaml")
    assert parse_train([*words, "--run_dir", str(tmp_path)])[1].lr == 3e-4
    monkeypatch.setenv("ROXXEL_ATTEMPT", "1")
    assert parse_train([*words, "--run_dir", str(tmp_path)])[1].lr == 7e-4
    monkeypatch.setenv("ROXXEL_RUN_ID", "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "run_mine").mkdir(parents=True)
    (tmp_path / "config.yaml").rename(tmp_path / "runs" / "run_mine" / "config.yaml")
    assert parse_train(words)[1].lr == 7e-4


def test_what_a_fork_cannot_be(parent, tmp_path):
    config = Config.from_yaml(parent / "config.yaml")
    for fork, fields, message in (
        (f"{parent}@5", {}, "has no checkpoint of step 5; nearest is 3 or 6, kept are 1, 3, 6"),
        (f"{parent}", {}, "it must say at which step, as in"),
        (f"{parent}@6", {}, "the new run ends at step 6: give it longer phases, or a larger max_steps"),
        (f"{tmp_path}@6", {}, "is not a run directory, it has no config.yaml"),
        (f"{parent}@3", {"optimizer": "sgd"}, "optimizer is sgd, and .*run@3 has adamw: leave it as it was, or start"),
        (f"{parent}@3", {"init_from": str(parent)}, "init_from is .*, and .*run@3 has None"),
    ):
        changed = Config.from_dict({**config.to_dict(), **fields})
        with pytest.raises(UserError, match=message):
            Experiment(changed).fit(run_dir=tmp_path / "fork", fork=fork)
        assert not (tmp_path / "fork").exists()
    with pytest.raises(UserError, match="a fork needs a run_dir of its own"):
        Experiment(config).fit(run_dir=parent, resume=True, fork=f"{parent}@3")


def test_weights_and_tokenizer_of_another_run(parent, tmp_path):
    """New text becomes the tokens that the weights know, whatever tokenizer it would have got."""
    text = tmp_path / "new.txt"
    text.write_text("1 is 1.\n2 plus 2 is 4.\n" * 300)  # fewer characters than the parent's text
    config = Config(**SMALL, max_steps=2, init_from=f"{parent}@6")
    run = Experiment(config).fit(text, tmp_path / "run")
    assert (run / "tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    saved = load_yaml(run / "config.yaml")
    assert saved["init_from"] == f"{parent}@6"
    assert saved["record"]["initialized_from"] == {"run": str(parent), "step": 6}
    config.init_from = None
    config.max_steps = 3
    with pytest.raises(UserError, match="init_from is None, and the run to resume has"):
        Experiment(config).fit(run_dir=run, resume=True)


def test_data_of_another_tokenizer_is_refused(parent, tmp_path):
    with Roxxel(tmp_path / "other_*.rox") as other:
        other.write([list(range(1, 9)) * 40] * 20, vocab_size=19, tokenizer_fingerprint="0123456789abcdef")
    config = Config(**SMALL, max_steps=2, init_from=str(parent))
    with pytest.raises(UserError, match="and the data was made with 0123456789abcdef: build the data with"):
        Experiment(config).fit(tmp_path / "other_*.rox", tmp_path / "run")
    wider = Config(**{**SMALL, "dim": 32}, max_steps=2, init_from=str(parent))
    with pytest.raises(UserError, match=r"init_from is .*run@6: .* is of another model \(params/.* in it and .* here"):
        Experiment(wider).fit(parent / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_fork_without_some_rows(parent, tmp_path):
    """Started again it has to be asked for in the same way, or not at all."""
    config, fork = Config.from_yaml(parent / "config.yaml"), f"{parent}@3"
    before = contents(parent)
    run = Experiment(config).fit(run_dir=tmp_path / "run", fork=fork, skip_steps=(4, 5))
    assert contents(parent) == before
    assert "without what steps 4 to 5 read" in (run / "logs" / "rank-0.log").read_text()
    origin = load_yaml(run / "config.yaml")["record"]["forked_from"]
    assert origin == {"run": str(parent), "step": 3, "skipped": [4, 5]}
    assert main(["audit", str(run)]) == 0
    shutil.rmtree(run / "checkpoints")  # as if it had died before its first save: it begins again as it began
    plan = Experiment(config).fit(run_dir=run, resume=True)
    assert plan == run
    again = Experiment(config).fit(run_dir=tmp_path / "again", fork=fork, skip_steps=(4, 5))
    assert (run / "model_weights.msgpack").read_bytes() == (again / "model_weights.msgpack").read_bytes()
    for words, message in (
        ({"fork": fork}, "skip_steps is None, and the run in .* began with 4:5: name another run_dir"),
        ({"fork": fork, "skip_steps": (4, 4)}, "skip_steps is 4:4, and the run in .* began with 4:5"),
        ({"skip_steps": (6, 6)}, "begin one at a checkpoint of it with fork=.*@STEP and another run_dir"),
    ):
        with pytest.raises(UserError, match=message):
            Experiment(config).fit(run_dir=run, resume=True, **words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--skip_steps", "3-4", "--fork", "a@1"], "--skip_steps is '3-4': write the first step and the last"),
        (["--skip_steps", "3:4", "--run_dir", "x"], "--skip_steps leaves rows out in a new run that begins at a check"),
        (["--run_dir", "x", "--resume", "--skip_steps", "3:4"], "add --fork RUN@STEP"),
    ],
)
def test_words_that_do_not_go_together(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_steps_that_a_flag_gives():
    assert step_range("--skip_steps", "120:128") == (120, 128)
    assert step_range("--skip_steps", None) is None
