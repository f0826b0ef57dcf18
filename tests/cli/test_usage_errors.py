"""Whose an error is: the user's (a message, code 2), the program's (a traceback, 1) or the file system's (74)."""

import errno
import json
import os
import resource

import jax
import optax
import pytest
from tables import one_test

from roxxel_dist import Config, Experiment, Phase
from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import FileSystemError, FullDiskError, UserError
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.display import aligned

TEXT = "".join(f"{i} plus {i} is {2 * i}.\n" for i in range(300))
SMALL = {"dim": 16, "num_blocks": 1, "max_context": 16, "batch_size": 8, "max_steps": 2, "tokenizer_type": "char"}
MODEL = """
from flax import nnx
import jax.numpy as jnp
import optax

class Net(nnx.Module):
    def __init__(self, config, rngs):
        self.table = nnx.Embed(config.vocab_size, 8, rngs=rngs)
        self.fault = config.model_args["fault"]

    def __call__(self, tokens):
        if self.fault == "model":
            raise ValueError("of the model")
        if self.fault == "jax":
            jnp.concatenate([])
        if self.fault == "shape":
            return self.table.attend(self.table(tokens)).mean(1)
        if self.fault == "pair":
            return self.table.attend(self.table(tokens)), 0.0
        return self.table.attend(self.table(tokens))

def build(config, rngs):
    if config.model_args["fault"] == "arguments":
        raise ValueError("of the arguments")
    if config.model_args["fault"] == "library":
        optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5)
    return Net(config, rngs)

def short(config):
    return Net(config, nnx.Rngs(0))
"""


def own_code():
    raise ValueError("of the user's own code")


def checked():
    raise UserError("a value breaks its rule")


@one_test(
    ("act", "refused"),
    [
        (lambda: Phase(steps=-1), True),
        (lambda: Config.from_dict({"dim": "x"}).validate(), True),
        (lambda: jax.eval_shape(checked), True),
        (lambda: aligned([["a", "b"], ["c"]]), False),  # a bug in a call of the package: zip in it raises
        (lambda: jax.make_mesh((3, 5), ("a", "b")), False),
        (lambda: optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5), False),
        (own_code, False),
        (lambda: json.loads("{"), False),
        (lambda: jax.eval_shape(own_code), False),
    ],
)
def test_a_value_error_is_the_users_where_the_package_says_so(act, refused):
    with pytest.raises(ValueError, match=r".") as caught, usage_errors():
        act()
    assert isinstance(caught.value, UserError) == refused


@pytest.mark.parametrize(
    ("fault", "refused", "message"),
    [
        ("arguments", True, r"model is 'faulty_net:build': of the arguments [(].*faulty_net.py, line 24[)]"),
        ("library", False, "decay_steps"),
        ("model", False, "of the model"),
        ("jax", False, "at least one array"),
        ("shape", True, r"the model returns an array of shape [(]8, \d+[)] for tokens of shape [(]8, 16[)]: it must"),
        ("pair", True, r"the model returns a tuple for tokens of shape [(]8, 16[)]: it must return logits of shape"),
    ],
)
def test_an_error_in_a_model_keeps_its_traceback(fault, refused, message, tmp_path, monkeypatch):
    """What `build` says of its arguments is for the user; the rest is for who looks for the mistake in the model."""
    (tmp_path / "faulty_net.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = Config(**SMALL, model="faulty_net:build", model_args={"fault": fault})
    with pytest.raises(ValueError, match=message) as caught:
        Experiment(config).fit("text.txt", "new")
    assert isinstance(caught.value, UserError) == refused
    assert not (tmp_path / "new").exists()


def test_a_function_that_makes_a_model_takes_config_and_rngs(tmp_path, monkeypatch):
    (tmp_path / "short_net.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    message = r"short\(\) takes 1 positional argument but 2 were given: write it as `def build\(config, rngs\)`"
    with pytest.raises(UserError, match=message):
        Experiment(Config(**SMALL, model="short_net:short", model_args={"fault": ""})).fit("text.txt", "new")


@pytest.mark.parametrize(
    "words",
    [
        ["--data_path", "none.txt"],
        ["--data_path", "none.rox"],
        ["--config", "none.yaml", "--data_path", "text.txt"],
        ["--data_path", "text.txt", "--datasets", "{code: none}"],
        ["--run_dir", "gone", "--resume"],
    ],
)
def test_files_that_are_away_are_a_mistake_at_first_and_later_a_file_systems(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("ROXXEL_ATTEMPT", "2")
    assert main(["train", *words]) == 74
    said = capsys.readouterr().err
    assert "(attempt 2 of this job: perhaps a file system is away)" in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("number", "first", "later"),
    [
        (errno.EACCES, UserError, FileSystemError),
        (errno.ESTALE, OSError, FileSystemError),
        (errno.EIO, OSError, FileSystemError),
        (errno.ENOSPC, FullDiskError, FullDiskError),
        (errno.EDQUOT, FullDiskError, FullDiskError),
        (errno.EFBIG, FullDiskError, FullDiskError),
        (errno.ENAMETOOLONG, UserError, UserError),
    ],
)
def test_what_a_file_system_says_that_is_away(number, first, later, monkeypatch):
    for attempt, kind in (("0", first), ("1", later)):
        monkeypatch.setenv("ROXXEL_ATTEMPT", attempt)
        with pytest.raises(kind, match=f"shard: {os.strerror(number)}|{os.strerror(number)}: 'shard'"), usage_errors():
            raise OSError(number, os.strerror(number), "shard")


@pytest.mark.parametrize("words", ["data build text.txt --out data --tokenizer byte", "train --data_path text.txt"])
def test_a_full_disk_is_no_mistake_in_the_command(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(TEXT * 9)
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert main(words.split()) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large: files may not be so large here (ulimit -f): raise the limit" in capsys.readouterr().err


def test_no_run_begins_anew_where_steps_were_done(tmp_path, monkeypatch, capsys):
    """As in a folder in which nothing is mounted: neither `train` nor `fit` may begin there."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROXXEL_ATTEMPT", "1")
    monkeypatch.setenv("ROXXEL_REACHED_STEP", "7")
    message = "run/config.yaml is not there, and this job has reached step 7 in run"
    assert main(["train", "--data_path", "text.txt", "--run_dir", "run"]) == 74
    assert message in capsys.readouterr().err
    with pytest.raises(FileSystemError, match=message):
        Experiment(Config(**SMALL)).fit("text.txt", "run")
    assert not list((tmp_path / "run").iterdir())
