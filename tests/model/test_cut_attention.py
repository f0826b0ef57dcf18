"""Attention of rows that are cut over devices, against all scores at once in float64."""

import jax
import numpy as np
import pytest
from cudnn_by_xla import cudnn_by_xla
from dense_attention import dense_attention

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.devices.traced_flops import traced_flops
from roxxel_dist.model.attention.cut_rows import RowCut, cut_attention
from roxxel_dist.model.attention.mask import Mask

__all__ = ["cudnn_by_xla"]
SCALE = 0.25


@pytest.mark.parametrize(
    ("devices", "rows", "length", "heads", "groups", "window", "packed"),
    [
        pytest.param(8, 1, 256, 2, 1, None, False, marks=pytest.mark.long),
        (8, 1, 257, 2, 2, None, True),  # a remainder
        pytest.param(6, 2, 100, 2, 1, None, True, marks=pytest.mark.long),  # 2 rows x 3 devices
        (8, 6, 64, 2, 2, 9, True),  # 2 groups of 3 rows
        (8, 1, 300, 4, 2, 40, False),  # the neighbours of a window
        pytest.param(4, 1, 300, 2, 1, 250, False, marks=pytest.mark.long),  # a window that is nearly the row
        (5, 1, 9, 1, 1, None, False),  # fewer than two tokens a device
    ],
)
def test_the_same_as_all_scores_at_once(devices, rows, length, heads, groups, window, packed):
    shapes = (heads, 16), (groups, 16), (groups, 8), (heads, 8)
    check(phase_mesh(make_mesh(devices), rows), rows, length, shapes, window, packed)


def check(mesh, rows, length, shapes, window, packed, *options, **more):
    """Output and gradients on a mesh."""
    rng = np.random.default_rng(length)
    q, k, v, d_out = (rng.normal(size=(rows, length, *shape)).astype(np.float32) for shape in shapes)
    segments = np.sort(rng.integers(0, 4, (rows, length)), 1).astype(np.int32) if packed else None

    def mixed(q, k, v):
        out = cut_attention(q, k, v, Mask(segments=segments, window=window, scale=SCALE), *options, **more)
        return (out * d_out).sum(), out

    with jax.set_mesh(mesh):
        (_, out), gradients = jax.jit(jax.value_and_grad(mixed, (0, 1, 2), has_aux=True))(q, k, v)
    expected = dense_attention(q, k, v, d_out, window=window, segments=segments, scale=SCALE)
    for mine, whole in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(mine, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("devices", "tensor", "rows", "length", "heads", "groups", "window", "packed"),
    [
        pytest.param(2, 1, 1, 1024, 2, 1, None, False, marks=pytest.mark.long),
        (4, 1, 2, 506, 2, 2, None, True),  # 2 rows x 2 devices, and a remainder
        pytest.param(3, 1, 1, 750, 2, 1, 200, True, marks=pytest.mark.long),  # the neighbours of a window
        pytest.param(3, 1, 1, 750, 1, 1, 700, False, marks=pytest.mark.long),  # a window that is nearly the row
        pytest.param(4, 2, 1, 512, 4, 2, 100, False, marks=pytest.mark.long),  # and heads over "tensor"
        pytest.param(8, 1, 1, 2041, 2, 1, None, True, marks=pytest.mark.long),
    ],
)
def test_splash_attention_of_a_cut_row(devices, tensor, rows, length, heads, groups, window, packed):
    """Its program, interpreted: the hardware that it is for is not here."""
    shapes = (heads, 64), (groups, 64), (groups, 32), (heads, 32)
    mesh = phase_mesh(make_mesh(devices, tensor=tensor), rows)
    check(mesh, rows, length, shapes, window, packed, "splash", interpret=True)


def test_splash_attention_computes_no_more_than_on_one_device():
    """Of each device the kernel's tables name as many blocks; a row that its blocks do not fit is left to XLA."""

    def traced(length, kernel):
        q = jax.ShapeDtypeStruct((1, length, 2, 64), np.float32)
        with jax.set_mesh(phase_mesh(make_mesh(8), 1)):
            return jax.jit(lambda q: cut_attention(q, q, q, Mask(scale=SCALE), kernel)).trace(q).jaxpr

    assert traced_flops(traced(8192, "splash")) == pytest.approx(2 * 2 * 2 * 64 * 8192**2 / 2, rel=0.01)
    assert "pallas_call" in str(traced(8000, "splash"))
    assert "pallas_call" not in str(traced(1000, "splash"))
    assert "pallas_call" not in str(traced(8192, "xla"))


