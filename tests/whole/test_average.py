"""A run that keeps an average of its parameters, through everything that reads its weights."""

import hashlib
import json
import shutil

import jax
import numpy as np
import pytest
from corpora import write_corpus

from roxxel_dist import Config, Experiment, Roxxel
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate.estimate import estimate
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.evaluate import evaluate
from roxxel_dist.weights.export import export_run
from roxxel_dist.weights.files import read_model
from roxxel_dist.weights.load import weights_of

SMALL = {
    "model": "runs:build", "dim": 16, "max_context": 16, "batch_size": 8, "max_steps": 6, "lr": 1e-2,
    "log_every": 1, "eval_every": 3, "eval_iters": 1, "checkpoint_every": 3, "memory_checkpoint_every": 0,
    "max_to_keep": None, "n_devices": 1, "wandb": "off", "sample": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def fit(data, path, *, of=None, resume=False, fork=None, **fields):
    Experiment(Config(**{**SMALL, **fields})).fit(data, path, resume=resume, fork=fork)
    return path


@pytest.fixture(scope="module")
def averaged(data, tmp_path_factory):
    """A run of 6 steps with an average, and checkpoints of the steps 1, 3 and 6."""
    return fit(data, tmp_path_factory.mktemp("with") / "run", ema=0.9)


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """The same without."""
    return fit(data, tmp_path_factory.mktemp("without") / "run")


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def stored(run, step, kind="params"):
    """Parameters, or their average, as the checkpoint has them."""
    like = {"params": weights_of(run, step=step).params}
    store = CheckpointReader(run / "checkpoints")
    try:
        read = store.restore_evaluated if kind == "average" else store.restore_model
        return {
            name: np.asarray(leaf) for name, leaf in read(step, jax.tree.map(jax.numpy.asarray, like))["params"].items()
        }
    finally:
        store.close()


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_all_that_reads_weights_reads_the_average(averaged, plain, tmp_path):
    average, params = stored(averaged, 6, "average"), stored(averaged, 6)
    assert not equal(average, params)
    assert equal(params, stored(plain, 6)), "training does not read it"
    found = {
        "weights_of": weights_of(averaged).params,
        "the file of the run": read_model(averaged / "model_weights.msgpack")[0],
    }
    export_run(averaged, "safetensors", tmp_path / "export")
    found["an export"] = weights_of(tmp_path / "export").params
    assert [name for name, weights in found.items() if not equal(weights, average)] == []
    assert evaluate(averaged).difference == 0


def test_a_new_run_begins_with_it(data, averaged, tmp_path):
    begun = fit(data, tmp_path / "new", init_from=str(averaged), lr=1e-30, max_steps=1, weight_decay=0.0)
    average = stored(averaged, 6, "average")
    assert all(np.allclose(leaf, average[name], atol=1e-7) for name, leaf in stored(begun, 1).items())


@pytest.mark.long
def test_a_fork_goes_on_with_it_or_begins_one(data, averaged, plain, tmp_path):
    same = fit(data, tmp_path / "same", fork=f"{averaged}@3", ema=0.9)
    assert [row["val_loss"] for row in rows(same)[-1:]] == [row["val_loss"] for row in rows(averaged)[-1:]]
    assert equal(stored(same, 6, "average"), stored(averaged, 6, "average"))
    begun = fit(data, tmp_path / "begun", fork=f"{plain}@3", ema=0.9, max_steps=4, checkpoint_every=1)
    before, after = stored(plain, 3), stored(begun, 4)
    share = (1 - 0.9) / (1 - 0.9**4)
    for name, leaf in stored(begun, 4, "average").items():
        np.testing.assert_allclose(leaf, before[name] + (after[name] - before[name]) * share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (
            "averaged",
            {"ema": 0.0},
            r"ema is 0.0, and the run to resume has 0.9: a resume cannot begin or end",
        ),
        ("plain", {"ema": 0.9}, r"ema is 0.9, and the run to resume has 0.0: .* begin one in a fork"),
    ],
)
def test_a_resume_neither_begins_nor_ends_one(data, tmp_path, request, source, fields, message):
    shutil.copytree(request.getfixturevalue(source), tmp_path / "run")
    with pytest.raises(UserError, match=message):
        fit(data, tmp_path / "run", resume=True, max_steps=8, **fields)


@pytest.mark.long
def test_a_resume_may_change_its_decay_and_a_fork_cannot_end_it(data, averaged, tmp_path):
    shutil.copytree(averaged, tmp_path / "run")
    fit(data, tmp_path / "run", resume=True, max_steps=7, ema=0.5)
    assert "ema 0.9 -> 0.5" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    with pytest.raises(UserError, match=r"ema is 0.0, and .*@3 has 0.9"):
        fit(data, tmp_path / "fork", fork=f"{averaged}@3", ema=0.0)


@pytest.mark.long
def test_with_virtual_shards_it_has_the_same_bits_on_any_devices(data, tmp_path, monkeypatch):
    jax.devices()  # which are there before a run would choose the size of a pool
    monkeypatch.setenv("PJRT_NPROC", "16")
    fields = {"ema": 0.9, "virtual_shards": 4, "on_bad_step": "skip"}
    one = fit(data, tmp_path / "one", **fields)
    two = fit(data, tmp_path / "two", **fields, n_devices=2, max_steps=3)
    fit(data, two, **fields, n_devices=1, resume=True)
    names = ("step", "train_loss", "val_loss", "digest")
    assert [[row[n] for n in names if n in row] for row in rows(one)] == [
        [row[n] for n in names if n in row] for row in rows(two)
    ]
    hashes = [hashlib.sha256((run / "model_weights.msgpack").read_bytes()).hexdigest() for run in (one, two)]
    assert hashes[0] == hashes[1]


@pytest.mark.long
def test_a_plan_counts_it(data):
    with Roxxel(data):
        with_one, without = (estimate(Config(**SMALL, ema=ema), data, EstimateRequest()) for ema in (0.9, 0.0))
    assert with_one.state == {**without.state, "average": without.state["parameters"], "other": with_one.state["other"]}
    more = with_one.phases[0].memory.arguments - without.phases[0].memory.arguments
    assert more == pytest.approx(without.state["parameters"], abs=8)
