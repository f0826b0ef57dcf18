"""What surrounds a run: its folder, its config, what may change, and what is left when it cannot begin."""

import copy
import dataclasses
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from roxxel_dist import Config, Experiment, Trainer
from roxxel_dist.checkpoint.metadata import read_cursor
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.launcher.output import printable
from roxxel_dist.place.directory import RunDirectory, default_run_dir
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run import experiment
from roxxel_dist.run.components import build_components, open_corpus
from roxxel_dist.run.evaluate import evaluate
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.train.loop import Loop

SMALL = {
    "dim": 16,
    "num_blocks": 1,
    "n_heads": 2,
    "max_context": 16,
    "batch_size": 8,
    "max_steps": 3,
    "eval_iters": 1,
    "log_every": 1,
    "n_devices": 1,
}
PROMPT = "\x1b[2J" + "one\n" * 20
DRAW = experiment.draw_curve


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    return path


def config(**fields):
    return Config(**{**SMALL, "tokenizer_type": "char", **fields})


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def log_of(run):
    return (run / "logs" / "rank-0.log").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of three steps, whose text is gone."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000)))
    fields = {"tokenizer_type": "byte", "lr": 1e-3, "sample": "on", "sample_prompt": PROMPT}
    run = Experiment(Config(**SMALL, **fields)).fit(text, folder / "run")
    text.unlink()
    return run


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def drawn(monkeypatch):
    """The picture of the losses, which is not drawn for other tests."""
    monkeypatch.setattr(experiment, "draw_curve", DRAW)


def test_a_finished_run_goes_on_dies_and_goes_on_again(finished, drawn, monkeypatch):
    assert read_cursor(finished)["finished"]
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", dying)
        with pytest.raises(KeyboardInterrupt):
            Experiment(Config(max_steps=5, sample="auto")).fit(run_dir=finished, resume=True)
    assert read_cursor(finished) == {"step": 3, "last_step": 5, "finished": False}
    before = log_of(finished)
    Experiment(Config(max_steps=5, lr=1e-4)).fit(run_dir=finished, resume=True)
    assert read_cursor(finished) == {"step": 5, "last_step": 5, "finished": True}
    log = log_of(finished).removeprefix(before)
    assert "resuming after step 3 of 5" in log
    assert "changed since the run began: lr 0.001 -> 0.0001" in log
    assert "a sample" not in log, "it was a run of seconds"
    saved = load_yaml(finished / "config.yaml")
    assert (saved["max_steps"], saved["lr"], saved["dim"]) == (5, 1e-4, 16)
    resumes = saved["record"]["resumes"]
    assert [resume["step"] for resume in resumes] == [3, 3]
    assert [resume["changed_from"] for resume in resumes] == [{"max_steps": 3, "sample": "on"}, {"lr": 1e-3}]
    assert (finished / "plots" / "loss.png").exists()


def test_a_field_that_is_newer_than_the_run_had_its_default_there(finished):
    path = finished / "config.yaml"
    older = load_yaml(path)
    for name in ("attn_softcap", "qk_norm", "log_every"):
        del older[name]
    path.write_text(yaml.safe_dump(older))
    with pytest.raises(UserError, match=r"qk_norm is head, and the run to resume has none: leave it as it was"):
        Experiment(Config(max_steps=4, qk_norm="head")).fit(run_dir=finished, resume=True)
    Experiment(Config(max_steps=4, log_every=3)).fit(run_dir=finished, resume=True)
    assert load_yaml(path)["record"]["resumes"][-1]["changed_from"] == {"max_steps": 3, "log_every": 10}


def dying(self, at_the_end=None):
    raise KeyboardInterrupt


def test_a_copy_of_a_config_resumes_as_the_config_does(finished):
    """A field that was not given is that of the run."""
    again = dataclasses.replace(Config(n_devices=1), max_steps=4)
    result = Experiment(copy.copy(again)).fit(None, finished, resume=True)
    assert result.step == 4
    saved = load_yaml(finished / "config.yaml")
    assert (saved["dim"], saved["max_steps"]) == (SMALL["dim"], 4)
    with pytest.raises(UserError, match="dim is 32, and"):
        Experiment(dataclasses.replace(again, dim=32, max_steps=5)).fit(None, finished, resume=True)


def test_the_shape_of_a_model_cannot_change(finished):
    before = (finished / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="n_heads is 4, and the run to resume has 2"):
        Experiment(Config(n_heads=4, max_steps=5)).fit(run_dir=finished, resume=True)
    assert (finished / "config.yaml").read_bytes() == before


def begun_with(run, kernel):
    """The run, as if attention had been computed by another kernel."""
    saved = load_yaml(run / "config.yaml")
    assert (saved["attention"], saved["record"]["bits"]["attention"]) == ("auto", "xla")
    saved["record"]["bits"]["attention"] = kernel
    (run / "config.yaml").write_text(yaml.safe_dump(saved))


