"""Attention by cuDNN: what it is called for, against all scores at once in float64; its kernels are those of XLA."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_by_xla import cudnn_by_xla
from dense_attention import dense_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.cluster.parameter_sharding import on_phase_mesh
from roxxel_dist.devices.traced_flops import traced_flops
from roxxel_dist.model.attention import vendor_kernels as module
from roxxel_dist.model.attention.cut_rows import cut_attention
from roxxel_dist.model.attention.mask import RESIDUALS, Mask
from roxxel_dist.model.attention.vendor_kernels import blocks_of, cudnn_attention

__all__ = ["cudnn_by_xla"]
SCALE = 0.3


def inputs(rows, length, heads, groups, documents, sizes=(16, 8)):
    rng = np.random.default_rng(length)
    size, values = sizes
    shapes = (heads, size), (groups, size), (groups, values), (heads, values)
    arrays = [rng.normal(size=(rows, length, *shape)).astype(np.float32) for shape in shapes]
    segments = None
    if documents:
        segments = np.sort(rng.integers(0, documents, (rows, length)), 1).astype(np.int32)
    return arrays, segments


def with_gradients(q, k, v, d_out, segments, window):
    def loss(q, k, v):
        out = cudnn_attention(q, k, v, Mask(segments=segments, window=window, scale=SCALE))
        return (out * d_out).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def check(arrays, segments, window, found=None, accuracy=1e-5):
    found = with_gradients(*arrays, segments, window) if found is None else found
    expected = dense_attention(*arrays, window=window, segments=segments, scale=SCALE)
    for mine, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, whole, atol=1e-6 + accuracy * np.abs(whole).max())


@pytest.mark.parametrize(
    ("rows", "length", "heads", "groups", "documents", "window", "calls"),
    [
        pytest.param(2, 64, 2, 1, 0, None, [(64, 64, True, False)], marks=pytest.mark.long),
        (1, 1, 1, 1, 0, None, [(2, 2, True, False)]),
        (2, 33, 4, 2, 0, None, [(34, 34, True, False)]),  # an even number
        pytest.param(2, 33, 2, 2, 0, 7, [(34, 34, True, False)], marks=pytest.mark.long),
        (2, 33, 4, 2, 3, None, [(128, 128, True, True)]),
        (1, 256, 4, 1, 9, 20, [(256, 256, True, True)]),  # the window is in the bias
        pytest.param(
            2, 300, 4, 2, 5, None, [(128, 128, True, True), (128, 128, False, True)], marks=pytest.mark.long
        ),  # in pairs of blocks
        (1, 700, 2, 1, 3, 150, [(128, 128, True, True), (128, 128, False, True)]),
        pytest.param(1, 700, 2, 2, 60, None, [(128, 128, True, True), (128, 128, False, True)], marks=pytest.mark.long),
        pytest.param(
            1, 700, 2, 2, 1, None, [(128, 128, True, True), (128, 128, False, True)], marks=pytest.mark.long
        ),  # one document
    ],
)
def test_the_same_as_all_scores_at_once(
    rows, length, heads, groups, documents, window, calls, cudnn_by_xla, monkeypatch
):
    monkeypatch.setattr(module, "LONGEST_BIAS", 256)
    monkeypatch.setattr(module, "LARGEST_BLOCK", 128)
    arrays, segments = inputs(rows, length, heads, groups, documents)
    check(arrays, segments, window)
    assert set(cudnn_by_xla) == set(calls)


@pytest.mark.parametrize(
    "order", [[3, 1, 3, 1], *(pytest.param(order, marks=pytest.mark.long) for order in ([0, 5, 2, 0], [7, 7, 0, 7]))]
)
def test_segments_need_not_be_in_order(order, cudnn_by_xla, monkeypatch):
    """Blocks of which a query sees no key weigh nothing, wherever they are."""
    monkeypatch.setattr(module, "LONGEST_BIAS", 256)
    monkeypatch.setattr(module, "LARGEST_BLOCK", 128)
    arrays, _ = inputs(2, 500, 2, 1, 0)
    segments = np.repeat(np.asarray(order, np.int32), [130, 200, 40, 130])
    check(arrays, np.stack([segments, segments[::-1]]), None)


def test_scores_far_below_0_leave_no_nan(cudnn_by_xla, monkeypatch):
    """Log-sums of about -600, of which float32 has four digits of the fraction: the bias stays far below them."""
    monkeypatch.setattr(module, "LONGEST_BIAS", 128)
    monkeypatch.setattr(module, "LARGEST_BLOCK", 128)
    (q, k, v, d_out), segments = inputs(1, 300, 2, 1, 4)
    q, k = np.abs(q) + 10, -np.abs(k) - 10
    check((q, k, v, d_out), segments, None, accuracy=3e-3)


@pytest.mark.parametrize(
    ("tensor", "groups", "documents"),
    [
        (1, 2, 4),
        (2, 2, 0),
        *((2, 1, documents) for documents in (0, 4)),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, 2, 0), (2, 2, 4))),
    ],
)
def test_each_device_has_its_rows_and_its_heads(tensor, groups, documents, cudnn_by_xla):
    mesh = make_mesh(4, tensor=tensor)
    arrays, segments = inputs(4, 130, 4, groups, documents)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        cut = [None if x is None else jax.device_put(x, rows) for x in (*arrays, segments)]
        check(arrays, segments, None, with_gradients(*cut, None))


def test_the_padding_of_a_row():
    """Without documents at most a token, with them less than a multiple of 128 for each block."""
    assert [blocks_of(n, packed=False) for n in (1, 1023, 40_000)] == [(1, 2), (1, 1024), (1, 40_000)]
    assert [blocks_of(n, packed=True) for n in (5, 1023, 2048, 2049)] == [(1, 128), (1, 1024), (1, 2048), (3, 768)]
    for length in range(2049, 9000, 97):
        count, size = blocks_of(length, packed=True)
        assert size in range(128, 1025, 128)
        assert length <= count * size < length + 128 * count


@pytest.fixture
def of_h100(monkeypatch):
    """Programs are lowered for a GPU with cuDNN: nothing of it is needed for that."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(fused, "check_compute_capability", lambda needed: True)


