"""Fine-tuning with adapters: from a trained run to one that stands on it, through every command that reads one."""

import hashlib
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import launched, make_corpus, rows, run
from flax import nnx

from roxxel_dist import Config, Experiment, Trainer
from roxxel_dist.checkpoint.metadata import BaseModelRef, CheckpointRef, read_cursor
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cli import main
from roxxel_dist.cluster.parameter_sharding import FSDP_MIN_SIZE
from roxxel_dist.lora import merge_adapters
from roxxel_dist.model.split import split_module
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run import components as assemble
from roxxel_dist.run.metadata import saved_config
from roxxel_dist.run.record import check_resumable
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.weights.base import add_base, check_base, fingerprint
from roxxel_dist.weights.load import load_run

pytestmark = pytest.mark.xdist_group("lora")  # one base for all
SMALL = {
    "dim": 32, "num_blocks": 1, "head_size": 8, "max_context": 16, "batch_size": 16, "eval_iters": 4, "log_every": 1,
    "eval_every": 8, "checkpoint_every": 4, "tokenizer_type": "byte", "val_fraction": 0.1, "lr": 1e-2, "n_devices": 1,
    "max_to_keep": None, "sample": "off",
}  # fmt: skip
FIRST = "".join(f"{i} plus {i} is {2 * i}.\n" for i in range(3000))
SECOND = "".join(f"({2 * i} - {i} = {i})\n" for i in range(3000))


def contents(path):
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.rglob("*") if file.is_file()}


def tuned(base, **fields):
    config = Config.from_yaml(base / "config.yaml")
    config.use_lora, config.lora_rank, config.lora_targets = True, 4, "all"
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Two texts, a base trained on the first, and a fine-tune of 16 steps on the second."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "first.txt").write_text(FIRST)
    (folder / "second.txt").write_text(SECOND)
    Trainer(Config(**SMALL | {"checkpoint_every": 36}, max_steps=40)).fit(folder / "first.txt", folder / "base")
    before = contents(folder / "base")
    Trainer(tuned(folder / "base", max_steps=16, checkpoint_every=4)).fit(folder / "second.txt", folder / "tuned")
    assert contents(folder / "base") == before, "it is only read"
    return folder


def test_a_fine_tune_starts_from_the_base_and_gets_better(work):
    found, base = rows(work / "tuned"), rows(work / "base")
    assert found[1]["train_loss"] > base[40]["train_loss"] + 0.2  # other text
    assert found[16]["val_loss"] < found[1]["val_loss"] - 0.3
    log = (work / "tuned" / "logs" / "rank-0.log").read_text()
    assert f"init_from is {work / 'base'}: the config is that run's, with use_lora turned on" in log
    assert f"adapters are trained for the weights of {work / 'base'}@40, which stay as they are" in log
    assert (work / "tuned" / "tokenizer.json").read_bytes() == (work / "base" / "tokenizer.json").read_bytes()


def test_what_is_written_down(work):
    record = load_yaml(work / "tuned" / "config.yaml")["record"]["initialized_from"]
    assert (record["run"], record["step"]) == (str(work / "base"), 40)
    assert record["fingerprint"].startswith("digests:")
    meta = json.loads((work / "tuned" / "checkpoints" / "16" / "meta.json").read_text())
    names = [name for name in meta["shapes"] if name.startswith("params/")]
    assert len(names) == 8
    assert all(".lora_" in name for name in names)
    summary = json.loads((work / "tuned" / "model_summary.json").read_text())
    trained, of_all = summary["trainable_parameters"], summary["parameters"]
    assert of_all == json.loads((work / "base" / "model_summary.json").read_text())["parameters"] + trained
    log = (work / "tuned" / "logs" / "rank-0.log").read_text()
    assert f"model: {of_all:,} parameters ({trained:,} of them trained, {trained / of_all:.2%})" in log


