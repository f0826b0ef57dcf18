import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from roxxel_dist.model.layers import Dropout, DynamicScalar


@nnx.jit
def run(layer, x):
    return layer(x)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_it_is_nnx_dropout(rate):
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

    @jax.jit
    def of_each(x):
        ours, theirs = (layer(rate, rngs=nnx.Rngs(dropout=3)) for layer in (Dropout, nnx.Dropout))
        return [(ours(x), theirs(x)) for _ in range(2)]

    for ours, theirs in of_each(x):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_evaluation_drops_nothing_and_draws_nothing():
    layer, x = Dropout(0.5, rngs=nnx.Rngs(dropout=0)), np.ones((8, 8), np.float32)
    layer.eval()
    assert np.array_equal(layer(x), x)
    assert int(layer.rngs.count[...]) == 0
    layer.train()
    one, other = nnx.jit(lambda layer, x: (layer(x), layer(x)))(layer, x)
    assert not np.array_equal(one, other)


def test_bfloat16_keeps_its_type_and_its_mean():
    x = np.ones((512, 512), jnp.bfloat16)
    out = np.asarray(run(Dropout(0.1, rngs=nnx.Rngs(dropout=0)), x))
    assert out.dtype == jnp.bfloat16
    assert float(out.max()) == float(jnp.bfloat16(1 / 0.9))
    assert float(out.astype(np.float32).mean()) == pytest.approx(1, abs=0.01)


def test_a_rate_of_nothing_loses_nothing():
    assert np.array_equal(run(Dropout(0.0, rngs=nnx.Rngs(dropout=0)), np.ones(9, np.float32)), np.ones(9))


def test_a_setting_is_one_number():
    assert DynamicScalar(1).get_value().dtype == jnp.float32
    with pytest.raises(ValueError, match=r"a DynamicScalar is one number, and this has the shape \(2,\)"):
        DynamicScalar(jnp.ones(2))
