"""What models of today have beside the plain block. Against transformers: tests/weights/test_hugging_face.py."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from models import with_numbers

from roxxel_dist.data.packing import Packed
from roxxel_dist.model.attention.blocked import blocked_attention
from roxxel_dist.model.attention.kernels import Situation, broken_rule, dense_attention, kernel_for
from roxxel_dist.model.attention.mask import Mask
from roxxel_dist.model.attention.vendor_kernels import splash_attention
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Transformer

SHAPE = {
    "dim": 16, "num_blocks": 3, "n_heads": 4, "kv_heads": 2, "head_size": 8, "vocab_size": 31, "max_context": 32,
    "init_std": 0.3,
}  # fmt: skip
LOCAL = {"sliding_window": True, "context_window": 4, "sliding_window_pattern": 2}
FEATURES = {
    "qwen": {"qkv_bias": True, "qk_norm": "head"},
    "olmo2": {"qk_norm": "projection", "norm_position": "after", "partial_rotary_factor": 0.5},
    "gemma": {
        "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True,
        "attn_softcap": 2.0, "logit_softcap": 3.0, "query_pre_attn_scalar": 12.0, "rope_local_theta": 100.0, **LOCAL,
    },
    "smollm3": {"num_blocks": 4, "no_rope_layer_interval": 2},
}  # fmt: skip
IN_CI = [pytest.param(name, marks=() if name == "gemma" else pytest.mark.long) for name in FEATURES]


@pytest.mark.parametrize("name", IN_CI)
def test_a_scan_and_a_cache_change_nothing(name):
    """The cache in pieces, so that a window reaches over their borders."""
    config = ModelConfig(**{**SHAPE, **FEATURES[name]})
    scanned = dataclasses.replace(config, scan_layers=True, gradient_checkpointing=True)
    model, other = (with_numbers(lambda each=each: Transformer(each, nnx.Rngs(0))) for each in (config, scanned))
    tokens = np.arange(15, dtype=np.int32)[None] * 7 % 31
    whole, of_scan = nnx.jit(lambda *models: [model(tokens) for model in models])(model, other)
    np.testing.assert_allclose(of_scan, whole, atol=2e-5)
    read, cache, pieces = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache)), model.empty_cache(1), []
    for begin in range(0, 15, 5):
        logits, cache = read(model, tokens[:, begin : begin + 5], cache)
        pieces.append(logits)
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=2e-5)


def test_adapters_leave_biases_and_norms_alone():
    """A bias lies as the columns of its matrix do."""
    config = ModelConfig(**SHAPE, **FEATURES["qwen"], use_lora=True, lora_targets="all")
    parts, *_ = split_module(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    assert all(".lora_" in name for name in parts.params.names)
    axes = dict(zip(parts.frozen.names, parts.frozen.axes, strict=True))
    assert axes["blocks.attention.qkv.bias"] == ("tensor", None, None)
    assert {"blocks.attention.q_norm.scale", "blocks.attention.k_norm.scale"} < axes.keys()


def test_each_layer_is_of_its_kind():
    config = ModelConfig(**SHAPE, **LOCAL, rope_theta=500.0, rope_local_theta=100.0, no_rope_layer_interval=3)
    kinds = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))).blocks.attention.kinds
    assert [kind.window for kind in kinds] == [4, None, 4, None, 4, None]
    assert [kind.rotary and kind.rotary.theta for kind in kinds] == [100.0, 500.0, None, 500.0, 100.0, None]


def test_work_of_local_and_global_layers():
    def per_token(**fields):
        return nnx.eval_shape(lambda: Transformer(ModelConfig(**SHAPE, **fields), nnx.Rngs(0))).flops_per_token(20)

    whole, local, both = per_token(), per_token(**{**LOCAL, "sliding_window_pattern": None}), per_token(**LOCAL)
    assert whole - local == 3 * 16 * 6 * 2 * 4 * 8, "of 3 layers, 16 of 20 keys less"
    assert whole - both == 2 * 16 * 6 * 2 * 4 * 8


@pytest.mark.parametrize(("window", "packed"), [pytest.param(None, False, marks=pytest.mark.long), (100, True)])
def test_soft_caps_in_blocks_and_at_once(window, packed):
    """Scores are far beyond the cap, so that its gradient counts."""
    draws = np.random.default_rng(0)
    q, k, v, weight = (np.float32(draws.normal(size=(1, 300, heads, 8)) * 3) for heads in (4, 2, 2, 4))
    segments = (np.arange(300, dtype=np.int32) // 120)[None] if packed else None
    mask = Mask(segments=segments, window=window, cap=2.0)

    def of(attention):
        return jax.jit(jax.value_and_grad(lambda x: (attention(*x) * weight).mean(), has_aux=False))((q, k, v))

    found = of(lambda q, k, v: blocked_attention(q, k, v, mask))
    expected = of(lambda q, k, v: dense_attention(q, k, v, mask))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    caps = (1e6, None, 2.0)
    large, plain, capped = jax.jit(
        lambda q, k, v: [dense_attention(q, k, v, dataclasses.replace(mask, cap=cap)) for cap in caps]
    )(q, k, v)
    np.testing.assert_allclose(large, plain, atol=1e-3)
    assert np.abs(np.asarray(large) - capped).max() > 0.1


@pytest.mark.long
def test_splash_attention_has_the_soft_cap():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 64)) * 3
    found = splash_attention(q, k, v, Mask(window=100, cap=2.0), interpret=True)
    np.testing.assert_allclose(found, dense_attention(q, k, v, Mask(window=100, cap=2.0)), atol=1e-4)


def test_cudnn_has_no_soft_cap():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
    options = {"key_size": 64, "bf16": True, "packed": False, "device": gpu}
    rule, _ = broken_rule("cudnn", Situation(**options, capped=True))
    assert "no soft cap of scores (attn_softcap)" in rule
    assert [kernel_for("auto", Situation(capped=capped, **options)) for capped in (True, False)] == ["xla", "cudnn"]


@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.long), 16])
def test_z_loss(chunk):
    """The mean over the tokens that the loss counts, at once and in chunks."""
    config = ModelConfig(**{**SHAPE, "num_blocks": 1}, z_loss=0.5, logit_softcap=4.0, loss_chunk=chunk)
    model = with_numbers(lambda: Transformer(config, nnx.Rngs(0)))
    tokens, places = np.arange(48, dtype=np.int32).reshape(2, 24) * 7 % 31, np.arange(24, dtype=np.int32)
    segments, positions = (np.broadcast_to(x, (2, 24)) for x in (places // 10, places % 10))
    read = nnx.jit(lambda model, batch, *x: (model(*x), token_losses(model, batch)["balance_loss"]))
    for batch in (tokens, Packed(tokens, segments, positions)):
        packed = hasattr(batch, "tokens")
        more = (segments[:, :-1], positions[:, :-1]) if packed else ()
        logits, found = read(model, batch, tokens[:, :-1], *more)
        sums = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))
        counted = segments[:, 1:] == segments[:, :-1] if packed else np.ones((2, 23), bool)
        expected = 0.5 * np.where(counted, sums**2, 0).sum() / counted.sum()
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_norm": "all"}, "qk_norm is 'all': it must be one of none, head, projection"),
        ({"norm_position": "pre"}, "norm_position is 'pre': it must be one of before, after, both"),
        ({"attn_softcap": 0.0}, "attn_softcap is 0.0: it must be above 0, and finite; leave it out for none"),
        ({"logit_softcap": float("inf")}, "logit_softcap is inf: it must be above 0"),
        ({"query_pre_attn_scalar": -1.0}, "query_pre_attn_scalar is -1.0: it must be above 0"),
        ({"sliding_window": True, "sliding_window_pattern": 1}, "sliding_window_pattern is 1: it must be at least 2"),
        ({"rope_local_theta": 1.0}, "rope_local_theta is 1.0: it must be above 1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: it must be above 0 and at most 1"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor is 0.4: of heads of 8 channels it turns 3, and"),
        ({"no_rope_layer_interval": 1}, "no_rope_layer_interval is 1: it must be at least 2; .* pos_encoding to none"),
        ({"norm_unit_offset": True, "norm_type": "layernorm"}, "norm_unit_offset is True, and norm_type is layernorm"),
        ({"scale_embeddings": True, "pos_encoding": "absolute"}, "scale_embeddings is True, and pos_encoding is abs"),
        ({"z_loss": -1.0}, "z_loss is -1.0: it must be at least 0"),
        ({"mla": True, "rope_dim": 4, "qk_norm": "head"}, "qk_norm is 'head' with mla, which has norms of its own"),
        ({"mla": True, "rope_dim": 4, "qkv_bias": True}, "qkv_bias is True with mla"),
        ({"mla": True, "rope_dim": 4, **LOCAL}, "sliding_window_pattern is 2 with mla, whose layers are all alike"),
        ({"mla": True, "rope_dim": 4, "no_rope_layer_interval": 2}, "no_rope_layer_interval 2 with mla"),
        (
            {"parametrization": "mup", "base_dim": 16, "query_pre_attn_scalar": 8.0},
            "query_pre_attn_scalar is 8.0, and parametrization is mup, which sets the scale",
        ),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SHAPE, **fields)
