"""Schedule-free AdamW: optax's, and what reads its average."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpora import write_corpus

from roxxel_dist import Config, Experiment
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.estimate.estimate import estimate
from roxxel_dist.run.estimate.figures import EstimateRequest
from roxxel_dist.run.evaluate import evaluate
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.average import schedule_free_average
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.weights.files import read_model
from roxxel_dist.weights.load import weights_of

FREE = {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"}
SMALL = FREE | {
    "dim": 16, "num_blocks": 1, "n_heads": 2, "max_context": 16, "batch_size": 8, "max_steps": 6, "lr": 1e-2,
    "warmup_steps": 2, "log_every": 1, "eval_every": 3, "eval_iters": 1, "checkpoint_every": 3,
    "memory_checkpoint_every": 0, "n_devices": 1, "wandb": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def fit(data, path, resume=False, **fields):
    Experiment(Config(**{**SMALL, **fields})).fit(data, path, resume=resume)
    names = ("step", "train_loss", "val_loss", "lr", "digest")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [[row.get(name) for name in names] for row in rows]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_that_of_optax(decay):
    """All arrays here are decayed, as optax's own has no mask."""
    config = OptimizerConfig(**FREE, lr=0.03, weight_decay=decay, warmup_steps=0, grad_clip=0.0)
    ours, theirs = NamedOptimizer(config), optax.contrib.schedule_free_adamw(0.03, weight_decay=decay)
    numbers, begun = ours.settings(10), {"a.kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}

    @jax.jit
    def four_steps():
        params = mine = begun
        state, own = theirs.init(params), ours.build(numbers, 0).init(params)
        for step in range(4):
            grads = {"a.kernel": jnp.cos(params["a.kernel"] + step)}
            updates, state = theirs.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            updates, own = ours.build(numbers, step).update(grads, own, mine)
            mine = optax.apply_updates(mine, updates)
        return mine, params, schedule_free_average(own, mine), optax.contrib.schedule_free_eval_params(state, params)

    mine, params, average, expected = (tree["a.kernel"] for tree in four_steps())
    np.testing.assert_allclose(mine, params, rtol=1e-5)
    np.testing.assert_allclose(average, expected, rtol=1e-5)
    assert schedule_free_average(jax.eval_shape(optax.adam(1e-3).init, begun), begun) is None


def test_its_average_is_evaluated_written_and_resumed(data, tmp_path):
    own = {"model": "runs:build"}
    whole = fit(data, tmp_path / "run", **own)
    assert evaluate(tmp_path / "run").difference == 0
    average, written = weights_of(tmp_path / "run").params, read_model(tmp_path / "run" / "model_weights.msgpack")[0]
    assert all(np.array_equal(leaf, written[name]) for name, leaf in average.items())
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "6")
    (tmp_path / "cut" / "training_cursor.json").unlink()
    assert fit(data, tmp_path / "cut", resume=True, **own) == whole


@pytest.mark.long
def test_an_own_one_that_is_schedule_free_is_evaluated_alike(data, tmp_path):
    fit(data, tmp_path / "run", optimizer="own_optimizer:schedule_free_sgd")
    assert evaluate(tmp_path / "run").difference == 0
    found = estimate(Config(**SMALL), data, EstimateRequest())
    assert found.state["average"] == found.state["parameters"]


@pytest.mark.long
def test_with_virtual_shards_it_has_the_same_bits_on_any_devices(data, tmp_path, monkeypatch):
    jax.devices()  # which are there before a run would choose the size of a pool
    monkeypatch.setenv("PJRT_NPROC", "16")
    one, two = (fit(data, tmp_path / str(n), n_devices=n, virtual_shards=4, max_steps=4) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_schedule": "cosine"}, "lr_schedule is cosine, and optimizer is schedule_free_adamw, .* to constant"),
        ({"beta1": 0.0}, "beta1 is 0, and optimizer is schedule_free_adamw: it must be above 0"),
        ({"ema": 0.9}, "ema is set, and the optimizer is schedule-free: .* leave ema out"),
        ({"use_bf16": True}, "use_bf16 is true, and the optimizer is schedule-free: .* bf16_compute"),
        ({"parametrization": "mup", "base_dim": 8}, "parametrization is mup, and optimizer is schedule_free_adamw"),
    ],
)
def test_what_does_not_go_with_it_is_named(data, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        fit(data, tmp_path / "new", **fields)
    assert not (tmp_path / "new").exists()
