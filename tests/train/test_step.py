import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import module
from states import init_state

from roxxel_dist.cluster.mesh import make_mesh, scalars_on
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import InitialState, NamedOptimizer, as_optimizer
from roxxel_dist.train.step.step import fetch, make_eval_step, make_step, unpack_loss

TOKENS = np.random.default_rng(0).integers(0, 50, (16, 33)).astype(np.int32)


def small(**fields):
    return module(dim=32, vocab_size=50, **fields)


def prepare(model, optimizer, loss_fn=next_token_loss, dtype=None, **options):
    """(state, (state, batch) -> (state, metrics), batch, (state, batch) -> validation loss)."""
    mesh, optimizer = make_mesh(2), as_optimizer(optimizer)
    parts, state, settings = init_state(model, InitialState(optimizer), mesh, dtype=dtype)
    settings |= scalars_on(mesh, optimizer.settings(100) | {"spike_factor": 0.0})
    sharding = NamedSharding(mesh, P("data", None))
    step = make_step(parts, loss_fn, optimizer, state, sharding, **options)
    evaluate = make_eval_step(parts, loss_fn, options.get("compute_dtype"))
    batch = jax.device_put(TOKENS, sharding)
    return (
        state,
        lambda state, batch: step(state, settings, batch),
        batch,
        lambda state, batch: evaluate(state.params, state.rest, settings, batch),
    )


