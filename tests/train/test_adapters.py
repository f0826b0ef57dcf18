"""What is trained of a model with adapters, and how the rest lies: states and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import with_numbers
from states import init_state

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.lora import LoRALinear
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.train.step.optimizer import InitialState, as_optimizer
from roxxel_dist.train.step.state import StateBuilder
from roxxel_dist.train.step.step import SPIKE_FACTOR, make_step

SHAPE = ModelConfig(dim=64, num_blocks=1, vocab_size=2048, max_context=16, use_lora=True, lora_rank=2, dropout_rate=0.1)
ADAM = as_optimizer(optax.adam(1e-2))


def transformer():
    return Transformer(SHAPE, nnx.Rngs(0, dropout=1))


class Mine(nnx.Module):
    """A model of the user's own, with one adapter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(30, 8, rngs=rngs)
        self.head = LoRALinear(8, 30, rank=2, use_bias=True, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


@pytest.fixture(scope="module")
def mine():
    return nnx.jit(Mine)()


def place(leaf):
    return leaf.sharding.spec


def test_a_step_changes_the_adapters_alone():
    mesh = make_mesh(2)
    net = with_numbers(transformer, alpha_balance=0.0, rate=0.1)
    parts, state, inputs = init_state(net, InitialState(ADAM), mesh, fsdp=True)
    assert all(".lora_" in name for name in state.params)
    assert len(state.params) == 4
    assert len(parts.frozen.names) == 8
    assert parts.scales == {"blocks.attention.qkv": 8.0, "blocks.attention.out": 8.0}
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.shape]
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in state.params.values()])
    assert place(inputs["embedding.embedding"]) == P(None, "data"), "as the table has it"
    before = jax.device_get((state.params, inputs))
    sharding = NamedSharding(mesh, P("data", None))
    step = make_step(parts, next_token_loss, ADAM, state, sharding, compute_dtype=jnp.bfloat16)
    settings = {**inputs, SPIKE_FACTOR: np.float32(0)}
    batch = jax.device_put(np.random.default_rng(0).integers(0, 2048, (8, 17)).astype(np.int32), sharding)
    losses = []
    for _ in range(4):
        state, metrics = step(state, settings, batch)
        losses.append(float(metrics.scalars["loss"]))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(inputs), before[1])
    assert all(np.any(jax.device_get(leaf) != before[0][name]) for name, leaf in state.params.items())


def test_shapes_are_those_of_the_state(monkeypatch):
    monkeypatch.setattr("roxxel_dist.cluster.parameter_sharding.FSDP_MIN_SIZE", 64)
    mesh = make_mesh(2)
    made = init_state(Mine, InitialState(ADAM), mesh, fsdp=True, dtype=jnp.bfloat16)[1:]
    shapes = StateBuilder.of_model(Mine, InitialState(ADAM), mesh, fsdp=True, dtype=jnp.bfloat16).shapes
    assert any(place(made[1]["embed.embedding"])), "it is cut"
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    weights = {str(leaf.dtype) for name, leaf in made[1].items() if leaf.shape}
    assert weights == {"bfloat16"}


@pytest.mark.parametrize("restored", [False, True])
def test_the_base_is_loaded_for_a_restored_state_too(restored):
    def load(like, state):
        assert not state
        assert all(".lora_" not in name for name in like)
        return {name: jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding) for name, leaf in like.items()}

    _, state, inputs = init_state(Mine, InitialState(ADAM), make_mesh(2), restored=restored, load=load)
    assert all(np.all(jax.device_get(inputs[name]) == 1) for name in ("embed.embedding", "head.kernel", "head.bias"))
    assert isinstance(state.params["head.lora_a"], jax.ShapeDtypeStruct if restored else jax.Array)


@pytest.mark.parametrize("how", ["function", "module"])
def test_a_model_of_ones_own(mine, how):
    parts, state, inputs = init_state(Mine if how == "function" else mine, InitialState(ADAM), make_mesh(2))
    assert set(state.params) == {"head.lora_a", "head.lora_b"}
    assert {"embed.embedding", "head.kernel", "head.bias"} <= set(inputs)
    merged = parts.merge(state.params, state.rest, inputs, training=False)
    logits, tokens = nnx.jit(lambda model, tokens: model(tokens)), np.arange(6)[None]
    np.testing.assert_allclose(logits(merged, tokens), logits(mine, tokens), atol=1e-6)
