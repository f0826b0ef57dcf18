"""What a model's parameters are spent on."""

from dataclasses import replace

import jax
import numpy as np
from flax import nnx
from own_model import Recurrent

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.split import count_by_module, split_module
from roxxel_dist.model.transformer import Transformer


def parameters(build):
    return count_by_module(jax.eval_shape(lambda: split_module(build(nnx.Rngs(0)))[1]))


def test_the_built_in_model():
    """Told from shapes alone, and counted by hand."""
    shape = ModelConfig(dim=32, num_blocks=3, vocab_size=50, kv_heads=2, weight_tying=False)
    parts = parameters(lambda rngs: Transformer(shape, rngs))
    assert set(parts) == {"embedding", "blocks", "norm", "head"}
    assert (parts["embedding"], parts["norm"], parts["head"]) == (50 * 32, 32, 50 * 32)
    whole = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0))), nnx.Param))
    assert sum(parts.values()) == sum(leaf.size for leaf in whole)
    one = parameters(lambda rngs: Transformer(replace(shape, num_blocks=1), rngs))
    assert parts["blocks"] == 3 * one["blocks"]


def test_a_model_of_ones_own():
    parts = parameters(lambda rngs: Recurrent(20, 8, 2, 0.0, rngs))
    assert set(parts) == {"embedding", "layers", "out"}
    assert (parts["embedding"], parts["out"]) == (20 * 8, 8 * 20 + 20)


def test_arrays_without_a_module():
    assert count_by_module({"w": np.zeros((2, 3)), "b.0": np.zeros(3), "b.1": np.zeros(1), "w.x": np.zeros(())}) == {
        "w": 7,
        "b": 4,
    }
