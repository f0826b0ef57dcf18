import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import transformer

from roxxel_dist.data.packing import Packed
from roxxel_dist.devices.traced_flops import traced_flops
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Block, Transformer
from roxxel_dist.process.exit_codes import UserError

SMALL = {"dim": 16, "num_blocks": 2, "vocab_size": 40, "max_context": 32, "head_size": 8}
MLA = {"mla": True, "down_dim_q": 8, "down_dim_kv": 8, "rope_dim": 4}
PLAIN = {"dropout_rate": 0.2}
MOE = {"use_moe": True, "n_experts": 4, **PLAIN}


def build(**fields):
    return transformer(**SMALL | fields)


def tokens(*shape):
    return np.random.default_rng(3).integers(0, 40, shape, np.int32)


def packed():
    places = np.tile(np.arange(5, dtype=np.int32), 4)[:17]
    segments = np.arange(17, dtype=np.int32) // 5
    return Packed(tokens(2, 17), np.stack([segments] * 2), np.stack([places] * 2))


@pytest.mark.parametrize(
    ("fields", "make", "ways"),
    [
        (MOE, packed, [(True, "products")]),
        pytest.param(MOE, packed, [(True, True), (False, "products")], marks=pytest.mark.long),
        *(
            pytest.param(fields, packed, [(True, True), (False, "products")], marks=pytest.mark.long)
            for fields in (PLAIN, MLA | {"num_blocks": 3})
        ),
        pytest.param(
            *(PLAIN | {"num_blocks": 3}, lambda: tokens(2, 9), [(True, True), (False, "products")]),
            marks=pytest.mark.long,
        ),
    ],
    ids=["experts", "experts, one by one", "plain", "latent", "unpacked"],
)
def test_a_scan_and_every_level_of_checkpoints_give_the_same(fields, make, ways):
    batch, blocks = make(), fields.get("num_blocks", 2)

    def look(scan, level):
        parts, params, rest, settings = split_module(build(**fields, scan_layers=scan, gradient_checkpointing=level))

        def loss(params, batch):
            merged = parts.merge(params, rest, settings, training=True)
            return next_token_loss(merged, batch), parts.rest_of(merged)

        (found, after), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
        counts = [leaf for name, leaf in after.items() if name.endswith("count")]
        assert all(np.array_equal(leaf, [2] * blocks) for leaf in counts), "a block draws twice"
        assert bool(counts) == bool(fields.get("dropout_rate")), "random streams, if any"
        assert {name: leaf.shape for name, leaf in after.items()} == {name: leaf.shape for name, leaf in rest.items()}
        return float(found), gradients

    expected, whole = look(False, False)
    for scan, level in ways:
        found, gradients = look(scan, level)
        assert found == pytest.approx(expected, rel=1e-6)
        for name, leaf in gradients.items():
            assert len(leaf) == blocks or not name.startswith("blocks."), name
            np.testing.assert_allclose(leaf, whole[name], atol=1e-6, err_msg=name)


def test_each_block_begins_as_it_would_alone():
    config, scanned = (ModelConfig(**SMALL, use_moe=True, scan_layers=scan) for scan in (False, True))

    def stack_of(config):
        return nnx.state(Transformer(config, nnx.Rngs(params=0, dropout=1)).blocks, nnx.Param)

    @jax.jit
    def made():
        rngs = nnx.Rngs(params=0, dropout=1)
        rngs.params()  # the embedding's
        blocks = [Block(config, None, rngs) for _ in range(2)]
        return stack_of(config), [nnx.state(one, nnx.Param) for one in blocks]

    stack, blocks = jax.tree.map(np.asarray, made())
    for i, alone in enumerate(blocks):
        for one, leaf in zip(jax.tree.leaves(alone), jax.tree.leaves(stack), strict=True):
            assert np.array_equal(one, leaf[i])
    programs = {str(jax.make_jaxpr(lambda one=one: jax.tree.leaves(stack_of(one)))()) for one in (config, scanned)}
    assert len(programs) == 1, "with a scan or without, they begin by one program"


@pytest.mark.parametrize(
    ("fields", "cuts"),
    [({"sliding_window": True, "context_window": 4}, (6,)), pytest.param(MLA, (7, 8), marks=pytest.mark.long)],
)
def test_reading_piece_by_piece(fields, cuts):
    model, x = build(**fields, scan_layers=True), tokens(2, 12)
    model.eval()
    run = nnx.jit(lambda model, x, cache=None: model(x, cache=cache))
    expected = run(build(**fields), x)
    np.testing.assert_allclose(run(model, x), expected, atol=1e-5)
    cache, found = model.empty_cache(2), []
    for begin, end in itertools.pairwise((0, *cuts, 12)):
        logits, cache = run(model, x[:, begin:end], cache)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_a_block_is_compiled_once_however_many_there_are():
    def program(blocks, scan):
        config = ModelConfig(**SMALL | {"num_blocks": blocks}, scan_layers=scan)
        parts, *leaves = split_module(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
        lowered = jax.jit(lambda *given: parts.merge(*given[:-1], training=True)(given[-1])).lower(
            *leaves, tokens(2, 9)
        )
        return lowered.as_text().count("stablehlo.dot_general")

    few, many = program(2, True), program(4, True)
    assert few == many > 0
    assert program(4, False) > 2 * many


def test_work_is_counted_alike():
    for fields in (MOE, MLA):
        configs = [ModelConfig(**SMALL | fields, scan_layers=scan) for scan in (True, False)]
        stack, blocks = (nnx.eval_shape(lambda one=one: Transformer(one, nnx.Rngs(0, dropout=1))) for one in configs)
        assert stack.flops_per_token(9) == blocks.flops_per_token(9)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_checkpoints_compute_again(scan):
    """Of a long row: the products with weights and not attention; products: neither."""
    shape = {"max_context": 2000, "scan_layers": scan, "dim": 32}

    def flops(level):
        model = build(**shape, gradient_checkpointing=level)
        graph, state = nnx.split(model)

        def total(state, tokens):
            return nnx.merge(graph, state, copy=True).states(tokens)[0].sum()

        tokens = jax.ShapeDtypeStruct((1, 1100), jnp.int32)
        return traced_flops(jax.jit(jax.grad(total, allow_int=True)).trace(state, tokens).jaxpr)

    plain, blocks, products = (flops(level) for level in (False, True, "products"))
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(build(**shape).blocks, nnx.Param)) if x.ndim > 2)
    again = 2 * 1100 * weights
    assert 0.5 * again < blocks - plain <= again
    assert products == plain


def test_a_level_of_checkpoints_that_there_is_not():
    with pytest.raises(UserError, match="gradient_checkpointing is 'dots': it must be one of False, True, products"):
        build(gradient_checkpointing="dots")