def test_it_is_evaluated_loaded_and_merged(work, capsys):
    assert main(["eval", str(work / "tuned"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == rows(work / "tuned")[16]["val_loss"]
    tuned, plain = load_run(work / "tuned"), load_run(work / "base").model
    model = tuned.model
    assert tuned.step == 16
    parts, params, _, frozen = split_module(model)
    base, weights, rest, settings = split_module(plain)
    for name, array in weights.items():
        np.testing.assert_array_equal(frozen[name], array)
    merged = base.merge(merge_adapters(frozen | params, parts.scales), rest, settings, training=False)
    logits, tokens = nnx.jit(lambda model, tokens: model(tokens)), jnp.arange(48).reshape(3, 16) + 40
    np.testing.assert_allclose(logits(merged, tokens), logits(model, tokens), atol=1e-5)
    assert np.abs(logits(plain, tokens) - logits(model, tokens)).max() > 0.1


def test_a_resumed_one_is_the_same(work, tmp_path):
    shutil.copytree(work / "tuned", tmp_path / "run")
    for step in (12, 16):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    (tmp_path / "run" / "training_cursor.json").unlink()
    Experiment(Config.from_yaml(tmp_path / "run" / "config.yaml")).fit(run_dir=tmp_path / "run", resume=True)
    assert "resuming after step 8 of 16" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    for step in range(9, 17):
        assert rows(tmp_path / "run")[step]["train_loss"] == rows(work / "tuned")[step]["train_loss"]


@pytest.mark.long
def test_a_fork(work, tmp_path):
    config = Config.from_yaml(work / "tuned" / "config.yaml")
    run = Experiment(config).fit(run_dir=tmp_path / "fork", fork=f"{work / 'tuned'}@12")
    assert rows(run)[16]["train_loss"] == rows(work / "tuned")[16]["train_loss"]
    assert load_yaml(run / "config.yaml")["record"]["initialized_from"]["run"] == str(work / "base")


@pytest.mark.long
def test_a_base_that_was_moved_or_changed(work, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(work / "tuned", run)
    config = Config.from_yaml(run / "config.yaml")
    config.max_steps = 17
    (work / "base").rename(tmp_path / "moved")
    try:
        with pytest.raises(
            UserError,
            match=r"of the adapters are missing: init_from is \S*: \S*base has no checkpoint.*init_from=NEW_",
        ):
            Experiment(config).fit(run_dir=run, resume=True)
        assert main(["eval", str(run)]) == 2
        assert "are missing" in capsys.readouterr().err
        config.max_steps, config.init_from = 16, str(tmp_path / "moved")
        Experiment(config).fit(run_dir=run, resume=True)  # it is finished, and learns it all the same
        assert load_yaml(run / "config.yaml")["record"]["initialized_from"]["run"] == str(tmp_path / "moved")
        assert read_cursor(run)["finished"]
        load_run(run)
        load_run(run, 12)  # which was saved before the base was moved
        shutil.copytree(tmp_path / "moved", tmp_path / "other")
    finally:
        (tmp_path / "moved").rename(work / "base")
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "40")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "36", tmp_path / "other" / "checkpoints" / "40")
    config.init_from = str(tmp_path / "other")
    with pytest.raises(UserError, match=r"base weights of the adapters are missing: .*digests\.json is of step 36"):
        Experiment(config).fit(run_dir=run, resume=True)


def test_a_base_is_known_by_the_digests_of_its_weights(work, tmp_path):
    """Wherever it lies, and though its run goes back to that checkpoint."""
    shutil.copytree(work / "base", tmp_path / "base")
    copy = CheckpointRef(tmp_path / "base", 36)
    before = fingerprint(copy)
    assert before == fingerprint(CheckpointRef(work / "base", 36))
    store = CheckpointStore(tmp_path / "base" / "checkpoints", max_to_keep=None)
    store.delete_later(36, {**store.meta(36), "rewinds": 1})
    store.close()
    assert fingerprint(copy) == before
    check_base(BaseModelRef(*copy, "base", before))
    with pytest.raises(ValueError, match="its weights are not those that the adapters were trained for"):
        check_base(BaseModelRef(work / "base", 40, "base", before))


@pytest.mark.long
def test_a_chain_whose_tree_and_base_were_moved(work, tmp_path, monkeypatch, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    shutil.copytree(work / "base", first / "base")
    monkeypatch.chdir(first)
    for name, base in (("one", "base"), ("two", "one")):
        config = tuned(first / "base", init_from=base, max_steps=1, eval_iters=1)
        Experiment(config).fit(work / "second.txt", name)
        assert Config.from_yaml(first / name / "config.yaml").init_from == str(first / base)
    first.rename(second)
    monkeypatch.chdir(second)
    for name, base in (("one", "base"), ("two", "one")):
        Experiment(tuned(second / name, init_from=base)).fit(run_dir=name, resume=True)  # finished; it is written down
        assert Config.from_yaml(second / name / "config.yaml").init_from == str(second / base)
    (second / "base").rename(second / "moved")
    Experiment(tuned(second / "one", init_from="moved")).fit(run_dir="one", resume=True)
    monkeypatch.chdir(work)
    load_run(second / "two")
    capsys.readouterr()
    assert main(["eval", str(second / "two"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == rows(second / "two")[1]["val_loss"]


def test_where_a_base_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    saved = {"run": str(tmp_path / "there"), "step": 4, "asked": "runs/base", "fingerprint": "f"}
    base = BaseModelRef.from_dict(saved)
    assert base.resolve("runs/base").run == tmp_path / "there", "a relative text of old, from another folder"
    assert base.resolve("other@2").checkpoint == (Path("other"), 2)
    (tmp_path / "there").rmdir()
    assert base.resolve(str(tmp_path / "runs" / "base")).checkpoint == (
        tmp_path / "runs" / "base",
        4,
    )
    config = Config(init_from="runs/base@4")
    config.save_yaml(tmp_path / "config.yaml", {"devices": 1})
    assert check_resumable(saved_config(tmp_path), Experiment(config).config) == []


@pytest.mark.long
def test_adapters_on_adapters_stand_on_the_merged_weights(work, tmp_path):
    config = tuned(work / "base", init_from=str(work / "tuned"), max_steps=2)
    again = Experiment(config).fit(work / "second.txt", tmp_path / "again")
    assert rows(again)[1]["val_loss"] == pytest.approx(rows(work / "tuned")[16]["val_loss"], abs=0.1)
    plain = Config(**SMALL, init_from=str(work / "base"), max_steps=1)
    first = rows(Experiment(plain).fit(work / "second.txt", tmp_path / "plain"))[1]["train_loss"]
    assert first == pytest.approx(rows(work / "tuned")[1]["train_loss"], abs=1e-5), "B is zero at first"
    config = Config(**SMALL, init_from=str(work / "tuned"), max_steps=1, lr_schedule="constant")
    whole = Experiment(config).fit(work / "second.txt", tmp_path / "whole")
    assert rows(whole)[1]["train_loss"] == pytest.approx(rows(again)[1]["train_loss"], abs=1e-4)
    _, params, _, _ = split_module(load_run(again).model)
    assert len(params) == 8


@pytest.mark.long
def test_generate_plan_and_find_lr(work, tmp_path, monkeypatch, capsys):
    assert main(["generate", str(work / "tuned"), "--prompt", "(12 - ", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("(12 - ")
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(work / "base" / "config.yaml"), "--data_path", str(work / "second.txt"), "--use_lora"]
    assert main(["plan", *words, "True", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trainable_parameters"] < 0.25 * told["parameters"]
    assert f"the weights are those of {work / 'base'}@40" in told["notes"]
    assert main(["plan", str(work / "tuned")]) == 0
    assert "trainable" in capsys.readouterr().out
    _, _, losses = Experiment(tuned(work / "base")).find_lr(work / "second.txt", max_lr=1.0, num_steps=30)
    assert losses[0] == pytest.approx(rows(work / "tuned")[1]["train_loss"], abs=0.3)
    assert min(losses) < losses[0] - 0.1


def test_adapters_need_a_base(work, tmp_path):
    with pytest.raises(UserError, match=r"use_lora is True, and init_from names no run: .*init_from=RUN"):
        Trainer(Config(**SMALL, use_lora=True)).fit(work / "second.txt")
    config = Config.from_yaml(work / "tuned" / "config.yaml")  # the same recipe again: the same base
    assert Experiment(config).config.init_from == str(work / "base")
    assert add_base(config)[1].startswith(f"{work / 'tuned'} has adapters itself: its base {work / 'base'} is taken")
    shutil.copy(work / "base" / "config.yaml", tmp_path)  # a copy is of no run
    with pytest.raises(UserError, match="init_from names no run"):
        Experiment(tuned(tmp_path))


def test_text_is_not_read_for_a_base_that_does_not_fit(work, tmp_path, monkeypatch):
    def read(*words, **more):
        raise AssertionError("the text is read")

    monkeypatch.setattr(assemble, "build", read)
    shutil.copy(work / "base" / "tokenizer.json", tmp_path)
    for fields, said in (
        ({"init_from": f"{work / 'base'}@999"}, "has no checkpoint of step 999"),
        ({"init_from": str(tmp_path)}, "has no checkpoint; name"),
        ({"dim": 64}, "is of another model"),
    ):
        for use_lora in (False, True):
            with pytest.raises(UserError, match=said):
                Experiment(
                    tuned(work / "base", **{"init_from": str(work / "base"), "use_lora": use_lora, **fields})
                ).fit(work / "second.txt", tmp_path / "run")
    for fields in ({}, {"scan_layers": True}, {"use_bf16": True}):
        with pytest.raises(AssertionError, match="the text is read"):
            Experiment(tuned(work / "base", **fields)).fit(work / "second.txt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "use_lora"), [("dropout_rate", False), ("dropout_rate", True), ("lora_dropout", True)]
)
def test_dropout_neither_begins_nor_ends_in_a_run(field, use_lora):
    def resumed(before, now, **more):
        saved = Config(use_lora=use_lora, **{field: before, **more}).to_dict()
        return check_resumable(saved, Config(use_lora=use_lora, **{field: now, **more}))

    assert resumed(0.1, 0.2) == [f"{field} 0.1 -> 0.2"]
    for before, now in ((0.0, 0.1), (0.1, 0.0)):
        with pytest.raises(ValueError, match=rf"{field} is {now}, and the run .* has {before}: its checkpoints hold"):
            resumed(before, now)
        assert resumed(before, now, model="mine:Model") == [f"{field} {before} -> {now}"]
    assert check_resumable(Config().to_dict(), Config(lora_dropout=0.1)) == ["lora_dropout 0.0 -> 0.1"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_processes_and_shards_train_the_same(tmp_path):
    make_corpus(tmp_path)
    same = ["--dropout_rate", 0, "--dim", 256, "--head_size", 64, "--num_blocks", 1]  # large enough to be cut
    first = run(*launched(1, 1, "base", *same, "--max_steps", 6), cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    meta = json.loads((tmp_path / "base" / "checkpoints" / "6" / "meta.json").read_text())
    assert max(size[0] * size[1] for size in meta["shapes"].values() if len(size) == 3) >= FSDP_MIN_SIZE
    found = []
    for processes, devices in ((1, 4), (2, 2)):
        name = f"tuned-{processes}"
        more = ["--init_from", "base", "--use_lora", "True", *same, "--max_steps", 4, "--fsdp", "True"]
        result = run(*launched(processes, devices, name, *more), cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        again = run(*launched(processes, devices, name, *more, "--max_steps", 8, "--resume"), cwd=tmp_path)
        assert again.returncode == 0, again.stdout + again.stderr
        found.append([row["train_loss"] for row in rows(tmp_path / name).values()])
    assert found[0] == found[1]
    assert len(found[0]) == 8
