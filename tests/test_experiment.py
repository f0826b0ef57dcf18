"""What surrounds a run: its folder, its config, what may change, and what is left when it cannot begin."""

import multiprocessing
import shutil
from pathlib import Path

import pytest

from roxxel_dist import Config, Experiment, Trainer
from roxxel_dist.config import UsageError, load_yaml
from roxxel_dist.data.build import build
from roxxel_dist.experiment import printable
from roxxel_dist.run_directory import RunDirectory, default_run_dir
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.cursor import read_cursor
from roxxel_dist.train.trainer import Trainer as Loop

SMALL = {
    "dim": 16,
    "num_blocks": 1,
    "max_context": 16,
    "batch_size": 8,
    "max_steps": 3,
    "eval_iters": 1,
    "log_every": 1,
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    return path


def config(**fields):
    return Config(**{**SMALL, "tokenizer_type": "char", **fields})


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_run_on_text_goes_on_whatever_became_of_the_text(text, tmp_path):
    run = Experiment(config()).fit(text, tmp_path / "run")
    text.unlink()
    again = Experiment(config(max_steps=5, lr=1e-4))
    again.fit(run_dir=run, resume=True)
    log = (run / "logs" / "rank-0.log").read_text()
    assert "resuming after step 3 of 5" in log
    assert "changed since the run began: max_steps 3 -> 5" in log
    assert "changed since the run began: lr 0.0003 -> 0.0001" in log
    saved = load_yaml(run / "config.yaml")
    assert saved["max_steps"] == 5
    assert [resume["step"] for resume in saved["record"]["resumes"]] == [3]
    assert (run / "plots" / "loss.png").exists()


def test_the_shape_of_a_model_cannot_change(text, tmp_path):
    run = Experiment(config(n_heads=2)).fit(text, tmp_path / "run")
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(UsageError, match="n_heads is 4, and the run that shall be resumed has 2"):
        Experiment(config(n_heads=4, max_steps=5)).fit(run_dir=run, resume=True)
    assert (run / "config.yaml").read_bytes() == before


def test_a_finished_run_keeps_its_config(text, tmp_path):
    run = Experiment(config()).fit(text, tmp_path / "run")
    before = (run / "config.yaml").read_bytes()
    (run / "plots" / "loss.png").unlink()
    (run / "training_cursor.json").unlink()  # it was killed before it wrote this, and its picture
    Experiment(config()).fit(run_dir=run, resume=True)
    assert (run / "config.yaml").read_bytes() == before
    assert (run / "plots" / "loss.png").exists()


def test_a_finished_run_that_goes_on_and_dies_is_not_finished(text, tmp_path, monkeypatch):
    run = Experiment(config()).fit(text, tmp_path / "run")
    assert read_cursor(run)["finished"]
    longer = Experiment(config(max_steps=5))
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", dying)
        with pytest.raises(KeyboardInterrupt):
            longer.fit(run_dir=run, resume=True)
    assert read_cursor(run) == {"step": 3, "last_step": 5, "finished": False}
    Experiment(config(max_steps=5)).fit(run_dir=run, resume=True)
    assert read_cursor(run) == {"step": 5, "last_step": 5, "finished": True}


def dying(self, at_the_end=None):
    raise KeyboardInterrupt


def test_a_finished_run_needs_nothing_any_more(text, tmp_path, capsys):
    run = Experiment(config()).fit(text, tmp_path / "run")
    shutil.rmtree(run / "data")
    text.unlink()
    capsys.readouterr()
    assert Experiment(config()).fit(run_dir=run, resume=True) == run
    assert "this run is finished: its last step, 3, is saved" in capsys.readouterr().out


def test_what_a_finished_run_would_not_do_is_refused(text, tmp_path):
    run = Experiment(config(lr=1e-3)).fit(text, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = tmp_path / "other.txt"
    other.write_text("other text\n" * 500)
    for fields, data in (({"lr": 1e-5}, None), ({"lr": 3e-4}, None), ({"epochs": 2}, None), ({}, other)):
        name = next(iter(fields), "data_path")
        with pytest.raises(UsageError, match=rf"finished after step 3, .*\({name} .*amend=True.*fork=RUN@STEP"):
            Experiment(config(**{"lr": 1e-3, **fields})).fit(data, run, resume=True)
    with pytest.raises(UsageError, match="phases"):
        Experiment(config(phases=[{"steps": 9, "batch_size": 8, "seq_len": 9}])).fit(run_dir=run, resume=True)
    # A default is no wish: the run keeps what it had.
    assert Experiment(Config(max_steps=3)).fit(text, run, resume=True) == run
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(UsageError, match=r"data_path is .*other.txt, and .* was begun with .*text.txt"):
        Experiment(Config(max_steps=5)).fit(other, run, resume=True)
    Experiment(Config(max_steps=5)).fit(run_dir=run, resume=True)
    assert load_yaml(run / "config.yaml")["lr"] == 1e-3
    assert read_cursor(run) == {"step": 5, "last_step": 5, "finished": True}
    steps = 10_000_000
    short = Experiment(config(phases=[{"steps": 4, "batch_size": 8, "seq_len": 9}], max_steps=4))
    short.fit(text, tmp_path / "short")
    with pytest.raises(UsageError, match=f"finished after step 4, .*max_steps 4 -> {steps}.*longer phases"):
        Experiment(Config(max_steps=steps)).fit(run_dir=tmp_path / "short", resume=True)


def test_a_run_that_cannot_begin_harms_nothing_of_the_users(text, tmp_path):
    for name in ("data", "checkpoints"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "precious").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="use a smaller batch_size or seq_len, or more text"):
        Experiment(config(batch_size=10_000_000)).fit(text, tmp_path / "run")
    assert {"run/data/precious", "run/checkpoints/precious"} <= set(tree(tmp_path))
    with pytest.raises(UsageError):
        Experiment(config(vocab_size=2)).fit(tmp_path / "nowhere", tmp_path / "a" / "b" / "c")
    assert set(before) <= set(tree(tmp_path))
    assert not (tmp_path / "a").exists()


def test_a_run_that_is_not_there_is_not_resumed(tmp_path):
    (tmp_path / "first").mkdir()
    Config().save_yaml(tmp_path / "first" / "config.yaml")
    with pytest.raises(UsageError, match=r"there is no run .*/frist: did you mean .*/first\?"):
        Experiment(config()).fit(run_dir=tmp_path / "frist", resume=True)
    assert tree(tmp_path) == ["first", "first/config.yaml"]


def test_a_bucket_is_no_local_folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, place, data, fields in (
        ("run_dir", "gs://bucket/run", text, {}),
        ("run_dir", Path("s3://bucket/run"), text, {}),
        ("data_path", "run", "az://bucket/data", {}),
        ("datasets 'code'", "run", text, {"datasets": {"code": "s3://bucket/code"}}),
    ):
        with pytest.raises(UsageError, match=f"{name} is .*: buckets cannot be read or written; name a folder"):
            Experiment(config(**fields)).fit(data, place)
    with pytest.raises(ValueError, match="buckets cannot be"):
        CheckpointStore("gs://bucket/run/checkpoints")
    with pytest.raises(ValueError, match="buckets cannot be"):
        build([text], "gs://bucket/data")
    assert tree(tmp_path) == ["text.txt"]


def test_a_prompt_that_cannot_be_is_told_before_training(text, tmp_path):
    with pytest.raises(UsageError, match="π"):
        Experiment(config(sample_prompt="π")).fit(text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_phases_that_are_one_pass_read_each_token_once(text, tmp_path):
    phases = [{"epochs": 0.8, "batch_size": 8, "seq_len": 9}, {"epochs": 0.19, "batch_size": 8, "seq_len": 17}]
    run = Experiment(config(phases=phases, max_steps=2)).fit(text, tmp_path / "run")
    log = (run / "logs" / "rank-0.log").read_text()
    assert "used up" not in log


def hold(path, ready, leave):
    directory = RunDirectory(path)
    directory.claim(resume=False)
    ready.set()
    leave.wait(60)
    directory.release()


def test_one_training_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "run", ready, leave))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(ValueError, match=r"another process .*is training in"):
            RunDirectory(tmp_path / "run").claim(resume=True)
    finally:
        leave.set()
        other.join(60)
    again = RunDirectory(tmp_path / "run")
    again.claim(resume=False)
    again.release()
    again.discard()
    assert (tmp_path / "run").exists()  # it was there before


