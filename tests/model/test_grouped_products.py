"""Products over groups of rows: the steps of the kernels, interpreted, against sums by hand and every expert's work."""

import itertools
import logging
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas
from models import with_numbers

from roxxel_dist.cluster.mesh import make_mesh, replicate
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts import grouped_products, moe
from roxxel_dist.model.experts.grouped_products import RowBlocks, matrix_gradient_gpu, matrix_gradient_tpu, product_gpu
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
V100 = SimpleNamespace(platform="gpu", device_kind="Tesla V100-SXM2-16GB", compute_capability="7.0")
COUNTS = [(128, 0, 100, 28), (0, 0, 0, 256), (1, 127, 127, 1), (64, 64, 64, 64)]


def set_device(monkeypatch, device):
    """Have programs traced for another device."""
    for module in (moe, grouped_products):
        monkeypatch.setattr(module, "device_type", lambda: device)


@pytest.fixture
def interpreted(monkeypatch):
    """The GPU's kernels run here, in small blocks, so that few rows make many."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(grouped_products, "WIDEST", 32)
    monkeypatch.setattr(grouped_products, "DEEPEST_BYTES", 64)


@pytest.fixture
def gpu(interpreted, monkeypatch):
    set_device(monkeypatch, H200)


def by_hand(x, g, w, counts):
    """(x @ w, g @ w transposed, the gradient of w) of each group, in float64."""
    ends = np.cumsum(counts)
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    x, g, w = (np.asarray(array, np.float64) for array in (x, g, w))
    return (
        np.concatenate([x[part] @ w[e] for e, part in enumerate(parts)]),
        np.concatenate([g[part] @ w[e].T for e, part in enumerate(parts)]),
        np.stack([x[part].T @ g[part] for part in parts]),
    )


@pytest.mark.parametrize(
    ("counts", "sizes", "dtype", "bound"),
    [
        ((128, 0, 100, 28), (40, 70), jnp.float32, 1e-6),
        ((0, 0, 0, 3), (16, 24), jnp.bfloat16, 1e-2),
        *(
            pytest.param(counts, sizes, dtype, bound, marks=pytest.mark.long)
            for counts in (*COUNTS, (3, 0, 1, 0), (700, 10, 0, 300), (5,))
            for sizes in ((16, 24), (130, 128), (32, 300))
            for dtype, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 1e-2))
        ),
    ],
    ids=str,
)
def test_the_kernels_of_gpus(interpreted, counts, sizes, dtype, bound):
    random = np.random.default_rng(0)
    x, g = (random.normal(size=(sum(counts), size)).astype(dtype) for size in sizes)
    w, count_E = random.normal(size=(len(counts), *sizes)).astype(dtype), np.asarray(counts, np.int32)

    @jax.jit
    def products(x, g, w):
        y, dx = product_gpu(x, w, count_E), product_gpu(g, w, count_E, transposed=True)
        return y, dx, matrix_gradient_gpu(x, g, count_E)

    for found, wanted in zip(products(x, g, w), by_hand(x, g, w, counts), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=bound * np.abs(wanted).max())


gradient_of_tpus = jax.jit(partial(matrix_gradient_tpu, interpret=True))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sizes", [(16, 24), pytest.param((130, 128), marks=pytest.mark.long)], ids=str)
def test_the_kernel_of_tpus(counts, sizes):
    """Groups may be empty, and share a block of rows."""
    random = np.random.default_rng(0)
    x, g = (random.normal(size=(sum(counts), size)).astype(np.float32) for size in sizes)
    found = gradient_of_tpus(x, g, np.asarray(counts, np.int32))
    wanted = by_hand(x, g, np.zeros((len(counts), *sizes)), counts)[2]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


row_blocks = jax.jit(RowBlocks.of_counts, static_argnums=(1, 2))


@pytest.mark.parametrize("counts", [*COUNTS, (1,), (0, 0, 7), (5, 3, 250, 1, 0, 0, 31, 16), (1,) * 20], ids=str)
@pytest.mark.parametrize("size", [16, pytest.param(128, marks=pytest.mark.long)])
def test_each_row_is_in_one_block_of_its_group(counts, size):
    rows, seen = sum(counts), []
    blocks = row_blocks(np.asarray(counts, np.int32), rows, size)
    of_row = np.repeat(np.arange(len(counts)), counts)
    for group, first, end in zip(*map(np.asarray, blocks), strict=True):
        assert 0 <= end - first <= size
        assert (of_row[first:end] == group).all()
        seen += range(first, end)
    assert sorted(seen) == list(range(rows))
    assert len(blocks.group_T) * size <= rows + len(counts) * size


@pytest.mark.parametrize(
    ("rows", "groups", "blocks"), [(65_536, 8, 128), (8192, 64, 32), (2048, 8, 64), (16, 8, 16), (1, 1, 16)]
)
def test_blocks_of_small_groups_are_small(rows, groups, blocks):
    assert grouped_products.row_block(rows, groups) == blocks


def test_a_wide_step_computes_few_rows_in_vain():
    """8 experts, of which 2: what is computed is at most 1.3 times what is needed, however the tokens choose."""
    rows, size = 32_768 * 2, grouped_products.row_block(32_768 * 2, 8)
    for counts in ((rows // 8,) * 8, (1,) * 7 + (rows - 7,), (129,) * 7 + (rows - 7 * 129,)):
        first, end = map(np.asarray, row_blocks(np.asarray(counts, np.int32), rows, size)[1:])
        assert (end > first).sum() * size <= 1.3 * rows


def layer(**fields):
    shape = {"dim": 32, "num_blocks": 1, "use_moe": True, "n_experts": 8, "top_k_mlp": 2, "hidden_dim": 24} | fields
    return with_numbers(lambda: moe.MixtureOfExperts(ModelConfig(**shape), nnx.Rngs(0)))


def numbers(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@nnx.jit
def choose(made, x):
    return moe.choose(jax.nn.softmax(made.router(x)), made.top_k, divides=True)


def results(form, made, x, dtype=jnp.float32):
    chosen, gates = choose(made, x)

    def total(x, gates, first, second):
        matrices = moe.Matrices(first.astype(dtype), second.astype(dtype))
        y = form(x.astype(dtype), chosen, gates, matrices, made.activate)
        return (y.astype(jnp.float32) ** 2).sum(), y

    return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(x, gates, made.gate_up[...], made.down[...])


def compare(found, expected, bound):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-4
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=bound * np.abs(other).max()
        )


@pytest.mark.parametrize(
    ("fields", "tokens", "dtype"),
    [
        ({}, 90, jnp.float32),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in itertools.product(
                (
                    {"n_experts": 2, "top_k_mlp": 1},
                    {"n_experts": 4},
                    {"n_experts": 16, "top_k_mlp": 3, "use_swiglu": False, "activation": "relu2"},
                ),
                (1, 7, 200),
                (jnp.float32, jnp.bfloat16),
            )
        ),
    ],
    ids=str,
)
def test_experts_are_those_of_every_expert(gpu, fields, tokens, dtype):
    made, x = layer(**fields), numbers(tokens, 32)
    assert moe.uses_ragged(tokens * made.top_k, made.n_experts, made.top_k)
    bound = 1e-5 if dtype == jnp.float32 else 2e-2
    compare(results(moe.experts, made, x, dtype), results(moe.dense, made, x, dtype), bound)


@pytest.mark.long
def test_tokens_of_one_expert_leave_the_others_without_gradient(gpu):
    made, x = layer(top_k_mlp=1), np.abs(numbers(50, 32))
    made.router.kernel[...] = jnp.zeros((32, 8)).at[:, 3].set(5.0)
    gradients, _ = results(moe.experts, made, x)
    for gradient in gradients[2:]:
        assert [bool(np.abs(each).max() > 0) for each in gradient] == [expert == 3 for expert in range(8)]
        assert np.isfinite(gradient).all()


def loss_and_gradients(fields, mesh=None):
    shape = {"dim": 32, "num_blocks": 2, "vocab_size": 50, "max_context": 32, "use_moe": True, "n_experts": 4}
    model = Transformer(ModelConfig(**shape | fields), nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    words = jax.random.randint(jax.random.key(3), (8, 17), 0, 50)

    def run(state, words):
        return jax.value_and_grad(lambda state: next_token_loss(nnx.merge(graphdef, state), words))(state)

    if mesh is None:
        return jax.jit(run)(state, words)
    with jax.set_mesh(mesh):
        return jax.jit(run)(replicate(state, mesh), replicate(words, mesh))


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        (fields, layout)
        for fields in (
            {},
            {"scan_layers": True},
            {"gradient_checkpointing": True},
            {"use_lora": True, "lora_targets": "all"},
        )
        for layout in (None, {}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2})
    ],
    ids=str,
)
def test_a_model_is_the_same_in_any_layout(interpreted, monkeypatch, fields, layout):
    """On one device and on eight; where each has its tokens, each runs the kernels for them."""
    expected = loss_and_gradients(fields)
    set_device(monkeypatch, H200)
    mesh = None if layout is None else make_mesh(**layout)
    found = loss_and_gradients(fields, mesh)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "experts", "line"),
    [
        (H200, (8, 2), ""),
        (H200, (3, 2), ""),  # less than half of the work would be left out
        (
            V100,
            (8, 2),
            "experts: the kernel needs compute capability 8.0, and this is a Tesla V100-SXM2-16GB: every expert "
            "computes every token, 4 times the work of the 2 of 8 that are chosen",
        ),
        (V100, (3, 2), ""),
        (
            SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X"),
            (64, 6),
            "11 times the work of the 6 of 64",
        ),
        (SimpleNamespace(platform="cpu", device_kind="cpu"), (8, 2), ""),
        (SimpleNamespace(platform="tpu", device_kind="TPU v5e"), (8, 2), ""),
    ],
)
def test_a_card_without_the_kernel_is_said_once(monkeypatch, caplog, device, experts, line):
    set_device(monkeypatch, device)
    moe._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = {moe.uses_ragged(4096, *experts) for _ in range(3)}
    assert found == {device.platform == "tpu" or (device is H200 and experts == (8, 2))}
    assert [line in record.getMessage() for record in caplog.records] == ([True] if line else [])


def test_tokens_that_the_devices_do_not_divide_are_computed_by_every_expert(monkeypatch, caplog):
    made, x = layer(), numbers(3, 5, 32)
    expected = nnx.jit(lambda made, x: made(x)[0])(made, x)
    set_device(monkeypatch, H200)
    moe._say_once.cache_clear()
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        found = nnx.jit(lambda made, x: made(x)[0])(replicate(made, mesh), replicate(x, mesh))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
    assert "the devices do not divide the tokens" in caplog.text
