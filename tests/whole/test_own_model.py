"""A model and a loss of the user's own, through everything that the built-in one goes through."""

import contextlib
import json
import re
import shutil
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from commands import TINY, losses, make_corpus, rows, run
from flax import nnx

from roxxel_dist import Config, Experiment, Transformer, load_run
from roxxel_dist.cli import main, report
from roxxel_dist.cli.arguments import parse_train
from roxxel_dist.model.user_code import import_function
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import build_components
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.weights.generator import check_continues
from roxxel_dist.weights.load import model_builder

pytestmark = pytest.mark.xdist_group("own")
OWN = ["--model", "netpkg.net:build", "--loss", "netpkg.net:loss", "--model_args", "{width: 48}"]
TRAIN = ["train", "--config", "tiny.yaml", "--data_path", "data", "--run_dir"]
SIX = ["--max_steps", 6, "--checkpoint_every", 3, "--eval_iters", 1]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a corpus, a package of the user's, and the whole run of its model on 2 devices in `whole`."""
    folder = tmp_path_factory.mktemp("own")
    make_corpus(folder)
    (folder / "tiny.yaml").write_text(
        TINY.replace("dim: 32", "dim: 7") + "sample: 'off'\n"
    )  # nothing the built-in model could be made of
    (folder / "netpkg").mkdir()
    shutil.copy(pytest.importorskip("own_model").__file__, folder / "netpkg" / "net.py")
    with contextlib.chdir(folder):
        assert main(words("whole", "--n_devices", 2)) == 0
    return folder


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    return work


def words(run_dir, *more):
    train = [*TRAIN, run_dir, *OWN, *SIX, "--fsdp", "True", "--model_args.width", 64, *more]
    return [str(word) for word in train]


def check_whole(run_dir):
    found = rows(run_dir)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[6]["train_loss"] < found[1]["train_loss"]
    assert 0 <= found[6]["accuracy"] <= 1
    assert 0 <= found[6]["val_accuracy"] <= 1
    assert "val_bpb" not in found[6], "a loss of the user's own may be anything"
    saved = load_yaml(run_dir / "config.yaml")
    assert (saved["model"], saved["model_args"]) == ("netpkg.net:build", {"width": 64})


def cut(whole, run_dir):
    """As if the run had been killed behind the checkpoint of step 3."""
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "6")
    (run_dir / "training_cursor.json").unlink()


def test_it_trains_with_its_parameters_cut_and_its_own_loss(work):
    check_whole(work / "whole")


def test_it_resumes_to_the_bit(here, tmp_path, capsys):
    cut(here / "whole", tmp_path / "cut")
    assert main(words(tmp_path / "cut", "--n_devices", 2, "--resume")) == 0
    assert "resuming after step 3 of 6" in capsys.readouterr().out
    assert losses(tmp_path / "cut") == losses(here / "whole")


@pytest.mark.long
def test_two_processes_train_it_and_resume_to_the_bit(work):
    launch = ["launch", "local", "--nprocs", 2, "--devices-per-proc", 2, "--"]
    result = run(*launch, *words("two"), cwd=work)
    assert result.returncode == 0, result.stdout + result.stderr
    check_whole(work / "two")
    cut(work / "two", work / "cut")
    again = run(*launch, *words("cut", "--resume"), cwd=work)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming after step 3 of 6" in again.stdout
    assert losses(work / "cut") == losses(work / "two")


