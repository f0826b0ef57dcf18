"""What is computed in which type where parameters are bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import transformer, with_numbers

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import Embedding
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Transformer

HALF, FULL = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
SHAPE = {"dim": 32, "num_blocks": 1, "vocab_size": 50, "max_context": 64, "head_size": 8, "rope_dim": 8}
MLA = {"mla": True, "down_dim_q": 12, "down_dim_kv": 10}
WINDOW = {"sliding_window": True, "context_window": 5}
VARIANTS = [
    {"kv_heads": 2},
    {"kv_heads": 2, "weight_tying": False, "no_sink": True, "pos_encoding": "learned", "scan_layers": True},
    {**MLA, "dropout_rate": 0.1, "norm_type": "layernorm"},
    {"use_moe": True, "n_experts": 5, "pos_encoding": "absolute", "loss_chunk": 16},
    {"use_lora": True, "lora_targets": "all", "weight_tying": False, "gradient_checkpointing": True},
]
N_EXPERTS = 5  # no other axis has this size


def cast(model):
    """Parameters in bfloat16, of a model that was made in float32: what training makes of it."""

    def half(leaf):
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(leaf.shape, HALF) if abstract else jax.device_put(np.asarray(leaf, HALF))

    nnx.update(model, jax.tree.map(half, nnx.state(model, nnx.Param)))
    return model


def build(**fields):
    return transformer(**{**SHAPE, **fields})


def shapes(**fields):
    return nnx.eval_shape(lambda: Transformer(ModelConfig(**{**SHAPE, **fields}), nnx.Rngs(params=0, dropout=1)))


def equations(jaxpr):
    """Every operation, those inside of loops and functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for inside in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            jaxpr = getattr(inside, "jaxpr", inside)
            if hasattr(jaxpr, "eqns"):
                yield from equations(jaxpr)


def in_half(equation):
    """Of two bfloat16 arrays, or of two that are rounded to it, as JAX derives the gradient of attention's scores."""
    rounded = equation.params["precision"] == jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    return rounded or {v.aval.dtype for v in equation.invars} == {HALF}


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_every_product_of_a_loss_is_one_of_bfloat16(fields):
    """But the router's; and what is exponentiated, for softmax and cross-entropy, is float32."""
    graphdef, params, rest = nnx.split(cast(shapes(**fields)), nnx.Param, ...)

    def loss(params, rest, tokens):
        return next_token_loss(nnx.merge(graphdef, params, rest, copy=True), tokens)

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params, rest, jax.ShapeDtypeStruct((2, 17), jnp.int32))
    all_of_it = list(equations(jaxpr.jaxpr))
    found = [e for e in all_of_it if e.primitive.name == "dot_general"]
    of_experts = [e for e in found if any(N_EXPERTS in v.aval.shape for v in e.invars)] if "use_moe" in fields else []
    routers = [e for e in of_experts if all(v.aval.ndim == 2 for v in e.invars)]
    assert [str(e) for e in found if e not in routers and not in_half(e)] == []
    assert len(found) - len(routers) > 14
    assert {v.aval.dtype for e in routers for v in e.invars} == ({FULL} if "use_moe" in fields else set())
    exponentials = [e.outvars[0].aval.dtype for e in all_of_it if e.primitive.name == "exp"]
    assert len(exponentials) > 1
    assert set(exponentials) == {FULL}
    assert jaxpr.out_avals[0].dtype == FULL
    assert {leaf.dtype for leaf in jaxpr.out_avals[1:]} == {HALF}


@pytest.mark.parametrize(
    ("fields", "cuts"),
    [({"kv_heads": 2}, [4, 8]), pytest.param({**MLA, **WINDOW}, [9, 10, 11], marks=pytest.mark.long)],
)
def test_a_cache_holds_what_is_computed(fields, cuts):
    model, tokens = cast(build(**fields)), np.arange(12, dtype=np.int32)[None] * 7 % 50
    read = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    expected, cache = nnx.jit(lambda model, tokens: model(tokens))(model, tokens), model.empty_cache()
    found = []
    for part in np.split(tokens, cuts, axis=1):
        logits, cache = read(model, part, cache)
        found.append(logits)
    assert {leaf.dtype for layer in cache.layers for leaf in layer} == {HALF}
    assert {logits.dtype, expected.dtype} == {FULL}
    scale = np.abs(np.float32(expected)).max()
    np.testing.assert_allclose(np.float32(np.concatenate(found, 1)), np.float32(expected), atol=0.03 * scale)


def test_the_gradient_of_a_lookup_is_added_up_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    table = cast(with_numbers(lambda: Embedding(2, 3, rngs=nnx.Rngs(0))))
    gradient = nnx.jit(nnx.grad(lambda table: table(np.zeros(1000, np.int32)).sum()))(table).embedding[...]
    assert gradient.dtype == HALF
    np.testing.assert_allclose(np.float32(gradient), [[1000] * 3, [0] * 3])


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_logits_are_not_rounded(tied):
    """In bfloat16 the softmax would get logits of three digits."""
    model, tokens = cast(build(weight_tying=tied)), np.arange(16, dtype=np.int32)[None]
    logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
    assert logits.dtype == FULL
    assert (logits != logits.astype(HALF).astype(FULL)).mean() > 0.9


def test_a_router_is_not_cast_for_a_step():
    model = build(use_moe=True, n_experts=N_EXPERTS)
    parts, params, rest, settings = split_module(model)
    half = parts.merge(params, rest, settings, training=True, dtype=HALF)
    feedforward, plain = half.blocks.feedforward, model.blocks.feedforward
    assert feedforward.gate_up[...].dtype == HALF
    assert feedforward.router.kernel[...].dtype == FULL
    assert np.array_equal(feedforward.router.kernel[...], plain.router.kernel[...])
