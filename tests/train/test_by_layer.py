"""A stack of layers is trained as the layers apart are, by every optimizer."""

from typing import get_args, get_type_hints

import jax
import numpy as np
import optax
import pytest

from roxxel_dist.model.scan_layers import stacked, unstacked
from roxxel_dist.train.config import OptimizerConfig
from roxxel_dist.train.optimizer import NamedOptimizer, first_state

SHAPES = {
    "embedding.embedding": (9, 130),
    **{f"blocks.{i}.{name}": shape for i in range(3) for name, shape in (
        ("up.kernel", (130, 140)), ("narrow.kernel", (2, 6)), ("norm.scale", (130,)), ("experts", (2, 6, 4)),
    )},
    "norm.scale": (130,),
}  # fmt: skip
STEPS = 3


def arrays(seed):
    rng = np.random.default_rng(seed)
    # Layers of different sizes: a norm of all of them together would be another one.
    return {
        name: rng.standard_normal(shape, np.float32) * (1 + i % 5) for i, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adafactor", "muon") else pytest.param(name, marks=pytest.mark.long)
        for name in get_args(get_type_hints(OptimizerConfig)["optimizer"])
    ],
)
def test_layers_are_treated_apart(name):
    config = OptimizerConfig(optimizer=name, lr=1e-2, warmup_steps=0, weight_decay=0.1, grad_clip=1.0)

    def train(convert, optimizer):
        numbers = optimizer.settings(10)
        params = convert(arrays(0))
        state = jax.jit(first_state(optimizer))(params)

        @jax.jit
        def step(params, state, gradients, number):
            updates, state = optimizer.build(numbers, number).update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(STEPS):
            params, state = step(params, state, convert(arrays(1 + number)), number)
        return params

    expected = train(dict, NamedOptimizer(config))
    found = train(stacked, NamedOptimizer(config, stacked=True))
    assert found["blocks.up.kernel"].shape == (3, 130, 140)
    for key, leaf in unstacked(found).items():
        np.testing.assert_allclose(leaf, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)
        assert not np.allclose(leaf, arrays(0)[key], atol=1e-4)