def test_it_is_evaluated(here, capsys, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda *_: [])
    assert main(["eval", "whole", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["difference"], found["val_accuracy"]) == (0, rows(here / "whole")[6]["val_accuracy"])
    assert {(row["perplexity"], row["bits_per_byte"]) for row in found["data"]} == {(None, None)}
    assert "eval_iters is 1" in found["notes"][0]
    assert main(["eval", "whole"]) == 0
    table = capsys.readouterr().out
    assert re.search(rf"val_accuracy +{found['val_accuracy']:.6f}\n", table)
    assert re.search(r"held out +[0-9.]+ +- +- ", table), "no perplexity"
    assert main(["eval", "whole@3,6"]) == 0
    assert "val_accuracy" in capsys.readouterr().out
    assert main(["report", "whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["scalars"] == {"val_accuracy": found["val_accuracy"]}
    assert main(["report", "whole"]) == 0
    assert re.search(r"val_accuracy +0\.", capsys.readouterr().out)


def test_it_is_loaded_with_what_it_was_trained_with(here):
    made = load_run("whole@3")
    assert (made.step, made.config.model, type(made.model).__name__) == (3, "netpkg.net:build", "Recurrent")
    assert made.tokenizer.decode(made.tokenizer.encode("import x")) == "import x"
    assert made.model(np.ones((1, 5), np.int32)).shape == (1, 5, made.config.vocab_size)
    with pytest.raises(UserError, match=r"is no Transformer: load it with roxxel_dist.load_run\('whole'\).model"):
        Transformer.from_pretrained("whole")
    with pytest.raises(FrozenInstanceError):
        made.step = 4


def test_it_generates(here, capsys):
    assert main(["generate", "whole", "--prompt", "import", "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("import")


def test_one_that_names_the_axes_of_a_mesh_goes_the_same_way_everywhere(here, tmp_path, capsys):
    run = str(tmp_path / "placed")
    placed = ["--model", "own_model:build_placed", "--n_devices", "2", "--log_every", "1"]
    assert main([*map(str, [*TRAIN, run, *SIX]), *placed]) == 0
    capsys.readouterr()
    assert main(["eval", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == 0
    assert main(["generate", run, "--prompt", "import", "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("import")
    assert main(["audit", run, "--steps", "5:5", "--dump", str(tmp_path / "dump")]) == 0
    dumped = float(np.load(tmp_path / "dump" / "step-5.npz")["loss"])
    assert dumped == pytest.approx(rows(tmp_path / "placed")[5]["train_loss"], rel=1e-5)


@pytest.mark.long
def test_one_that_cannot_generate_trains_and_says_so(corpus, tmp_path):
    fields = {"model": "own_model:build_pooled", "loss": "own_model:pooled_loss", "dim": 7, "max_context": 16}
    made = build_components(Config(**fields, batch_size=8), corpus)
    model = nnx.jit(made.build)()
    assert nnx.jit(made.loss)(model, corpus.read(np.arange(2) * 17, 17)).shape == ()
    with pytest.raises(
        ValueError, match=r"a model takes int32\[1, L\] tokens alone .* for L = 16 it returns \(1, 500\)"
    ):
        check_continues(model, made.config)
    check_continues(nnx.jit(model_builder(Config(model="own_model:build", vocab_size=500)))(), made.config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "own_model"}, "model is 'own_model': it must be \"module:function\", such as"),
        ({"model": "own_model.nets:build"}, "there is no module 'own_model.nets'. Start in the folder that has it"),
        ({"model": "own_models:build"}, "model is 'own_models:build': there is no module 'own_models'. Start in"),
        ({"loss": "own_model:lost"}, "own_model.py has no 'lost'. Write the name of a function that it defines"),
        ({"model": "own_model:NUMBER"}, "that is a int. Write the name of a function"),
        ({"model": "own_model:no_module"}, "must return an nnx.Module"),
        (
            {"model": "own_model:build", "model_args": {"depth": 0}},
            "depth is 0: it must be at least 1 (.*own_model.py, line",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(corpus, tmp_path, fields, message):
    config = Config(**{"max_context": 16, "batch_size": 8, **fields})
    with pytest.raises(UserError, match=message.replace("(", "[(]")):
        Experiment(config).fit(corpus.filepath, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_wrong_loss_leaves_nothing_behind(corpus, tmp_path):
    """Found while it is traced, before a folder is written that would be in the way of the next try."""
    own = {"model": "own_model:build", "max_context": 16, "batch_size": 8}
    with pytest.raises(UserError, match=r"the loss function returned an array of shape .*: take its mean"):
        Experiment(Config(**own, loss="own_model:loss_of_each")).fit(corpus.filepath, tmp_path / "new")
    with pytest.raises(TypeError, match="loss_of_nothing"):  # the program's, with its traceback
        Experiment(Config(**own, loss="own_model:loss_of_nothing")).fit(corpus.filepath, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_wrong_names_are_told_before_the_text_is_tokenized(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three. " * 1000)
    for fields, message in (
        ({"model": "own_models:build"}, "there is no module 'own_models'"),
        ({"loss": "own_model:lost"}, "own_model.py has no 'lost'"),
        ({"datasets": {"code": str(tmp_path / "none")}}, "datasets 'code' is .*none: there are no shards"),
        ({"validation": {"code": str(tmp_path / "none")}}, "validation 'code' is .*none: there are no shards"),
    ):
        with pytest.raises(UserError, match=message):
            Experiment(Config(**fields)).fit(tmp_path / "text.txt", tmp_path / "new")
        assert not (tmp_path / "new").exists()
    assert "encoding" not in capsys.readouterr().err


def test_a_wrong_name_on_the_command_line_is_one_line(here, capsys):
    assert main([str(word) for word in [*TRAIN, "new", "--model", "netpkg.nets:build"]]) == 2
    said = capsys.readouterr().err
    assert "roxxel-dist: model is 'netpkg.nets:build': there is no module 'netpkg.nets'" in said
    assert "Traceback" not in said
    assert not (here / "new").exists()


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Family:\n    @staticmethod\n    def build(config, rngs): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert import_function("model", "only_here:Family.build").__name__ == "build"


@pytest.mark.long
def test_another_shape_is_refused_on_resume_and_other_arguments_are_told(here, tmp_path, capsys):
    shutil.copytree(here / "whole", tmp_path / "more")
    resume = ["train", "--run_dir", str(tmp_path / "more"), "--resume", "--max_steps", "7", "--fsdp", "True"]
    assert main([*resume, "--model_args.width", "16"]) == 2
    assert "is of another model" in capsys.readouterr().err
    assert main([*resume, "--model", "netpkg.net:build_pooled"]) == 2
    said = capsys.readouterr().err
    assert "model is netpkg.net:build_pooled, and the run to resume has netpkg.net:build" in said
    assert main([*resume, "--model_args.dropout", "0.3"]) == 0
    said = capsys.readouterr().out
    assert "changed since the run began: model_args {'width': 64} -> {'width': 64, 'dropout': 0.3}" in said


def test_arguments_are_typed_as_in_yaml_and_win_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: 'a.b:c'\nmodel_args: {depth: 2, rate: 5e-4, inner: {kind: gru, size: 3}}\n")
    words = ["--model_args.depth", "24", "--model_args.tied=false", "--model_args.inner.size", "4"]
    _, config = parse_train(["--config", str(path), *words, "--model-args.sizes", "[1, 2e3]"])
    assert config.model_args == {
        "depth": 24, "rate": 5e-4, "tied": False, "inner": {"kind": "gru", "size": 4}, "sizes": [1, 2e3],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"model_args[.]depth has no value"):
        parse_train(["--model_args.depth"])


def test_a_build_has_a_config_of_its_own():
    config = Config(model="own_model:build", vocab_size=50, model_args={"depth": 2})
    one = model_builder(config)()
    assert len(one.layers) == 2
    assert config.model_args == {"depth": 2}


def test_what_a_module_itself_lacks_is_no_wrong_path(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        import_function("model", "lacking:build")