def test_default_folders_are_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        path = default_run_dir()
        path.mkdir(parents=True)
        names.append(path)
    assert len(set(names)) == 3
    monkeypatch.setenv("ROXXEL_RUN_ID", "20260101_000000")
    assert str(default_run_dir()) == "runs/run_20260101_000000"


def test_on_some_of_the_devices(text, tmp_path):
    run = Experiment(config(n_devices=4, batch_size=12)).fit(text, tmp_path / "run")
    assert "4 device(s)" in (run / "logs" / "rank-0.log").read_text()
    with pytest.raises(UsageError, match="batch_size is 12, which does not divide by 8 devices x grad_accum"):
        Experiment(config(batch_size=12)).fit(text, tmp_path / "other")
    with pytest.raises(UsageError, match=r"n_devices is 9, but 8 device.s. are here"):
        Experiment(config(n_devices=9)).fit(text, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_trainer_of_a_config_is_its_experiment():
    made = Trainer(config(lr=1e-4))
    assert isinstance(made, Experiment)
    assert made.config.lr == 1e-4
    assert isinstance(Trainer(config=config()), Experiment)
    with pytest.raises(TypeError, match="missing"):
        Trainer(config(), "adamw")
    assert issubclass(Trainer, Loop)


def test_a_sample_commands_no_terminal():
    assert printable("a\x1b[2Jb\r\n\tπ\x00\x9b") == "a\\x1b[2Jb\\r\n\tπ\\x00\\x9b"


@pytest.mark.parametrize("wish", ["auto", "off", "on"])
def test_a_run_of_seconds_shows_no_sample_unless_it_is_asked_to(text, tmp_path, capfd, wish):
    Experiment(config(tokenizer_type="byte", sample=wish, sample_prompt="\x1b[2J" + "one\n" * 20)).fit(
        text, tmp_path / wish
    )
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert "(Bal" not in shown
    assert shown.count("\none") == (8 - 1 if wish == "on" else 0)
    assert (r"\x1b[2Jone" in shown) == (wish == "on")