def test_a_run_keeps_its_kernel_of_attention(finished):
    with pytest.raises(UserError, match="attention is cudnn, and the run to resume began with xla"):
        Experiment(Config(attention="cudnn", max_steps=5)).fit(run_dir=finished, resume=True)
    Experiment(Config(attention="xla", max_steps=4)).fit(run_dir=finished, resume=True)
    assert "changed since the run began: attention auto -> xla" in log_of(finished)
    assert load_yaml(finished / "config.yaml")["record"]["resumes"][-1]["bits"]["attention"] == "xla"


def test_a_run_of_a_kernel_that_is_not_here(finished, tmp_path):
    begun_with(finished, "cudnn")
    with pytest.raises(UserError, match="the run began with attention cudnn, which a resume keeps, and cuDNN is"):
        Experiment(Config(max_steps=5)).fit(run_dir=finished, resume=True)
    with pytest.raises(UserError, match="attention is xla, and the run to resume began with cudnn"):
        Experiment(Config(attention="xla", max_steps=5)).fit(run_dir=finished, resume=True)
    fork = Experiment(Config(attention="xla", max_steps=4)).fit(run_dir=tmp_path / "fork", fork=f"{finished}@3")
    assert load_yaml(fork / "config.yaml")["record"]["bits"]["attention"] == "xla"
    assert evaluate(finished).losses


