"""Kernels of attention: XLA's in blocks and splash attention beside the plain one, and which one is chosen."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import dense_attention
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import with_numbers

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.attention import kernels as attention_kernels
from roxxel_dist.model.attention.attend import attend
from roxxel_dist.model.attention.blocked import blocked_attention
from roxxel_dist.model.attention.kernels import (
    KERNELS,
    LONGEST_WHOLE,
    Situation,
    broken_rule,
    kernel_for,
    score_bytes,
    score_traffic,
)
from roxxel_dist.model.attention.mask import Mask, key_size
from roxxel_dist.model.attention.vendor_kernels import splash_attention
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

LONG = LONGEST_WHOLE + 1


def inputs(length, *, heads=2, groups=1, size=8, value_size=8, packed=False, rows=2, dtype=np.float32):
    """(q, k, v, segments, a weight for each number of the output)."""
    draws = np.random.default_rng(length)
    shapes = (heads, size), (groups, size), (groups, value_size), (heads, value_size)
    q, k, v, weight = (draws.normal(size=(rows, length, *shape)).astype(dtype) for shape in shapes)
    segments = np.cumsum(draws.random((rows, length)) < 0.01, 1, dtype=np.int32) if packed else None
    return q, k, v, segments, weight


def with_gradients(attention, q, k, v, weight):
    def loss(q, k, v):
        mixed = attention(q, k, v)
        return (mixed * weight).sum(), mixed

    (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return mixed, *gradients


def check_same(one, other, atol=2e-5):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
        assert np.abs(a).max() > 0.1


@pytest.mark.parametrize(
    ("length", "window", "heads", "value_size", "packed"),
    [(450, 100, (4, 2), 4, True), (600, None, (1, 1), 8, False)],  # 4 blocks, of which 2 are seen, and 2
)
def test_a_few_blocks_are_the_plain_attention(length, window, heads, value_size, packed):
    check_blocks(length, window, heads, value_size, packed)


@pytest.mark.long
@settings(parent=settings.default, max_examples=max(5, settings.default.max_examples // 4))
@given(
    length=st.integers(1, 700),
    window=st.none() | st.integers(1, 800),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    value_size=st.sampled_from([4, 8]),
    packed=st.booleans(),
)
def test_blocks_are_the_plain_attention(length, window, heads, value_size, packed):
    check_blocks(length, window, heads, value_size, packed)


def check_blocks(length, window, heads, value_size, packed):
    q, k, v, segments, weight = inputs(
        length, heads=heads[0], groups=heads[1], value_size=value_size, packed=packed, rows=1
    )
    scale = q.shape[-1] ** -0.5
    blocks = with_gradients(
        lambda q, k, v: blocked_attention(q, k, v, Mask(segments=segments, window=window, scale=scale)), q, k, v, weight
    )
    whole = dense_attention(q, k, v, weight, window=window, segments=segments)
    for a, b in zip(blocks, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("ids", [[3, 1, 3], pytest.param([0, 5, 2], marks=pytest.mark.long)])
def test_segments_need_not_be_in_order(ids):
    """Two parts of a row with one number see each other, however many blocks are between."""
    q, k, v, _, weight = inputs(1100, rows=1, heads=1)
    segments = np.repeat(np.asarray(ids, np.int32), [300, 500, 300])
    segments = segments[None]
    blocks = with_gradients(
        lambda q, k, v: blocked_attention(q, k, v, Mask(segments=segments, scale=8**-0.5)), q, k, v, weight
    )
    check_same(blocks, dense_attention(q, k, v, weight, segments=segments))


def test_blocks_in_bfloat16():
    q, k, v, _, weight = inputs(700, dtype=jnp.bfloat16, rows=1)
    blocks = with_gradients(lambda q, k, v: blocked_attention(q, k, v, Mask(window=300)), q, k, v, weight)
    assert all(x.dtype == jnp.bfloat16 for x in blocks)
    exact = dense_attention(q, k, v, weight, window=300)
    check_same(exact, [np.float32(x) for x in blocks], atol=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_short_rows_have_all_scores_at_once_and_long_ones_never(packed):
    for length in (LONGEST_WHOLE, LONG):
        q, k, v, segments, _ = inputs(length, packed=packed, rows=1)
        mask = Mask(segments=segments)
        text = str(jax.make_jaxpr(lambda *x, mask=mask: attend(*x, mask, "xla"))(q, k, v))
        assert (f"{length},{length}]" in text) == (length == LONGEST_WHOLE)


def temporaries(loss, *arguments):
    return jax.jit(jax.grad(loss)).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.long  # that no scores of a whole row are made is seen in the program, above
@pytest.mark.parametrize("fields", [{}, {"mla": True}, {"sliding_window": True, "context_window": 100}])
def test_the_memory_of_a_long_row(fields, monkeypatch):
    """A step of a row of 8,192 tokens takes at most 0.35 of what all scores at once take."""
    length = 8192
    shape = ModelConfig(dim=64, num_blocks=2, vocab_size=50, max_context=length, gradient_checkpointing=True, **fields)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0))))
    batch = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)

    def loss(state, batch):
        return next_token_loss(nnx.merge(graphdef, state), batch)

    blocks = temporaries(loss, state, batch)
    monkeypatch.setattr("roxxel_dist.model.attention.kernels.LONGEST_WHOLE", length)
    jax.clear_caches()
    assert blocks <= 0.35 * temporaries(loss, state, batch)


@pytest.mark.parametrize(
    ("fields", "packed"),
    [
        ({"mla": True, "scan_layers": True, "gradient_checkpointing": True}, True),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (({}, True), ({"mla": True}, False), ({"kv_heads": 1, "scan_layers": True}, True))
        ),
    ],
)
def test_a_model_of_long_rows_is_the_same(fields, packed, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50, (1, LONG), np.int32)
    segments = np.cumsum(tokens == 0, axis=1, dtype=np.int32) if packed else None
    shape = ModelConfig(dim=32, num_blocks=1, vocab_size=50, max_context=LONG, **fields)

    model = with_numbers(lambda: Transformer(shape, nnx.Rngs(0)))
    blocks = nnx.jit(lambda model: model(tokens, segments))(model)
    monkeypatch.setattr("roxxel_dist.model.attention.kernels.LONGEST_WHOLE", LONG)
    np.testing.assert_allclose(blocks, nnx.jit(lambda model: model(tokens, segments))(model), atol=1e-5)


@pytest.mark.parametrize(
    ("window", "packed", "value_size", "groups"),
    [
        (70, True, 32, 1),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((None, False, 64, 2), (None, True, 64, 4))),
    ],
)
def test_splash_attention_is_the_plain_one(window, packed, value_size, groups):
    """Its program, interpreted: the hardware that it is for is not here."""
    q, k, v, segments, weight = inputs(200, heads=4, groups=groups, size=64, value_size=value_size, packed=packed)

    def splash(q, k, v):
        return splash_attention(q, k, v, Mask(segments=segments, window=window), interpret=True)

    expected = dense_attention(q, k, v, weight, window=window, segments=segments)
    check_same(with_gradients(splash, q, k, v, weight), expected)


def test_splash_attention_on_several_devices():
    """Each device has its rows, and its heads where these divide."""
    mesh = make_mesh(4, tensor=2)
    q, k, v, segments, weight = inputs(130, heads=4, groups=2, size=64, value_size=64, packed=True)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        cut = [jax.device_put(x, rows) for x in (q, k, v, segments)]
        found = jax.jit(lambda q, k, v, s: splash_attention(q, k, v, Mask(segments=s), interpret=True))(*cut)
    np.testing.assert_allclose(found, dense_attention(q, k, v, weight, segments=segments)[0], atol=1e-5)


def test_auto_is_xla_on_a_cpu():
    assert kernel_for("auto", Situation(device=jax.devices()[0], key_size=64, bf16=True, packed=False)) == "xla"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("cudnn", "attention is cudnn: cuDNN is for GPUs, and the devices here are cpu: use auto"),
        ("splash", "attention is splash: splash attention is for TPUs, and the devices here are cpu: use auto"),
    ],
)
def test_a_kernel_that_is_not_here_is_refused(kernel, message):
    config, tokens = ModelConfig(dim=32, num_blocks=1, vocab_size=50, attention=kernel), np.zeros((1, 8), np.int32)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda model: model(tokens), model)
    # A cache has a mask of its own, and needs none of them.
    logits, _ = nnx.eval_shape(lambda model: model(tokens, cache=model.empty_cache()), model)
    assert logits.shape == (1, 8, 50)


HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
BLACKWELL = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")
AMPERE = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
VOLTA = SimpleNamespace(platform="gpu", device_kind="Tesla V100", compute_capability="7.0")
OTHER = SimpleNamespace(platform="gpu", device_kind="MI300", compute_capability="gfx942")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5e")


@pytest.mark.parametrize(
    ("kernel", "device", "fields", "deterministic", "rule"),
    [
        ("cudnn", HOPPER, {}, False, None),
        ("cudnn", HOPPER, {"key_size": 192}, False, None),
        ("cudnn", AMPERE, {}, False, None),
        ("cudnn", BLACKWELL, {}, False, None),
        ("splash", TPU, {"bf16": False, "packed": True, "key_size": 12}, True, None),
        ("xla", OTHER, {"bf16": False, "whole_rows": False}, True, None),
        ("cudnn", AMPERE, {"key_size": 192}, False, "cuDNN takes keys of 128 channels here, and they have 192"),
        ("cudnn", HOPPER, {"key_size": 12}, False, "cuDNN needs keys of a multiple of 8 channels, and they have 12"),
        ("cudnn", VOLTA, {}, False, "cuDNN needs compute capability 8.0, and this is a Tesla V100"),
        ("cudnn", OTHER, {}, False, "cuDNN needs compute capability 8.0, and this is a MI300"),
        ("cudnn", HOPPER, {"bf16": False}, False, "cuDNN computes in bfloat16"),
        ("cudnn", HOPPER, {"packed": True}, False, None),
        ("cudnn", HOPPER, {"packed": True, "key_size": 192}, False, "cuDNN takes keys of 128 channels for documents"),
        ("cudnn", HOPPER, {"whole_rows": False}, False, "cuDNN needs whole rows on each device"),
        ("cudnn", HOPPER, {}, True, "deterministic is true, and XLA does not run cuDNN's deterministic backward pass"),
        ("cudnn", TPU, {}, False, "cuDNN is for GPUs, and the devices here are tpu"),
        ("splash", HOPPER, {}, False, "splash attention is for TPUs, and the devices here are gpu"),
        ("splash", TPU, {"whole_rows": False}, False, "splash attention needs whole rows on each device"),
    ],
)
def test_what_a_kernel_asks_for(kernel, device, fields, deterministic, rule, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true" if deterministic else "")
    asked = {"key_size": 64, "bf16": True, "packed": False, "whole_rows": True} | fields
    found = broken_rule(kernel, Situation(device=device, **asked))
    assert (found is None) == (rule is None)
    assert rule is None or found[0].startswith(rule)


TOPICS = {
    "Devices": "all",
    "Number types": "all",
    "Width of keys": "any",
    "`attn_softcap`": "yes",
    "Packed documents": "yes",
    "Rows that are [divided along their tokens](howto/long-rows.md)": "yes",
    "Can be used with `deterministic: true`": "yes",
}
"""The lines of the page's table, and what a kernel without a rule has there."""


