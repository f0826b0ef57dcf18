"""Experts with a capacity, against a loop over tokens that drops by hand."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import transformer, with_numbers

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts.moe import Capacity, MixtureOfExperts
from roxxel_dist.model.generate import generate
from roxxel_dist.model.loss import token_losses

DIM = 16
SHAPE = {"dim": DIM, "num_blocks": 1, "use_moe": True}
long = pytest.mark.long


def layer(**fields):
    return with_numbers(lambda: MixtureOfExperts(ModelConfig(**SHAPE | fields), nnx.Rngs(0)))


def tokens(rows, length):
    return np.random.default_rng(1).normal(size=(rows, length, DIM)).astype(np.float32)


def by_hand(moe, x, most):
    """(what comes out in float64, the share of choices that are dropped): one token after another."""
    router, first, down = (np.asarray(a[...], np.float64) for a in (moe.router.kernel, moe.gate_up, moe.down))
    out, dropped = np.zeros(x.shape), 0
    for b, row in enumerate(np.float64(x)):
        taken = np.zeros(moe.n_experts, int)
        for i, token in enumerate(row):
            p = np.exp(token @ router)
            best = np.argsort(-p)[: moe.top_k]
            gates = p[best] / (p[best].sum() if moe.divides else p.sum())
            for expert, gate in zip(best, gates, strict=True):
                taken[expert] += 1
                if taken[expert] > most:
                    dropped += 1
                    continue
                gate_up = np.einsum("d,dpf->pf", token, first[expert])
                out[b, i] += gate * ((gate_up[0] / (1 + np.exp(-gate_up[0])) * gate_up[1]) @ down[expert])
    return out, dropped / (x.shape[0] * x.shape[1] * moe.top_k)


@pytest.mark.parametrize(
    ("experts", "top_k", "factor", "length", "most"),
    [
        (4, 2, 0.5, 30, 8),
        (8, 3, 1.1, 20, 9),  # of 8.25
        *(pytest.param(*case, marks=long) for case in ((8, 1, 1.25, 32, 5), (4, 4, 0.9, 16, 15), (2, 1, 0.001, 9, 1))),
    ],
)
def test_each_expert_takes_the_first_choices_of_a_row(experts, top_k, factor, length, most):
    moe, x = layer(n_experts=experts, top_k_mlp=top_k, expert_capacity_factor=factor), tokens(3, length)
    y, balance = nnx.jit(lambda moe, x: moe(x))(moe, x)
    expected, dropped = by_hand(moe, x, most)
    assert dropped > 0
    np.testing.assert_allclose(y, expected, atol=1e-6 * np.abs(expected).max())
    assert float(balance.dropped) == pytest.approx(dropped)


@pytest.mark.parametrize(
    ("factor", "length", "most"),
    [(1.1, 100, 55), (0.001, 7, 1), (1.25, 33, 21), (2, 33, 33), (9.0, 33, 33)],
)
def test_the_capacity_is_rounded_up_and_at_most_all_tokens(factor, length, most):
    """Of 4 experts, 2 for each token. 1.1 x 50 is 55, and not the 56 of floating point."""
    capacity = Capacity.of_rows(factor, length, 2, 4)
    assert capacity.most == most
    assert capacity.drops == (most < length)


def gradients(moe, x, mesh=None):
    graphdef, state = nnx.split(moe)

    def loss(state, x):
        y, balance = nnx.merge(graphdef, state)(x)
        return (y**2).mean() + balance.loss, (y, balance.dropped)

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    if mesh is None:
        return run(state, x)
    with jax.set_mesh(mesh):
        return run(state, x)


MESHES = {
    "rows": lambda: make_mesh(8),
    "experts": lambda: make_mesh(8, expert=4),
    "experts and tensor": lambda: make_mesh(8, expert=2, tensor=2),
    "tokens": lambda: phase_mesh(make_mesh(8), 4),
    "experts and tokens": lambda: phase_mesh(make_mesh(8, expert=4), 4),
    "rows that are too few": lambda: make_mesh(3),
}


@pytest.mark.parametrize("name", [name if name == "experts" else pytest.param(name, marks=long) for name in MESHES])
@pytest.mark.parametrize("factor", [1.0])
def test_what_is_dropped_does_not_depend_on_the_devices(name, factor):
    """Each of them drops the same choices, with the same gradients."""
    moe, x = layer(n_experts=8, expert_capacity_factor=factor), tokens(8, 16)
    expected, found = gradients(moe, x), gradients(moe, x, MESHES[name]())
    assert float(expected[1][1]) > 0.05
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * np.abs(other).max())


@long
def test_a_capacity_that_drops_nothing_changes_nothing():
    """That of all tokens is the program without one; a smaller one, that no row needs, gives the same numbers."""
    x = tokens(2, 40)
    (expected, (y, _)) = gradients(layer(n_experts=8), x)
    for factor, same in ((4.0, True), (2.5, False)):
        grads, (found, dropped) = gradients(layer(n_experts=8, expert_capacity_factor=factor), x)
        assert float(dropped) == 0
        for one, other in zip(jax.tree.leaves((grads, found)), jax.tree.leaves((expected, y)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if same else 1e-6 * np.abs(other).max())


WORDS = np.random.default_rng(3).integers(0, 50, (2, 17), np.int32)
FIELDS = SHAPE | {"vocab_size": 50, "max_context": 64, "init_std": 0.3}


def test_nothing_is_dropped_in_evaluation():
    """The losses of a validation are those of the model without a capacity; those of training are not."""
    losses, limited = nnx.jit(token_losses), transformer(**FIELDS, expert_capacity_factor=0.25)
    trained = losses(limited, WORDS)
    assert float(trained["expert_dropped"]) > 0.5
    limited.eval()
    expected, found = losses(transformer(**FIELDS), WORDS), losses(limited, WORDS)
    assert found.keys() == expected.keys()
    assert float(found["loss"]) == float(expected["loss"]) != float(trained["loss"])


@long
def test_text_is_that_of_the_model_without_a_capacity():
    """Read with a cache, in training mode too; and its likeliest tokens are those of a call without a cache."""
    plain, limited = transformer(**FIELDS), transformer(**FIELDS, expert_capacity_factor=0.25)
    texts = [generate(model, [1, 2, 3], 12, max_context=64, temperature=0) for model in (plain, limited)]
    assert texts[0] == texts[1]
    limited.eval()
    logits = nnx.jit(lambda model, x: model(x))(limited, np.asarray([[1, 2, 3, *texts[1]]], np.int32))
    assert np.argmax(logits[0, 2:-1], 1).tolist() == texts[1]
