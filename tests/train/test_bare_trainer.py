"""A `Trainer` of parts: what its run directory holds for the commands, and how a training says that it was stopped."""

import copy
import json
import os
import re
import shutil
import signal
import sys
import threading
import time

import optax
import pytest
from flax import nnx
from models import with_numbers
from reader import ROOT
from runs import stop_after

from roxxel_dist import Config, Curriculum, Experiment, Phase, Roxxel, Trainer, Transformer
from roxxel_dist.cli import main, report
from roxxel_dist.corpus.build import build
from roxxel_dist.model.loss import token_losses
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.sharding import make_mesh

ADAM = optax.adam(1e-2)
SHAPE = {"dim": 16, "num_blocks": 1, "kv_heads": 1, "head_size": 8, "max_context": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data set, which is only read."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(500)))
    build(folder / "text.txt", folder / "data", tokenizer="byte", progress=False).close()
    return folder / "data"


@pytest.fixture
def corpus(data, tmp_path, monkeypatch):
    """Of a copy of it in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Roxxel(shutil.copytree(data, "data"))


class Embedding(nnx.Module):
    """A model of the program's own, which compiles soon."""

    def __init__(self, size):
        self.table = nnx.Embed(size, size, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        return self.table(tokens)


def own_trainer(corpus, path="run", **options):
    return made_trainer(with_numbers(lambda: Embedding(corpus.vocab_size)), corpus, path, options)


def trainer(corpus, path="run", **options):
    """Of the built-in model, which commands can make."""
    config = Config(**SHAPE, vocab_size=corpus.vocab_size)
    scalars = {"alpha_balance": config.alpha_balance, "rate": config.dropout_rate}
    return made_trainer(with_numbers(lambda: Transformer(config, nnx.Rngs(0)), **scalars), corpus, path, options)


def made_trainer(model, corpus, path, options):
    curriculum = Curriculum(corpus, [Phase(steps=4, batch_size=4, seq_len=17)])
    options = {"log_every": 1, "eval_every": 2, "eval_iters": 1, "checkpoint_every": 2} | options
    return Trainer(model, ADAM, curriculum, token_losses, path, mesh=make_mesh(n_devices=1), **options)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A folder of two runs, which are only read: `run` of two steps, and `mine` of four with a model of the program."""
    folder = tmp_path_factory.mktemp("trained")
    with Roxxel(data) as corpus:
        for made in (trainer(corpus, folder / "run", max_steps=2), own_trainer(corpus, folder / "mine")):
            made.run()
            made.close()
    return folder


@pytest.mark.cluster
def test_the_commands_read_its_run(corpus, capsys):
    made = trainer(corpus)
    made.run()
    made.close()
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == pytest.approx(0, abs=1e-6)
    assert main(["generate", "run", "--prompt", "1 plus ", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out
    assert main(["report", "run", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["parameters"] > 1000
    assert main(["batch", "run", "--step", "2"]) == 0


def test_parts_in_another_order_are_named():
    with pytest.raises(TypeError, match=r"curriculum is a GradientTrans\w+, and must be a Curriculum. The order is"):
        Trainer("model", Curriculum, optax.adam(1e-2), token_losses, "run")


def test_a_trainer_of_parts_is_only_made_until_it_runs(corpus, tmp_path):
    """It can be copied and pickled, and says what is missing before and after."""
    made = own_trainer(corpus, max_steps=1)
    copied = copy.copy(made)
    assert not (tmp_path / "run").exists()
    assert (made.stopped, made.options.max_steps, made.mesh.size) == (False, 1, 1)
    assert not hasattr(made, "state")
    with pytest.raises(AttributeError, match=r"are there from run\(\) on"):
        _ = made.plan
    with pytest.raises(AttributeError, match=r"one that is made of parts has run\(\)"):
        made.fit("data")
    made.run()
    assert (made.step, made.start_step, made.finished) == (1, 0, True)
    assert made.checkpointer.steps() == [1]
    made.close()
    copied.open()
    assert (copied.step, copied.finished) == (1, True)
    copied.close()


def test_another_run_of_a_trainer_that_was_stopped_continues(corpus, monkeypatch):
    made = own_trainer(corpus)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        made.run()
    assert (made.stopped, made.step) == (True, 2)
    made.run()
    assert (made.stopped, made.start_step, made.step) == (False, 2, 4)


def test_only_its_program_trains_it(corpus, trained, capsys):
    shutil.copytree(trained / "run", "run")
    assert main(["train", "--run_dir", "run", "--resume"]) == 2
    name = os.path.basename(sys.argv[0])
    by = f"run was trained by {name}, with a Trainer of parts: "
    assert f"{by}it is finished after step 2. To train longer, start that program" in capsys.readouterr().err
    os.remove("run/training_cursor.json")
    assert main(["train", "--run_dir", "run", "--resume"]) == 2
    assert f"{by}start that program again; it continues" in capsys.readouterr().err
    assert main(["train", "--run_dir", "new", "--fork", "run@2"]) == 2
    said = capsys.readouterr().err
    assert f"{by}fork it in that program" in said
    assert "or begin a run with its weights: init_from run@STEP" in said
    made = trainer(corpus)
    made.run()
    assert made.step == 4
    made.close()


def test_a_run_with_a_model_of_the_program_is_explained(corpus, trained, capsys, monkeypatch):
    """No command can make its model: resume, fork and another run say so, and change nothing."""
    shutil.copytree(trained / "mine", "mine")
    os.rename("mine/training_cursor.json", "cursor")
    resume = ["train", "--run_dir", "mine", "--resume"]
    by = "mine was trained by a program of yours, with a Trainer of parts: "
    for words, message in (
        (resume, by + "start that program again; it continues from the newest checkpoint. For a new run"),
        ([*resume, "--data_path", "data"], by + "start that program again"),
        ([*resume, "--data_path", "data", "--amend"], by + "start that program again"),
        (["train", "--run_dir", "new", "--fork", "mine@2"], by + "fork it in that program, with Trainer(..., origin="),
        (["train", "--run_dir", "new", "--anneal", "mine@2", "--decay_steps", "2"], by + "fork it in that"),
        (["train", "--run_dir", "mine", "--data_path", "data"], "mine holds a run already: continue it with --resume"),
    ):
        assert main(words) == 2, words
        assert message in capsys.readouterr().err, words
    os.rename("cursor", "mine/training_cursor.json")
    assert main([*resume, "--max_steps", "20"]) == 2
    finished = "it is finished after step 4. To train longer, start that program again with a larger max_steps"
    assert by + finished in capsys.readouterr().err
    assert not os.path.exists("new")
    monkeypatch.setattr(report, "draw", lambda *where: [])  # the report of `own` below has pictures
    assert main(["report", "mine", str(trained / "run")]) == 0
    table = capsys.readouterr().out
    assert "config:" not in table
    assert "no config, as a program's Trainer made the model: mine" in table
    assert len(table.splitlines()) < 30


PARTS = (lambda: None, optax.sgd(0.1), None, token_losses, "run")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (["run.yaml"], {}, r"'run.yaml' is a path, and .*: Trainer\(Config.from_yaml\('run.yaml'\)\), or of parts"),
        ([], {"config": "run.yaml"}, r"'run.yaml' is a path"),
        ([{"dim": 8}], {}, r"a dictionary is given, and .*: Trainer\(Config.from_dict\(fields\)\)"),
        ([Config()], {"max_steps": 3}, "with a Config it takes nothing else: put other fields into the Config"),
        ([], {}, r"model, optimizer, curriculum, loss_fn, save_path is not given: a trainer is Trainer\(config\), or"),
        (PARTS[:3], {}, r"loss_fn, save_path is not given"),
        ([*PARTS[:3], None, "run"], {}, r"loss_fn is None: it must be a function of \(model, batch\)"),
        ([*PARTS[:3], "mypkg:loss", "run"], {}, r"loss_fn is 'mypkg:loss': it must be a function"),
        ([*PARTS[:4], None], {}, "save_path is None: it must be the folder of the run"),
        (PARTS, {"model": 1}, "model is given by place and by name"),
        ([*PARTS, 3], {}, r"6 values are given by place, and Trainer\(model, .*\) has 5: name others"),
    ],
)
def test_a_trainer_says_what_it_is_made_of(given, options, message):
    with pytest.raises(TypeError, match=f"^Trainer: {message}"):
        Trainer(*given, **options)


def test_ctrl_c_in_fit_returns_a_result_that_says_so(corpus, tmp_path):
    def interrupt():
        log = tmp_path / "stopped" / "metrics.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    shape = {"model": "runs:build", "dim": 16, "max_context": 16}
    config = Config(**shape, epochs=1000, batch_size=4, n_devices=1, log_every=1, eval_iters=1)
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    result = Experiment(config).fit("data", "stopped")
    watcher.join()
    assert result.stopped
    assert result.step >= 2
    assert repr(result) == f"<run stopped: stopped after step {result.step}>"
    assert (result / "checkpoints" / str(result.step)).is_dir()
    assert repr(result / "x") == "PosixPath('stopped/x')"
    config.max_steps = result.step + 1
    ended = Experiment(config).fit(run_dir="stopped", resume=True)
    assert (ended.stopped, ended.step) == (False, result.step + 1)


def test_a_run_with_a_model_of_ones_own_says_which_commands_read_it(corpus, trained, capsys):
    shutil.copytree(trained / "mine", "own")
    assert main(["report", "own"]) == 0
    assert "steps             4" in capsys.readouterr().out
    assert main(["top", "own", "--once"]) == 0
    assert "finished  step 4 of 4" in capsys.readouterr().out
    assert main(["verify", "own"]) == 0
    for words in (
        ["eval", "own"], ["plan", "own"], ["generate", "own"], ["audit", "own"], ["compare", "own", "own"],
        ["batch", "own", "--step", "1"], ["export", "own", "--format", "msgpack", "--out", "new"],
    ):  # fmt: skip
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "own has no config.yaml: a program of yours made its model and trained it with a Trainer" in said
        assert "train it with --model MODULE:FUNCTION. `report`, `top` and `verify` read this run" in said


def test_what_is_held_out_by_default_is_what_the_page_says():
    page = (ROOT / "docs" / "guides" / "evaluate.md").read_text()
    (said,) = re.findall(r"By default a tenth of `self` \(`val_fraction: ([\d.]+)`\)", page)
    assert {LoopOptions().val_fraction, Config().val_fraction} == {float(said)}