def test_the_table_of_the_page_has_the_rules():
    lines = ["| | " + " | ".join(f"`{name}`" for name in KERNELS) + " |", "|---" * (len(KERNELS) + 1) + "|"]
    assert {rule.topic for kernel in KERNELS.values() for rule in kernel.rules} - {""} <= set(TOPICS)
    for topic, usual in TOPICS.items():
        cells = [[rule.words for rule in kernel.rules if rule.topic == topic] for kernel in KERNELS.values()]
        lines.append(f"| {topic} | " + " | ".join(", ".join(cell) or usual for cell in cells) + " |")
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    assert "\n".join(lines) in page, "\n".join(lines)


def test_no_such_kernel():
    with pytest.raises(ValueError, match="attention is 'flash': it must be one of auto, xla, cudnn, splash"):
        ModelConfig(attention="flash")


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"head_size": 32}, 32),
        ({"head_size": 32, "mla": True, "rope_dim": 16}, 48),
        ({"head_size": 32, "mla": True, "pos_encoding": "none"}, 32),
        ({"head_size": 32, "mla": True, "rope_dim": 16, "inference": True, "down_dim_kv": 24}, 40),
    ],
)
def test_the_width_of_keys(fields, width, monkeypatch):
    shape, seen = ModelConfig(dim=64, num_blocks=1, vocab_size=50, **fields), []
    told = attention_kernels.kernel_for
    monkeypatch.setattr(
        "roxxel_dist.model.attention.attend.kernel_for", lambda *a, **k: seen.append(a[1].key_size) or told(*a, **k)
    )
    nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0))(np.zeros((1, 4), np.int32)))
    assert set(seen) == {width} == {key_size(shape)}


def test_what_scores_cost():
    assert score_bytes("xla", 2, 3, 1024, None) == 2 * 3 * 1024 * 1024 * 4
    assert score_bytes("xla", 2, 3, 4096, None) == 2 * 3 * (512 * 512 + 4096) * 4
    assert score_bytes("xla", 2, 3, 4096, 100) == 2 * 3 * (128 * 128 + 4096) * 4
    assert score_bytes("cudnn", 2, 3, 4096, None) == 2 * 3 * 4096 * 4
    assert score_bytes("cudnn", 2, 3, 1024, None, packed=True) == 2 * (3 * 1024 * 4 + 1024 * 1024 * 2)
    assert score_bytes("cudnn", 2, 3, 4096, None, packed=True) == 2 * (3 * 4096 * 4 + 1024 * 1024 * 2)
    assert score_traffic(3, 1000, None) == score_traffic(3, 1000, 10) == 64 * 3 * 1000 * 1000
    assert score_traffic(3, 4096, None) == 64 * 3 * 4096 * 4096
    assert score_traffic(3, 4096, 100) == 128 * 3 * (4096 * 100 - 5000)
