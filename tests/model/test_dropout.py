import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from roxxel_dist.model.layers import Dropout, DynamicScalar


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_it_is_nnx_dropout(rate):
    x = jax.random.normal(jax.random.key(0), (64, 64))
    ours, theirs = (layer(rate, rngs=nnx.Rngs(dropout=3)) for layer in (Dropout, nnx.Dropout))
    for _ in range(2):
        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6)


def test_evaluation_drops_nothing_and_draws_nothing():
    layer, x = Dropout(0.5, rngs=nnx.Rngs(dropout=0)), jnp.ones((8, 8))
    layer.eval()
    assert np.array_equal(layer(x), x)
    assert int(layer.rngs.count[...]) == 0
    layer.train()
    assert not np.array_equal(layer(x), layer(x))


def test_bfloat16_keeps_its_type_and_its_mean():
    x = jnp.ones((512, 512), jnp.bfloat16)
    out = Dropout(0.1, rngs=nnx.Rngs(dropout=0))(x)
    assert out.dtype == jnp.bfloat16
    assert float(out.max()) == float(jnp.bfloat16(1 / 0.9))
    assert float(out.astype(jnp.float32).mean()) == pytest.approx(1, abs=0.01)


def test_a_rate_of_nothing_loses_nothing():
    assert np.array_equal(Dropout(0.0, rngs=nnx.Rngs(dropout=0))(jnp.ones(9)), jnp.ones(9))


def test_a_setting_is_one_number():
    assert DynamicScalar(1).get_value().dtype == jnp.float32
    with pytest.raises(ValueError, match=r"a DynamicScalar is one number, and this has the shape \(2,\)"):
        DynamicScalar(jnp.ones(2))
