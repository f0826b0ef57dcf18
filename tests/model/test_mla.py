"""Multi-head latent attention: both forms against plain numpy."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import transformer, with_numbers
from plain_numpy import float64, mix, rms_norm, sigmoid, turn, visible

from roxxel_dist.model.attention.kv_cache import AttentionMetadata
from roxxel_dist.model.attention.latent import LatentAttention
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

SHAPE = {"dim": 32, "num_blocks": 1, "vocab_size": 50, "mla": True, "head_size": 8}
SIZES = {"down_dim_q": 12, "down_dim_kv": 10, "rope_dim": 6}
SEGMENTS = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
PLACES = np.array([0, 1, 2, 3, 0, 1, 0, 1, 2])


@nnx.jit
def run(layer, x, metadata):
    return layer(x, metadata)


def plain(layer, config, x, positions, segments):
    weight = {name: float64(p[...]) for name, p in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    n_heads, size = 4, 8
    rope = config.rope_dim if config.pos_encoding == "rotary" else 0
    q = rms_norm(x @ weight["down_q", "kernel"], weight["norm_q", "scale"]) @ weight["up_q", "kernel"]
    down = x @ weight["down_kv", "kernel"]
    latent = rms_norm(down[:, : config.down_dim_kv], weight["norm_kv", "scale"])
    keys, values = latent @ weight["up_k", "kernel"], latent @ weight["up_v", "kernel"]
    mixed = []
    for head in range(n_heads):
        query = q[:, head * (size + rope) : (head + 1) * (size + rope)]
        key, value = (part[:, head * size : (head + 1) * size] for part in (keys, values))
        if rope:
            query = np.concatenate([query[:, :size], turn(query[:, size:], positions, config.rope_scale_factor)], 1)
            shared = turn(down[:, config.down_dim_kv :], positions, config.rope_scale_factor)
            key = np.concatenate([key, shared], 1)
        mixed.append(mix(query, key, value, visible(segments, config.window)))
    out = np.concatenate(mixed, 1)
    if config.no_sink:
        out = out * sigmoid(x @ weight["gate", "score", "kernel"].reshape(len(x[0]), -1))
    return out @ weight["out", "kernel"]


VARIANTS = [
    {},
    {"pos_encoding": "none"},
    {"rope_scale_factor": 4.0, "sliding_window": True, "context_window": 3},
    {"no_sink": True, "pos_encoding": "learned", "sliding_window": True, "context_window": 2},
]


@pytest.mark.parametrize(
    ("fields", "packed"),
    [
        *((fields, number % 2 == 0) for number, fields in enumerate(VARIANTS)),
        *(pytest.param(fields, number % 2 == 1, marks=pytest.mark.long) for number, fields in enumerate(VARIANTS)),
    ],
)
def test_both_forms_are_plain_numpy(fields, packed):
    x = np.random.default_rng(3).normal(size=(2, 9, 32)).astype(np.float32)
    segments, positions = (SEGMENTS, PLACES) if packed else (np.zeros(9, int), np.arange(9))
    same = (segments[:, None] == segments)[None, None] if packed else None
    for inference in (False, True):
        config = ModelConfig(**SHAPE, **SIZES, **fields, inference=inference)
        layer = with_numbers(lambda config=config: LatentAttention(config, nnx.Rngs(0)))
        found, held = run(layer, x, AttentionMetadata(positions.astype(np.int32), same))
        found = np.asarray(found)
        assert held is None
        for row in range(2):
            expected = plain(layer, config, float64(x[row]), positions, segments)
            np.testing.assert_allclose(found[row], expected, atol=1e-5)
            assert np.abs(expected).max() > 0.1


def test_gradients_of_both_forms_are_the_same():
    x = np.random.default_rng(3).normal(size=(2, 9, 32)).astype(np.float32)
    metadata = AttentionMetadata(np.arange(9, dtype=np.int32), None)

    def squares(layer, x):
        return (layer(x, metadata)[0] ** 2).sum()

    configs = [ModelConfig(**SHAPE, **SIZES, no_sink=True, inference=inference) for inference in (False, True)]
    one, absorbed = (
        nnx.jit(nnx.grad(squares, argnums=(0, 1)))(
            with_numbers(lambda config=config: LatentAttention(config, nnx.Rngs(0))), x
        )
        for config in configs
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(absorbed), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())


@pytest.mark.long
@pytest.mark.parametrize("field", ["gradient_checkpointing", "inference"])
def test_gradients_of_a_whole_model_are_the_same(field):
    x = jax.random.randint(jax.random.key(0), (2, 17), 0, 50)
    (loss, grads), (other, remat) = (
        nnx.jit(nnx.value_and_grad(next_token_loss))(
            Transformer(ModelConfig(**SHAPE, **SIZES, no_sink=True, **{field: value}), nnx.Rngs(0)), x
        )
        for value in (False, True)
    )
    assert float(other) == pytest.approx(float(loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(remat), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_flops_count_what_each_form_multiplies():
    """A score and a value of each head: 8 + 6 and 8 numbers, or among latents 10 + 6 and 10."""
    one, absorbed = (transformer(**SHAPE, **SIZES, inference=inference) for inference in (False, True))
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(one, nnx.Param)))
    assert one.flops_per_token(20) == 6 * parameters + 6 * 4 * (14 + 8) * 20
    assert absorbed.flops_per_token(20) == 6 * parameters + 6 * 4 * (16 + 10) * 20