def test_a_kernel_that_is_not_here_leaves_nothing(text, tmp_path):
    with pytest.raises(UserError, match="attention is splash: splash attention is for TPUs, and the devices here"):
        Experiment(config(attention="splash")).fit(text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_keeps_its_config(finished, drawn):
    before = (finished / "config.yaml").read_bytes()
    (finished / "training_cursor.json").unlink()  # it was killed before it wrote this, and its picture
    Experiment(Config(max_steps=3)).fit(run_dir=finished, resume=True)
    assert (finished / "config.yaml").read_bytes() == before
    assert (finished / "plots" / "loss.png").exists()


def test_a_finished_run_needs_nothing_any_more(finished, capsys):
    shutil.rmtree(finished / "data")
    assert Experiment(Config(max_steps=3)).fit(run_dir=finished, resume=True) == finished
    assert "this run is finished: its last step, 3, is saved" in capsys.readouterr().out


def test_what_a_finished_run_would_not_do_is_refused(finished, text, tmp_path):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    begun_with = load_yaml(finished / "config.yaml")["record"]["data_path"]
    for fields, data in (({"lr": 1e-5}, None), ({"lr": 3e-4}, None), ({"epochs": 2}, None), ({}, text)):
        name = next(iter(fields), "data_path")
        with pytest.raises(UserError, match=rf"finished after step 3, .*\({name} .*amend=True.*fork=RUN@STEP"):
            Experiment(Config(max_steps=3, **fields)).fit(data, finished, resume=True)
    phases = [{"steps": 9, "batch_size": 8, "seq_len": 9}]
    with pytest.raises(UserError, match="phases"):
        Experiment(Config(max_steps=3, phases=phases)).fit(run_dir=finished, resume=True)
    # A default is no wish: the run keeps what it had.
    assert Experiment(Config(max_steps=3)).fit(begun_with, finished, resume=True) == finished
    with pytest.raises(UserError, match=r"data_path is .*text.txt, and .* was started with .*text.txt"):
        Experiment(Config(max_steps=5)).fit(text, finished, resume=True)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_trial_draws_no_curve(finished, drawn, monkeypatch):
    (finished / "training_cursor.json").unlink()
    monkeypatch.setenv("ROXXEL_TRIAL", "1")
    Experiment(Config(max_steps=3)).fit(run_dir=finished, resume=True)
    assert read_cursor(finished)["finished"]
    assert not (finished / "plots" / "loss.png").exists()


def test_a_run_at_the_end_of_its_phases_is_made_longer_by_phases_alone(text, tmp_path):
    phases = [{"steps": 1, "batch_size": 8, "seq_len": 17}]
    fields = {"model": "runs:build", "tokenizer_type": "byte", "phases": phases, "sample": "off"}
    Experiment(config(**fields)).fit(text, tmp_path / "short")
    assert "a sample" not in log_of(tmp_path / "short")
    with pytest.raises(UserError, match=r"finished after step 1, .*max_steps 3 -> 10000000.*longer phases"):
        Experiment(Config(max_steps=10_000_000)).fit(run_dir=tmp_path / "short", resume=True)


def test_a_sample_is_shown_where_it_is_asked_for_and_commands_no_terminal(trained):
    log = log_of(trained)
    assert "a sample of the text that the model generates, which has not read the first " in log
    assert log.count("| one\n") == 8 - 1
    assert r"\x1b[2Jone" in log
    assert "\x1b" not in log


def test_a_run_that_cannot_begin_harms_nothing_of_the_users(text, tmp_path):
    for name in ("data", "checkpoints"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "precious").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(UserError, match="use a smaller batch_size or seq_len, or more text"):
        Experiment(config(batch_size=10_000_000)).fit(text, tmp_path / "run")
    assert {"run/data/precious", "run/checkpoints/precious"} <= set(tree(tmp_path))
    with pytest.raises(UserError):
        Experiment(config(vocab_size=2)).fit(tmp_path / "nowhere", tmp_path / "a" / "b" / "c")
    assert set(before) <= set(tree(tmp_path))
    assert not (tmp_path / "a").exists()


def test_a_run_that_is_not_there_is_not_resumed(tmp_path):
    (tmp_path / "first").mkdir()
    Config().save_yaml(tmp_path / "first" / "config.yaml")
    with pytest.raises(UserError, match=r"there is no run .*/frist: did you mean .*/first\?"):
        Experiment(config()).fit(run_dir=tmp_path / "frist", resume=True)
    assert tree(tmp_path) == ["first", "first/config.yaml"]


def test_what_is_neither_a_folder_nor_in_a_store_that_is_known(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, place, data, fields in (
        ("run_dir", "hdfs://bucket/run", text, {}),
        ("run_dir", Path("hdfs://bucket/run"), text, {}),
        ("datasets 'code'", "run", text, {"datasets": {"code": "hdfs://bucket/code"}}),
    ):
        with pytest.raises(UserError, match=f"{name} is .*hdfs:/.*bucket"):
            Experiment(config(**fields)).fit(data, place)
    with pytest.raises(ValueError, match="gs:/"):
        CheckpointStore("gs://bucket/run/checkpoints")
    assert tree(tmp_path) == ["text.txt"]


def test_a_prompt_that_cannot_be_is_told_before_training(text, tmp_path):
    with pytest.raises(UserError, match="π"):
        Experiment(config(sample_prompt="π")).fit(text, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_phases_that_are_one_pass_read_each_token_once(text, tmp_path):
    phases = [{"epochs": 0.8, "batch_size": 8, "seq_len": 9}, {"epochs": 0.19, "batch_size": 8, "seq_len": 17}]
    wanted = config(phases=phases)
    with open_corpus(wanted, text, tmp_path / "data") as data:
        plan = build_components(wanted, data).curriculum.plan(1)
    assert "used up" not in plan.describe()
    assert plan.total_steps > 100


HOLD = """
import sys
from pathlib import Path
from roxxel_dist.place.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.claim(resume=False)
print("held", flush=True)
sys.stdin.read()
directory.release()
"""


def test_one_training_at_a_time(tmp_path):
    words = [sys.executable, "-c", HOLD, tmp_path / "run"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"another process .*is training in"):
            RunDirectory(tmp_path / "run").claim(resume=True)
        other.communicate(timeout=60)
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


def test_on_some_of_the_devices(corpus, tmp_path):
    some = config(n_devices=4, batch_size=12, tokenizer_type="byte")
    assert build_components(some, corpus).mesh().size == 4
    with pytest.raises(UserError, match=r"n_devices is 9, but 8 device.s. are here"):
        Experiment(config(n_devices=9)).fit(corpus.filepath, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_trainer_of_a_config_has_its_experiment():
    for made in (Trainer(config(lr=1e-4)), Trainer(config=config(lr=1e-4))):
        assert isinstance(made, Trainer)
        assert made.config.lr == made.experiment.config.lr == 1e-4
        assert not made.stopped
        with pytest.raises(AttributeError, match=r"Trainer\(config\) has fit"):
            made.run()
    assert inspect.signature(Trainer.fit) == inspect.signature(Experiment.fit)
    with pytest.raises(TypeError, match="with a Config it takes nothing else"):
        Trainer(config(), "adamw")


def test_a_sample_commands_no_terminal():
    assert printable("a\x1b[2Jb\r\n\tπ\x00\x9b") == "a\\x1b[2Jb\\r\n\tπ\\x00\\x9b"


@pytest.mark.parametrize(("wish", "samples"), [("auto", 1), ("off", 0)])
def test_a_run_that_took_its_time_shows_a_sample_unless_it_is_not_to(finished, monkeypatch, wish, samples):
    monkeypatch.setattr("roxxel_dist.run.experiment.SAMPLE_AFTER_S", 0.0)
    before = log_of(finished).count("a sample")
    Experiment(Config(max_steps=4, sample=wish)).fit(run_dir=finished, resume=True)
    assert log_of(finished).count("a sample") - before == samples


@pytest.mark.parametrize(
    ("field", "value", "package"),
    [("tensorboard", True, "tensorboardX"), ("wandb", "offline", "wandb"), ("wandb", "online", "wandb")],
)
def test_a_logger_that_is_not_installed_is_refused_before_the_first_step(
    text, tmp_path, monkeypatch, field, value, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=f"^{field} is {value}, and the package {package} is not installed: pip install"
    ):
        Experiment(config(**{field: value})).fit(text, tmp_path / "run")
    assert not (tmp_path / "run").exists()