@pytest.mark.parametrize("devices", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("length", [1000, 4096, 33_000])
def test_every_device_has_as_many_keys_to_look_at(devices, length):
    """Of 2 t segments, i and 2 t - 1 - i: the blocks of keys that a device computes on are the same number for all."""
    cut = RowCut.of_length(devices, length, None)
    half = cut.blocks // 2
    pairs = [(i, 2 * devices - 1 - i) for i in range(devices)]
    seen = {sum(segment * half + n + 1 for segment in pair for n in range(half)) for pair in pairs}
    assert len(seen) == 1
    assert length <= cut.tokens < length + 2 * devices * half, "less than a token of padding for each block"


@pytest.mark.parametrize(
    ("devices", "tensor", "rows", "length", "groups", "window", "packed", "calls"),
    [
        pytest.param(
            2, 1, 1, 1024, 1, None, False, {(256, 256, True, False), (256, 256, False, False)}, marks=pytest.mark.long
        ),
        (4, 1, 2, 510, 2, None, True, {(128, 128, True, True), (128, 128, False, True)}),  # 2 rows x 2 devices
        pytest.param(
            3, 1, 1, 760, 1, 200, True, {(256, 256, True, True), (256, 256, False, True)}, marks=pytest.mark.long
        ),  # the neighbours of a window
        pytest.param(
            3, 1, 1, 760, 1, 700, False, {(128, 128, True, True), (128, 128, False, True)}, marks=pytest.mark.long
        ),  # a window nearly of the row
        pytest.param(
            4, 2, 1, 1024, 2, None, True, {(256, 256, True, True), (256, 256, False, True)}, marks=pytest.mark.long
        ),  # and heads over "tensor"
    ],
)
def test_cudnn_of_a_cut_row(devices, tensor, rows, length, groups, window, packed, calls, cudnn_by_xla):
    """Of a device's queries and another's keys each pair is full or causal; the pairs are merged by log-sums."""
    shapes = (2, 16), (groups, 16), (groups, 8), (2, 8)
    mesh = phase_mesh(make_mesh(devices, tensor=tensor), rows)
    check(mesh, rows, length, shapes, window, packed, "cudnn")
    assert set(cudnn_by_xla) == calls


@pytest.mark.parametrize(("length", "calls"), [(600, False), (1020, True)])
def test_a_row_that_cudnn_would_pad_much_is_left_to_xla(length, calls, cudnn_by_xla):
    q = jax.ShapeDtypeStruct((1, length, 2, 16), np.float32)
    with jax.set_mesh(phase_mesh(make_mesh(2), 1)):
        jax.eval_shape(lambda q: cut_attention(q, q, q, Mask(scale=SCALE), "cudnn"), q)
    assert bool(cudnn_by_xla) == calls


@pytest.mark.parametrize("devices", [2, 3, 8, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_for_cudnn(devices, packed):
    """Of 128 tokens, without labels the largest: one pair with each half of each other device."""
    for length in (32_768, 40_000):
        cut = RowCut.of_pairs(devices, length, None, packed=packed)
        assert cut.size % 128 == 0
        assert length <= cut.tokens < length + 2 * devices * 128 * (cut.blocks // 2)
        assert cut.blocks == (2 * -(-length // (2 * devices * 1024)) if packed else 2)


def test_cudnn_computes_no_more_than_on_one_device(cudnn_by_xla):
    """By the counter of FLOPs: half of all pairs, and half of those on the diagonal."""

    def traced(length, kernel):
        q = jax.ShapeDtypeStruct((1, length, 2, 64), np.float32)
        with jax.set_mesh(phase_mesh(make_mesh(8), 1)):
            return jax.jit(lambda q: cut_attention(q, q, q, Mask(scale=SCALE), kernel)).trace(q).jaxpr

    row = 2 * 2 * 2 * 64 * 8192**2 / 2
    diagonal = 17 / 16  # XLA, in place of cuDNN here, computes all of a pair on it
    assert traced_flops(traced(8192, "cudnn")) == pytest.approx(row * diagonal, rel=0.01)
