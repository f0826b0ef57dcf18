"""The feed-forward layer, plain and gated, against numpy in float64."""

import math

import jax
import numpy as np
import pytest
from flax import nnx
from models import with_numbers

from roxxel_dist.model.config import ACTIVATIONS, ModelConfig
from roxxel_dist.model.mlp import FeedForward, activation

BENDS = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu": lambda v: v * (1 + np.vectorize(math.erf)(v / np.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))) / 2,
    "relu": lambda v: np.maximum(v, 0),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
    "tanh": np.tanh,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_against_plain_numpy(name, gated):
    config = ModelConfig(dim=16, use_swiglu=gated, activation=name)
    layer = with_numbers(lambda: FeedForward(config, nnx.Rngs(0)))
    first = layer.gate_up
    x = np.random.default_rng(1).normal(size=(2, 7, 16)).astype(np.float32)
    inner = np.einsum("bld,dpf->pblf", np.asarray(x, np.float64), np.asarray(first.kernel[...], np.float64))
    inner = BENDS[name](inner[0]) * (inner[1] if gated else 1)
    expected = inner @ np.asarray(layer.down.kernel[...], np.float64)
    y, balance = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())
    assert float(balance.loss) == 0


def test_gated_or_plain_it_has_about_the_same_parameters():
    configs = [ModelConfig(dim=96, use_swiglu=gated) for gated in (True, False)]
    layers = [nnx.eval_shape(lambda config=config: FeedForward(config, nnx.Rngs(0))) for config in configs]
    sizes = [sum(p.size for p in jax.tree.leaves(nnx.state(layer))) for layer in layers]
    assert sizes[1] == 2 * 4 * 96 * 96
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_one_function_is_one_object():
    """Programs are compiled for it: two layers alike must not be two programs."""
    assert activation("silu", gated=True) is activation("silu", gated=True)


def test_another_activation_is_refused():
    with pytest.raises(ValueError, match=r"activation is 'swish': it must be one of silu, gelu, .*sigmoid"):
        ModelConfig(activation="swish")
