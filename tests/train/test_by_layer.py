"""A stack of layers is trained as the layers apart are, by every optimizer."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import Matrix, split_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.training import OPTIMIZERS, OptimizerConfig
from roxxel_dist.train.step.average import inner_state
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer

LAYERS = 2
SHAPES = {
    "embedding.embedding": (9, 130),
    **{f"blocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in (
        ("up.kernel", (130, 140)), ("narrow.kernel", (2, 6)), ("norm.scale", (130,)), ("experts", (2, 6, 4)),
    )},
    "norm.scale": (130,),
}  # fmt: skip
STACKED = {"up.kernel": (130, 2, 7, 10), "narrow.kernel": (2, 6), "norm.scale": (130,), "experts": (2, 6, 2, 2)}
"""What a layer has, its columns along several axes."""
MATRICES = {f"blocks.{name}": Matrix(stacked=1) for name in STACKED} | {
    "blocks.up.kernel": Matrix(stacked=1, columns=3),
    "blocks.experts": Matrix(stacked=1, columns=2),
}


def stacked(params):
    layers = {
        f"blocks.{name}": np.stack([params[f"blocks.{i}.{name}"].reshape(shape) for i in range(LAYERS)])
        for name, shape in STACKED.items()
    }
    return {name: leaf for name, leaf in params.items() if not name.startswith("blocks.")} | layers


STEPS = 3


def arrays(seed):
    rng = np.random.default_rng(seed)
    # Layers of different sizes: a norm of all of them together would be another one.
    return {
        name: rng.standard_normal(shape, np.float32) * (1 + i % 5) for i, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize(
    "name",
    [name if name in ("adafactor", "muon") else pytest.param(name, marks=pytest.mark.long) for name in OPTIMIZERS],
)
def test_layers_are_treated_apart(name):
    config = OptimizerConfig(
        optimizer=name, lr_schedule="constant", lr=1e-2, warmup_steps=0, weight_decay=0.1, grad_clip=1.0
    )

    def train(convert, optimizer):
        numbers = optimizer.settings(10)
        params = convert(arrays(0))
        state = inner_state(jax.jit(InitialState(optimizer))(params))

        @jax.jit
        def step(params, state, gradients, number):
            updates, state = optimizer.build(numbers, number).update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(STEPS):
            params, state = step(params, state, convert(arrays(1 + number)), number)
        return params

    expected = train(dict, NamedOptimizer(config))
    found = train(stacked, NamedOptimizer(config, matrices=MATRICES))
    assert found["blocks.up.kernel"].shape == (LAYERS, 130, 2, 7, 10)
    for key, leaf in stacked({name: np.asarray(leaf) for name, leaf in expected.items()}).items():
        np.testing.assert_allclose(found[key], leaf, rtol=2e-5, atol=2e-6, err_msg=key)
        assert not np.allclose(leaf, stacked(arrays(0))[key], atol=1e-4)


def test_a_transformer_says_how_its_arrays_are_seen():
    shape = ModelConfig(dim=32, num_blocks=2, vocab_size=40, head_size=8, kv_heads=2, use_moe=True)
    matrices = split_module(nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0))))[0].params.matrices
    assert matrices["blocks.attention.qkv.kernel"] == Matrix(stacked=1, columns=3)
    assert matrices["blocks.feedforward.gate_up"] == Matrix(stacked=2, columns=2)
    assert matrices["blocks.feedforward.down"] == Matrix(stacked=2)
    assert matrices["blocks.attention_norm.scale"] == matrices["blocks.feedforward.router.kernel"] == Matrix(stacked=1)
    assert "embedding.embedding" not in matrices