def test_a_step_is_a_gradient_step():
    """Against NNX's own gradient and optax by hand, whole and in two micro-batches. The user's model survives it."""
    net = small()
    of_net = nnx.jit(nnx.value_and_grad(next_token_loss))
    loss, grads = of_net(net, TOKENS)
    before = (np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(net, nnx.Param)))
    expected = [p - 0.1 * np.asarray(g) for p, g in zip(before, jax.tree.leaves(grads), strict=True)]
    for count in (1, 2):
        state, step, batch, _ = prepare(net, optax.sgd(0.1), grad_accum=count)
        state, metrics = step(state, batch)
        assert fetch(metrics).scalars["loss"] == pytest.approx(float(loss), rel=1e-6)
        assert int(state.step) == 1
        for got, want in zip(state.params.values(), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
        assert of_net(net, TOKENS)[0] == loss


def test_accumulation_changes_no_mean_over_the_tokens_that_count():
    """Packed documents: one micro-batch has many starts of documents, which do not count, and the other has none."""
    rows = np.arange(16)[:, None]
    segments = np.where(rows % 2, np.arange(33)[None] // 2, 0)  # micro-batch i takes every second row from i
    places = [np.broadcast_to(array, (16, 33)).astype(np.int32) for array in (segments, np.arange(33))]
    results = []
    for loss_fn, count in ((token_losses, 1), (token_losses, 2), (next_token_loss, 2)):
        state, step, batch, _ = prepare(small(), optax.sgd(0.1), loss_fn, grad_accum=count)
        state, metrics = step(state, Packed(batch, *jax.device_put(places, batch.sharding)))
        results.append((fetch(metrics).scalars, state.params))
    whole, params = results[0]
    assert set(whole) == {"loss", "grad_norm", "update_norm"}
    for scalars, found in results[1:]:
        assert set(scalars) == set(whole)
        assert scalars["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert scalars["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
        for one, two in zip(params.values(), found.values(), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-6)


def test_sums_of_micro_batches_in_bfloat16_lose_nothing_small():
    """256 + 0.5 is 256 in bfloat16; the mean of one gradient of 256 and seven of 0.5 is 32.4, and not 32."""

    class Scale(nnx.Module):
        def __init__(self):
            self.by = nnx.Param(jax.device_put(np.zeros((), jnp.bfloat16)))

    state, step, batch, _ = prepare(Scale(), optax.sgd(1.0), lambda net, batch: net.by * batch.mean(), grad_accum=8)
    rows = np.where(np.arange(16)[:, None] % 8 == 0, 256.0, 0.5).astype(np.float32)
    state, metrics = step(state, jax.device_put(np.broadcast_to(rows, (16, 33)), batch.sharding))
    assert fetch(metrics).scalars["grad_norm"] == pytest.approx(32.5)
    assert float(*state.params.values()) == -32.5


def test_random_streams_advance_and_evaluation_leaves_them_alone():
    state, step, batch, evaluate = prepare(small(dropout_rate=0.5), optax.sgd(0.0))
    before = float(evaluate(state, batch)["loss"])
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(fetch(metrics).scalars["loss"])
    assert len(set(losses)) == 3
    assert float(evaluate(state, batch)["loss"]) == before


@pytest.mark.parametrize(
    ("result", "loss", "names"),
    [
        (np.float32(2), 2, set()),
        ((np.float32(2), {"accuracy": np.float32(1), "logits": np.zeros(3)}), 2, {"accuracy"}),
        ((np.float32(2), np.float32(5)), 2, {"aux"}),
        ({"loss": np.float32(2), "bal": np.float32(0)}, 2, {"bal"}),
    ],
)
def test_what_a_loss_function_may_return(result, loss, names):
    found = unpack_loss(result)
    assert float(found.loss) == loss
    assert set(found.scalars) == names


def test_what_it_may_not_return():
    with pytest.raises(ValueError, match='without "loss": its keys are a, b'):
        unpack_loss({"a": 1.0, "b": 2.0})
    with pytest.raises(ValueError, match=r"an array of shape \(4,\)"):
        unpack_loss(np.zeros(4))
    with pytest.raises(ValueError, match=r"returned a list of 2: return a scalar, a tuple \(loss, aux\), or a dict"):
        unpack_loss([np.float32(1), {}])
    with pytest.raises(ValueError, match="returned a tuple of 3: return a scalar"):
        unpack_loss((np.float32(1), {}, np.float32(2)))


@pytest.mark.parametrize(
    ("result", "value", "name"),
    [
        ({"loss": np.float32(1), "what": "hello"}, "'hello'", "'what'"),
        ((np.float32(1), {"what": None}), "None", "'what'"),
        ((np.float32(1), [1.0]), r"\[1.0\]", "'aux'"),
        ({"loss": np.float32(1), "parts": {"a": 1.0}}, r"\{'a': 1.0\}", "'parts'"),
        ({"loss": np.float32(1), "row_loss": [1.0]}, r"\[1.0\]", "'row_loss'"),
        ("1.0", "'1.0'", "'loss'"),
    ],
)
def test_a_value_that_is_no_number_is_named(result, value, name):
    with pytest.raises(ValueError, match=f"the loss function returned {value} as {name}: each value must be a number"):
        unpack_loss(result)


def test_every_scalar_of_the_loss_reaches_the_metrics():
    def loss_fn(model, batch):
        loss = next_token_loss(model, batch)
        return loss, {"perplexity": jnp.exp(loss)}

    optimizer = NamedOptimizer(OptimizerConfig(lr=0.5, lr_schedule="constant", warmup_steps=0))
    state, step, batch, _ = prepare(small(), optimizer, loss_fn, grad_accum=2)
    scalars = fetch(step(state, batch)[1]).scalars
    assert set(scalars) == {"loss", "perplexity", "grad_norm", "update_norm", "lr"}
    assert scalars["lr"] == 0.5


@pytest.mark.parametrize("grad_accum", [pytest.param(1, marks=pytest.mark.long), 4])
def test_the_losses_of_rows_come_in_the_order_of_the_rows(grad_accum):
    def loss_fn(model, batch):
        logits = model(batch[:, :-1])
        rows = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(1)
        return {"loss": rows.mean(), "row_loss": rows}

    net = small()
    state, step, batch, _ = prepare(net, optax.sgd(0.1), loss_fn, grad_accum=grad_accum)
    expected = nnx.jit(loss_fn)(net, TOKENS)["row_loss"]
    np.testing.assert_allclose(fetch(step(state, batch)[1]).row_loss, expected, rtol=1e-5)


def test_computing_in_bfloat16_keeps_float32_parameters():
    """The loss is near, not equal; the state keeps its types, so the state passed in is donated."""
    results = {}
    for dtype in (None, jnp.bfloat16):
        state, step, batch, _ = prepare(small(), optax.adam(1e-3), compute_dtype=dtype)
        before = jax.tree.map(lambda leaf: leaf.dtype, state)
        first = state.params["embedding.embedding"]
        state, metrics = step(state, batch)
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == before
        assert first.is_deleted()
        results[dtype] = fetch(metrics).scalars["loss"]
    assert results[None] != results[jnp.bfloat16]
    assert results[None] == pytest.approx(results[jnp.bfloat16], rel=0.02)


@pytest.mark.parametrize("grad_accum", [pytest.param(1, marks=pytest.mark.long), 2])
def test_parameters_in_bfloat16_have_moments_in_bfloat16(grad_accum):
    optimizer = NamedOptimizer(OptimizerConfig(lr=1e-2))
    state, step, batch, _ = prepare(small(), optimizer, dtype=jnp.bfloat16, grad_accum=grad_accum)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(fetch(metrics).scalars["loss"])
    assert losses[-1] < losses[0]
    floats = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim > 0]
    assert {leaf.dtype for leaf in floats} == {jnp.bfloat16.dtype}


@pytest.mark.parametrize("grad_accum", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_balance_loss_is_minimised_and_shown_apart(grad_accum):
    """The step is the one of a loss that is the sum; what is shown, validated and watched is the loss alone."""

    def pull(model):
        return 0.1 * jnp.square(model.norm.scale[...] - 3).sum()

    def apart(model, batch):
        return {"loss": next_token_loss(model, batch), "balance_loss": pull(model)}

    def together(model, batch):
        return next_token_loss(model, batch) + pull(model)

    found = {}
    for loss_fn in (apart, together):
        state, step, batch, evaluate = prepare(small(), optax.sgd(0.1), loss_fn, grad_accum=grad_accum)
        told = fetch(evaluate(state, batch))
        state, metrics = step(state, batch)
        found[loss_fn] = state.params, fetch(metrics).scalars, told, float(metrics.health.mean)
    (params, scalars, told, seen), (other, total, told_together, _) = found[apart], found[together]
    for one, two in zip(params.values(), other.values(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    scale = np.asarray(small().norm.scale[...])
    assert scalars["balance_loss"] == pytest.approx(0.1 * np.square(scale - 3).sum(), rel=1e-6)
    assert scalars["loss"] + scalars["balance_loss"] == pytest.approx(total["loss"], rel=1e-6)
    assert seen == pytest.approx(scalars["loss"], rel=1e-6)
    assert set(told) == {"loss", "loss_weight", "balance_loss"}
    assert set(told_together) == {"loss", "loss_weight"}
    assert told["loss"] == pytest.approx(scalars["loss"], rel=1e-6)
