import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.traced_flops import traced_flops
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.split import split_module
from roxxel_dist.model.transformer import Block, Transformer

SMALL = {"dim": 16, "num_blocks": 2, "vocab_size": 40, "max_context": 32, "head_size": 8}
MLA = {"mla": True, "down_dim_q": 8, "down_dim_kv": 8, "rope_dim": 4}
PLAIN = {"dropout_rate": 0.2, "gradient_checkpointing": True}
MOE = {"use_moe": True, "n_experts": 4, **PLAIN}


def build(**fields):
    return Transformer(ModelConfig(**SMALL | fields), nnx.Rngs(params=0, dropout=1))


def tokens(*shape):
    return jax.random.randint(jax.random.key(3), shape, 0, 40)


def packed():
    places = jnp.tile(jnp.arange(5), 4)[:17]
    segments = jnp.arange(17) // 5
    return Packed(tokens(2, 17), jnp.stack([segments] * 2), jnp.stack([places] * 2))


@pytest.mark.parametrize(
    ("fields", "make"),
    [
        (PLAIN, packed),
        *(pytest.param(fields, packed, marks=pytest.mark.long) for fields in (MOE, MLA | {"num_blocks": 3})),
        pytest.param(PLAIN | {"num_blocks": 3}, lambda: tokens(2, 9), marks=pytest.mark.long),
    ],
    ids=["plain", "experts", "latent", "unpacked"],
)
def test_the_same_weights_losses_and_gradients(fields, make):
    def look(scan):
        model = build(**fields, scan_layers=scan)
        parts, params, rest, settings = split_module(model)

        def loss(params, batch):
            merged = parts.merge(params, rest, settings, training=True)
            return next_token_loss(merged, batch), parts.rest_of(merged)

        return params, rest, jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)

    batch, blocks = make(), fields.get("num_blocks", 2)
    (params, rest, unrolled), (same, _, scanned) = look(False), look(True)
    for name, leaf in same.items():
        assert np.array_equal(leaf, params[name]), name
        assert len(leaf) == blocks or not name.startswith("blocks."), name
    ((one, rest_after), grads), ((other, scanned_after), scanned_grads) = unrolled, scanned
    assert float(other) == pytest.approx(float(one), rel=1e-6)
    for name, leaf in scanned_grads.items():
        np.testing.assert_allclose(leaf, grads[name], atol=1e-6, err_msg=name)
    for after in (rest_after, scanned_after):
        counts = [leaf for name, leaf in after.items() if name.endswith("count")]
        assert all(np.array_equal(leaf, [2] * blocks) for leaf in counts), "a block draws twice"
        assert bool(counts) == bool(fields.get("dropout_rate")), "random streams, if any"
        assert {name: leaf.shape for name, leaf in after.items()} == {name: leaf.shape for name, leaf in rest.items()}


def test_each_block_begins_as_it_would_alone():
    model, config = build(num_blocks=3, use_moe=True), ModelConfig(**SMALL, use_moe=True)
    rngs = nnx.Rngs(params=0, dropout=1)
    rngs.params()  # the embedding's
    state = nnx.split(model.blocks, nnx.Param, ...)[1]
    for i in range(3):
        block = Block(replace(config, num_blocks=3), None, rngs)
        alone = nnx.split(block, nnx.Param, ...)[1]
        for one, leaf in zip(jax.tree.leaves(alone), jax.tree.leaves(state), strict=True):
            assert np.array_equal(one, leaf[i])


def test_the_balance_of_experts_is_added_up():
    losses = [nnx.jit(token_losses)(build(use_moe=True, scan_layers=scan), tokens(2, 9)) for scan in (False, True)]
    for name in ("loss", "balance_loss"):
        assert float(losses[1][name]) == pytest.approx(float(losses[0][name]), rel=1e-6)


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
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, atol=1e-5)


def test_a_block_is_compiled_once_however_many_there_are():
    def program(blocks, scan):
        config = ModelConfig(**SMALL | {"num_blocks": blocks}, scan_layers=scan)
        parts, *leaves = split_module(Transformer(config, nnx.Rngs(params=0)))
        lowered = jax.jit(lambda *given: parts.merge(*given[:-1], training=True)(given[-1])).lower(
            *leaves, tokens(2, 9)
        )
        return lowered.as_text().count("stablehlo.dot_general")

    few, many = program(2, True), program(4, True)
    assert few == many > 0
    assert program(4, False) > 2 * many


def test_work_is_counted_alike():
    for fields in (MOE, MLA):
        stack, blocks = (nnx.eval_shape(lambda s=s, f=fields: build(**f, scan_layers=s)) for s in (True, False))
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


def test_every_level_of_checkpoints_gives_the_same_gradient():
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, 40)

    def gradient(level):
        model = build(dropout_rate=0.2, gradient_checkpointing=level, num_blocks=1)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return jax.jit(jax.grad(lambda params: next_token_loss(nnx.merge(graph, params, rest, copy=True), tokens)))(
            params
        )

    plain = gradient(False)
    for level in (True, "products"):
        for mine, whole in zip(jax.tree.leaves(gradient(level)), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(mine, whole, atol=1e-6)


def test_a_level_of_checkpoints_that_there_is_not():
    with pytest.raises(UserError, match="gradient_checkpointing is 'dots': it must be one of False, True, products"):
        build(gradient_checkpointing="dots")
