"""Heads, windows, segments and the gate of attention, against plain numpy."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import transformer, with_numbers
from plain_numpy import float64, mix, sigmoid, turn, visible

from roxxel_dist.model.attention.grouped_query import Attention
from roxxel_dist.model.attention.kv_cache import AttentionMetadata
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

LENGTH = 11
ONE = np.zeros(LENGTH, int)
DOCUMENTS = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
PLACES = np.array([0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4])
VARIANTS = [
    {},
    {"head_size": 8, "kv_heads": 2},
    {"head_size": 8, "kv_heads": 1, "rope_scale_factor": 4.0},
    {"head_size": 8, "sliding_window": True, "context_window": 3},
    {"head_size": 8, "no_sink": True},
    {"head_size": 8, "kv_heads": 2, "no_sink": True, "sliding_window": True, "context_window": 2},
    {"head_size": 8, "pos_encoding": "none", "sliding_window": True, "context_window": 1},
]


@nnx.jit
def run(attention, x, metadata):
    return attention(x, metadata)


def layer(**fields):
    """With scores that differ enough for a mistake to show."""
    config = ModelConfig(dim=32, num_blocks=1, vocab_size=50, **fields)
    attention = with_numbers(lambda: Attention(config, nnx.Rngs(0)))
    nnx.update(attention, jax.tree.map(lambda p: jax.device_put(np.asarray(p) / 2), nnx.state(attention, nnx.Param)))
    return attention


def plain(attention, config, x, positions, segments):
    n_heads, kv_heads, size = config.heads()
    grouped = np.einsum("ld,dgsk->lgsk", x, float64(attention.qkv.kernel[...]))
    queries = grouped[:, :, :-2].reshape(len(x), n_heads, size)
    heads = np.concatenate([queries, grouped[:, :, -2], grouped[:, :, -1]], axis=1)
    mixed = []
    for head in range(n_heads):
        group = head // (n_heads // kv_heads)
        q, k, v = heads[:, head], heads[:, n_heads + group], heads[:, n_heads + kv_heads + group]
        if config.pos_encoding == "rotary":
            q, k = (turn(part, positions, config.rope_scale_factor) for part in (q, k))
        window = config.context_window if config.sliding_window else None
        mixed.append(mix(q, k, v, visible(segments, window)))
    out = np.concatenate(mixed, 1)
    if config.no_sink:
        out = out * sigmoid(x @ float64(attention.gate.score.kernel[...]).reshape(len(x[0]), -1))
    return out @ float64(attention.out.kernel[...])


@pytest.mark.parametrize(
    ("fields", "packed"),
    [
        *((fields, number % 2 == 0) for number, fields in enumerate(VARIANTS)),
        *(pytest.param(fields, number % 2 == 1, marks=pytest.mark.long) for number, fields in enumerate(VARIANTS)),
    ],
)
def test_it_is_plain_numpy(fields, packed):
    attention, config = layer(**fields), ModelConfig(dim=32, num_blocks=1, **fields)
    x = np.random.default_rng(3).normal(size=(2, LENGTH, 32)).astype(np.float32)
    segments, positions = (DOCUMENTS, PLACES) if packed else (ONE, np.arange(LENGTH))
    same = (segments[:, None] == segments)[None, None] if packed else None
    found, held = run(attention, x, AttentionMetadata(positions.astype(np.int32), same))
    found = np.asarray(found)
    assert held is None
    for row in range(2):
        expected = plain(attention, config, float64(x[row]), positions, segments)
        np.testing.assert_allclose(found[row], expected, atol=1e-5)
        assert np.abs(expected).max() > 0.1


def test_a_window_ends_where_it_says():
    """One layer: position 7 sees 5, 6 and 7."""
    attention = layer(sliding_window=True, context_window=3)
    x = np.random.default_rng(0).normal(size=(1, 9, 32)).astype(np.float32)
    metadata = AttentionMetadata(np.arange(9, dtype=np.int32), None)
    before = np.asarray(run(attention, x, metadata)[0])[0, 7]
    for place, matters in ((3, False), (4, False), (5, True), (6, True), (7, True), (8, False)):
        changed = x.copy()
        changed[0, place] += 1
        after = np.asarray(run(attention, changed, metadata)[0])[0, 7]
        assert np.array_equal(before, after) != matters, place


def test_a_window_of_the_whole_row_is_none():
    x = np.random.default_rng(0).integers(0, 50, (2, 20), np.int32)
    shape = {"dim": 32, "num_blocks": 1, "vocab_size": 50}
    models = [transformer(**shape, **fields) for fields in ({}, {"sliding_window": True, "context_window": 20})]
    whole, window = nnx.jit(lambda models: [model(x) for model in models])(models)
    np.testing.assert_allclose(whole, window, atol=1e-6)


@pytest.mark.long
def test_rematerialised_gradients_are_the_same():
    x = jax.random.randint(jax.random.key(0), (2, 17), 0, 50)
    fields = {"no_sink": True, "sliding_window": True, "context_window": 4, "pos_encoding": "learned"}
    shape = {"dim": 32, "num_blocks": 1, "vocab_size": 50, "norm_type": "layernorm", **fields}
    plain, remat = (
        nnx.jit(nnx.value_and_grad(next_token_loss))(
            Transformer(ModelConfig(**shape, gradient_checkpointing=g), nnx.Rngs(0)), x
        )
        for g in (False, True)
    )
    assert float(plain[0]) == pytest.approx(float(remat[0]), rel=1e-6)
    for a, b in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(remat[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
        assert np.abs(a).max() > 0, "a parameter that nothing depends on"


def test_flops_of_a_window_and_a_gate():
    shape = {"dim": 32, "num_blocks": 2, "vocab_size": 50}
    plain, window, gate = (
        nnx.eval_shape(lambda fields=fields: Transformer(ModelConfig(**shape, **fields), nnx.Rngs(0)))
        for fields in ({}, {"sliding_window": True, "context_window": 8}, {"no_sink": True})
    )
    assert plain.flops_per_token(20) - window.flops_per_token(20) == 12 * 2 * 32 * (20 - 8)
    assert plain.flops_per_token(5) == window.flops_per_token(5)
    assert gate.flops_per_token(20) - plain.flops_per_token(20) == 6 * 2 * 32 * 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": True, "context_window": 0}, "context_window is 0: it must be at least 1"),
        ({"dim": 128, "n_heads": 4, "kv_heads": 3}, "kv_heads is 3: it must divide n_heads, which is 4"),
        ({"dim": 96, "n_heads": 32}, "head_size is 3: rotary positions turn pairs, so it must be even"),
        ({"norm_type": "batchnorm"}, "norm_type is 'batchnorm': it must be one of rmsnorm, layernorm"),
        ({"mla": True, "down_dim_q": 0}, "down_dim_q is 0: it must be at least 1"),
        ({"mla": True, "down_dim_kv": 0}, "down_dim_kv is 0: it must be at least 1"),
        ({"mla": True, "dim": 64, "head_size": 16}, "rope_dim is 32: it must be at most head_size, which is 16"),
        ({"mla": True, "rope_dim": 7}, "rope_dim is 7: rotary positions turn pairs, so it must be even"),
    ],
)
def test_what_does_not_fit_is_told(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def test_what_only_matters_with_a_switch_is_not_looked_at_without():
    ModelConfig(context_window=0, rope_dim=7, down_dim_q=0, down_dim_kv=0)
    ModelConfig(dim=96, n_heads=32, pos_encoding="none")
    ModelConfig(mla=True, rope_dim=7, pos_encoding="learned")