def traced(length, segments, *, remat=False, value=64):
    shape = jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)
    groups = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((2, length, 2, value), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32) if segments else None

    def loss(q, k, v, ids):
        return cudnn_attention(q, k, v, Mask(segments=ids)).astype(jnp.float32).sum()

    if remat:
        loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(RESIDUALS))
    return jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, groups, values, ids)


@pytest.mark.parametrize(("length", "segments", "name"), [(1023, False, "Softmax"), (1023, True, "ScaleBiasSoftmax")])
def test_the_program_calls_cudnn(length, segments, name, of_h100):
    """One kernel forward, and one backward, with causality, by the types and shapes that jax checks."""
    text = traced(length, segments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@__cudnn$fmha{name}(") == text.count(f"@__cudnn$fmha{name}Backward(") == 1
    assert text.count(r"\22mask_type\22: \22CAUSAL\22") == 2
    assert "tensor<2x1024x4x64xbf16>" in text
    assert ("tensor<2x1x1024x1024xbf16>" in text) == segments


@pytest.mark.parametrize("segments", [False, True])
def test_a_checkpoint_keeps_what_the_backward_pass_reads(segments, of_h100):
    """Its forward kernel runs once: it is not computed again."""
    text = traced(1024, segments, remat=True).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("Softmax(") == text.count("Backward(") == 1


def test_a_long_packed_row_is_counted_by_its_pairs(of_h100):
    """At most as causal attention of the row in blocks: those on the diagonal by half."""
    blocks, size = 4, 1024
    whole = traced_flops(traced(blocks * size, False).jaxpr)
    packed = traced_flops(traced(blocks * size, True).jaxpr)
    assert packed == pytest.approx(whole, rel=0.01)


def test_a_cut_row_of_a_state_on_another_mesh(of_h100):
    """The state is on the mesh of the run, and the row on that of its phase: one program for both."""
    mesh = make_mesh(2)
    q = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "data")))

    def loss(q):
        (q,) = on_phase_mesh([q])
        return cut_attention(q, q, q, Mask(), "cudnn").astype(jnp.float32).sum()

    with jax.set_mesh(phase_mesh(mesh, 1)):
        text = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(re.findall(r"22mask_type\\22: \\22(\w+)\\22", text)) == ["CAUSAL"] * 2 + ["NO_MASK"] * 2
