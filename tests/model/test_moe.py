"""The mixture of experts, against a plain loop over tokens and against computing every expert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import transformer, with_numbers

from roxxel_dist.cluster.mesh import make_mesh, replicate
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts.exchange import block_sizes
from roxxel_dist.model.experts.moe import Matrices, MixtureOfExperts, balance_of, by_device, choose, dense, ragged
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.mlp import activation
from roxxel_dist.model.transformer import Transformer

DIM = 16
SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": 50, "max_context": 64, "use_moe": True}


def layer(**fields):
    """A mixture whose router has something to say: as it begins, all experts are nearly as probable."""
    shape = {"dim": DIM, "num_blocks": 1, "use_moe": True, "n_experts": 4, "top_k_mlp": 2} | fields
    return with_numbers(lambda: MixtureOfExperts(ModelConfig(**shape), nnx.Rngs(0)))


def tokens(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=(*shape, DIM)).astype(np.float32)


BENDS = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
    "tanh": np.tanh,
}


def by_hand(moe, x, top_k, bend="silu"):
    """(what comes out, balance): one token after another, in float64."""
    router, first, down = (np.asarray(a[...], np.float64) for a in (moe.router.kernel, moe.gate_up, moe.down))
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    out, probabilities, count = np.zeros_like(rows), [], np.zeros(len(down))
    for n, row in enumerate(rows):
        logits = row @ router
        p = np.exp(logits - logits.max())
        p /= p.sum()
        probabilities.append(p)
        best = np.argsort(-p)[:top_k]
        gates = p[best] / p[best].sum() if top_k > 1 else p[best]
        for expert, gate in zip(best, gates, strict=True):
            gate_up = np.einsum("d,dpf->pf", row, first[expert])
            inner = BENDS[bend](gate_up[0]) * (gate_up[1] if len(gate_up) == 2 else 1)
            out[n] += gate * (inner @ down[expert])
            count[expert] += 1
    return out.reshape(x.shape), len(down) * (count / count.sum() * np.mean(probabilities, 0)).sum()


def every_expert(moe, x):
    """The same, each expert computed for each token: what the gradients are compared with."""
    rows = x.reshape(-1, x.shape[-1])
    chosen, gates = choose(jax.nn.softmax(rows @ moe.router.kernel[...]), moe.top_k, divides=moe.divides)
    weights = (jax.nn.one_hot(chosen, moe.n_experts) * gates[..., None]).sum(1)
    inner = moe.activate(jnp.einsum("nd,edpf->nepf", rows, moe.gate_up[...]))
    return jnp.einsum("ne,neh,ehd->nd", weights, inner, moe.down[...]).reshape(x.shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k_mlp": 1},
        {"n_experts": 8, "top_k_mlp": 3, "use_swiglu": False, "activation": "relu2"},
        *(
            pytest.param(fields, marks=pytest.mark.long)
            for fields in (
                {},
                {"n_experts": 1, "top_k_mlp": 1},
                {"n_experts": 3, "top_k_mlp": 3, "activation": "tanh"},
            )
        ),
    ],
)
def test_against_a_loop_over_tokens(fields):
    check_against_the_loop(layer(**fields), tokens(3, 50), fields.get("activation", "silu"))


def test_a_single_token():
    check_against_the_loop(layer(n_experts=8), tokens(1, 1))


def check_against_the_loop(moe, x, bend="silu"):
    expected, balance = by_hand(moe, x, moe.top_k, bend)
    assert np.abs(expected).max() > 0.05
    y, found = nnx.jit(lambda m, x: m(x))(moe, x)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-5)  # a few units of float32 where tests compile fast
    assert float(found.loss) == pytest.approx(balance, rel=1e-5)


@pytest.mark.parametrize("busy", [[0, 1], [3, 1]])
def test_all_tokens_to_the_same_experts(busy):
    """The others get none, and no gradient either."""
    moe, x, router = layer(), np.abs(tokens(2, 60)), np.zeros((DIM, 4), np.float32)
    router[:, busy] = 5.0, 4.0
    moe.router.kernel[...] = jax.device_put(router)
    expected, balance = by_hand(moe, x, 2)
    run = nnx.jit(nnx.grad(lambda m: ((found := m(x))[0].sum(), found), has_aux=True))
    grads, (y, found) = run(moe)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-5)
    assert float(found.loss) == pytest.approx(balance, rel=1e-5)
    used = [bool(np.abs(of_one).max() > 0) for of_one in np.asarray(grads.down[...])]
    assert used == [expert in busy for expert in range(4)]


def gradients(call, moe, x):
    return nnx.jit(nnx.grad(lambda m, x: (call(m, x) ** 2).sum(), argnums=(0, 1)))(moe, x)


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"top_k_mlp": 1, "use_swiglu": False, "activation": "gelu"}, marks=pytest.mark.long)]
)
def test_gradients_are_those_of_computing_every_expert(fields):
    moe, x = layer(**fields), tokens(2, 70)
    found, expected = gradients(lambda m, x: m(x)[0], moe, x), gradients(every_expert, moe, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_both_forms_are_the_same():
    """`ragged` is what runs on a TPU; here it is only slower."""
    moe, x = layer(n_experts=5), tokens(90)
    chosen, gates = nnx.jit(lambda moe, x: choose(jax.nn.softmax(moe.router(x)), 2, divides=True))(moe, x)

    def run(form):
        def total(x, gates, first, second):
            y = form(x, chosen, gates, Matrices(first, second), moe.activate)
            return (y**2).sum(), y

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(x, gates, moe.gate_up[...], moe.down[...])

    for one, other in zip(jax.tree.leaves(run(dense)), jax.tree.leaves(run(ragged)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@jax.jit
@partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
def squares_by_device(x, gates, first, second, chosen):
    y = by_device(x, chosen, gates, Matrices(first, second), activation("silu", gated=True))
    return (y**2).sum(), y


@pytest.mark.parametrize("busy", [None, [3, 5], [0, 1]])
def test_no_token_is_dropped_however_uneven_the_load(busy):
    """Each device sends all it has to two others, or to one: more than the first block of rows has room for."""
    x, rng = tokens(512), np.random.default_rng(0)
    chosen = np.argsort(rng.random((512, 8)), 1)[:, :2] if busy is None else np.tile(busy, (512, 1))
    moe, gates = layer(n_experts=8), rng.random((512, 2)).astype(np.float32)
    args = x, gates, moe.gate_up[...], moe.down[...], chosen.astype(np.int32)
    expected = squares_by_device(*args)
    with jax.set_mesh(make_mesh(8, expert=4)):
        found = squares_by_device(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * np.abs(other).max())


@pytest.mark.parametrize(
    ("rows", "most", "devices", "sizes"),
    [
        (8192, 4096, 8, (1152, 288)),
        (8192, 8192, 4, (2304, 576)),
        (64, 64, 8, (16, 16)),
        (2, 1, 2, (64, 64)),
        (12, 12, 3, (128, 128)),
    ],
)
def test_blocks_have_room_for_an_even_load_and_an_eighth_more(rows, most, devices, sizes):
    assert block_sizes(rows, most, devices) == sizes
    assert all(size * devices % 128 == 0 for size in sizes)


def test_balance_is_one_when_all_are_equally_busy():
    even, one_sided = np.full((8, 4), 0.25, np.float32), np.zeros((8, 4), np.float32)
    chosen = np.arange(16).reshape(8, 2) % 4
    one_sided[:, 2] = 1
    assert float(jax.jit(balance_of)(even, chosen).loss) == pytest.approx(1)
    assert float((one := jax.jit(balance_of)(one_sided, np.full((8, 1), 2))).loss) == pytest.approx(4)
    assert np.asarray(one.load).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("shape", "mesh_is_set"),
    [
        ((16, 6), True),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (((3, 7), True), ((2, 48), True), ((16, 6), False), ((2, 48), False), ((3, 7), False))
        ),
    ],
)
def test_the_same_on_eight_devices(shape, mesh_is_set):
    """Rows over the devices, tokens over them, and a number of tokens that they do not divide."""
    moe, x, mesh = layer(), tokens(*shape), make_mesh()
    graphdef, state = nnx.split(moe)

    def run(state, x):
        def loss(state, x):
            y, balance = nnx.merge(graphdef, state)(x)
            return (y**2).mean() + balance.loss, y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)

    expected = jax.jit(run)(state, x)
    spec = next((s for s in (P("data"), P(None, "data")) if shape[len(s) - 1] % 8 == 0), P())
    args = replicate(state, mesh), jax.device_put(x, NamedSharding(mesh, spec))
    if mesh_is_set:
        with jax.set_mesh(mesh):
            compiled = jax.jit(run).lower(*args).compile()
    else:
        compiled = jax.jit(run).lower(*args).compile()
    found = compiled(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_in_bfloat16_the_router_is_exact():
    moe, x = layer(), tokens(2, 100).astype(jnp.bfloat16)
    graphdef, state = nnx.split(moe)
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), state)

    @jax.jit
    def run(state, x):
        def total(state):
            found = nnx.merge(graphdef, state)(x)
            return (found[0].astype(jnp.float32) ** 2).sum(), found

        return jax.grad(total, has_aux=True)(state)

    grads, (y, balance) = run(rounded, x)
    exact, (expected, expected_balance) = run(jax.tree.map(np.float32, rounded), np.float32(x))
    assert (y.dtype, balance.loss.dtype) == (jnp.bfloat16, jnp.float32)
    assert float(balance.loss) == float(expected_balance.loss), "the same choices and probabilities"
    np.testing.assert_allclose(np.float32(y), expected, atol=0.02 * np.abs(expected).max())
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(one), other, atol=0.05 * np.abs(other).max())


def words(*shape):
    return np.random.default_rng(3).integers(0, 50, shape, np.int32)


def model(**fields):
    return transformer(**SMALL | fields)


def test_the_loss_and_the_balance_loss():
    """`token_losses` has the cross-entropy and the balance loss apart; training minimises their sum."""
    one, x = model(alpha_balance=0.5, num_blocks=2), words(4, 33)

    @nnx.jit
    def found(model, x):
        states, balance, _ = model.states(x[:, :-1])
        return balance.loss, model.logits(states), model(x[:, :-1]), token_losses(model, x), next_token_loss(model, x)

    balance, logits, output, losses, whole = found(one, x)
    assert np.array_equal(logits, output)
    assert set(losses) == {"loss", "row_loss", "balance_loss", "expert_load"}
    assert losses["expert_load"].shape == (2, 4)
    np.testing.assert_allclose(losses["expert_load"].sum(1), 1, rtol=1e-6)
    assert float(losses["balance_loss"]) == float(balance)
    assert 0.5 * 2 < float(balance) < 0.5 * 2 * 4, "of two blocks, from even to all on one of 4 experts"
    assert float(whole) == pytest.approx(float(losses["loss"]) + float(balance))
    balance_alone = nnx.jit(lambda model, x: model.states(x)[1].loss)
    assert float(balance_alone(model(alpha_balance=0.0, num_blocks=1), x)) == 0
    assert set(nnx.eval_shape(token_losses, model(use_moe=False, num_blocks=1), x)) == {"loss", "row_loss"}


@pytest.mark.long
def test_checkpointed_gradients_are_the_same():
    plain, remat = (
        nnx.jit(nnx.value_and_grad(next_token_loss))(
            model(gradient_checkpointing=g, alpha_balance=0.3, num_blocks=1), words(4, 17)
        )
        for g in (False, True)
    )
    assert float(plain[0]) == pytest.approx(float(remat[0]), rel=1e-6)
    for a, b in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(remat[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("swiglu", [True, False])
def test_flops_are_those_of_the_experts_that_a_token_meets(swiglu):
    """Four experts, of which two: the router, and two feed-forward layers."""
    configs = (ModelConfig(**SMALL | {"use_swiglu": swiglu, "use_moe": of_experts}) for of_experts in (False, True))
    dense, moe = (nnx.eval_shape(lambda config=config: Transformer(config, nnx.Rngs(0))) for config in configs)
    matrices = sum(p.size for p in jax.tree.leaves(nnx.state(dense.blocks.feedforward, nnx.Param)))  # of both blocks
    assert moe.flops_per_token(20) - dense.flops_per_token(20) == 6 * (matrices + 2 * 32 * 4)
    config = ModelConfig(**SMALL | {"use_swiglu": swiglu, "expert_capacity_factor": 0.5})
    limited = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    assert limited.flops_per_token(20) - dense.flops_per_token(20) == 6 * 2 * 32 * 4, "one of them, a mean over tokens"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k_mlp": 5}, "top_k_mlp is 5: a token cannot go through more experts than n_experts, which is 4"),
        ({"top_k_mlp": 0}, "top_k_mlp is 0: it must be at least 1"),
        ({"n_experts": 0}, "n_experts is 0: it must be at least 1"),
        ({"alpha_balance": -0.1}, "alpha_balance is -0.1: it must be a number of at least 0"),
        ({"alpha_balance": float("nan")}, "alpha_balance is nan"),
        ({"expert_capacity_factor": 0.0}, "expert_capacity_factor is 0.0: it must be above 0, and finite"),
        ({"expert_capacity_factor": -1.25}, "expert_capacity_factor is -1.25"),
        ({"expert_capacity_factor": float("nan")}, "expert_capacity_factor is nan"),
        ({"expert_capacity_factor": float("inf")}, "expert_capacity_factor is inf"),
    ],
)
def test_experts_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(use_moe=True, **fields)
    ModelConfig(**fields)  # means nothing without the switch
