import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.transformer import Transformer, next_token_loss
from roxxel_dist.train.step import fetch, init_state, make_eval_step, make_step, take_apart, unpack_loss


def transformer(**fields):
    config = ModelConfig(dim=32, num_blocks=2, vocab_size=50, max_context=64, **fields)
    return Transformer(config, nnx.Rngs(params=0, dropout=1))


def prepare(model, tx, loss_fn=next_token_loss, **options):
    mesh = make_mesh()
    parts, params, rest = take_apart(model)
    sharding = NamedSharding(mesh, P("data", None))
    step = make_step(parts, loss_fn, tx, sharding=sharding, **options)
    batch = jax.device_put(jax.random.randint(jax.random.key(0), (16, 33), 0, 50), sharding)
    return init_state(params, rest, tx, mesh), step, batch, parts


def test_a_step_is_a_gradient_step():
    """Against NNX's own gradient and optax by hand."""
    model = transformer()
    state, step, batch, _ = prepare(model, optax.sgd(0.1))
    loss, grads = nnx.value_and_grad(next_token_loss)(model, np.asarray(batch))
    expected = [
        p - 0.1 * g for p, g in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(grads), strict=True)
    ]
    state, metrics = step(state, batch)
    assert fetch(metrics)["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert int(state.step) == 1
    for got, want in zip(state.params.values(), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_users_model_survives_donation():
    model = transformer()
    state, step, batch, _ = prepare(model, optax.sgd(0.1))
    step(state, batch)
    assert np.isfinite(next_token_loss(model, np.asarray(batch)))


def test_accumulation_changes_nothing_but_rounding():
    results = []
    for count in (1, 2):
        state, step, batch, _ = prepare(transformer(), optax.sgd(0.1), grad_accum=count)
        state, metrics = step(state, batch)
        results.append((fetch(metrics), state.params))
    assert results[0][0]["loss"] == pytest.approx(results[1][0]["loss"], rel=1e-6)
    assert results[0][0]["grad_norm"] == pytest.approx(results[1][0]["grad_norm"], rel=1e-5)
    for one, two in zip(results[0][1].values(), results[1][1].values(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_random_streams_advance_and_evaluation_leaves_them_alone():
    state, step, batch, parts = prepare(transformer(dropout_rate=0.5), optax.sgd(0.0))
    evaluate = make_eval_step(parts, next_token_loss)
    before = float(evaluate(state, batch))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(fetch(metrics)["loss"])
    assert len(set(losses)) == 3
    assert float(evaluate(state, batch)) == before


@pytest.mark.parametrize(
    ("result", "loss", "names"),
    [
        (jnp.float32(2), 2, set()),
        ((jnp.float32(2), {"accuracy": jnp.float32(1), "logits": jnp.zeros(3)}), 2, {"accuracy"}),
        ((jnp.float32(2), jnp.float32(5)), 2, {"aux"}),
        ({"loss": jnp.float32(2), "bal": jnp.float32(0)}, 2, {"bal"}),
    ],
)
def test_what_a_loss_function_may_return(result, loss, names):
    value, metrics = unpack_loss(result)
    assert float(value) == loss
    assert set(metrics) == names


def test_what_it_may_not_return():
    with pytest.raises(ValueError, match='without "loss": its keys are a, b'):
        unpack_loss({"a": 1.0, "b": 2.0})
    with pytest.raises(ValueError, match=r"an array of shape \(4,\)"):
        unpack_loss(jnp.zeros(4))


def test_every_scalar_of_the_loss_reaches_the_metrics():
    def loss_fn(model, batch):
        loss = next_token_loss(model, batch)
        return loss, {"perplexity": jnp.exp(loss)}

    state, step, batch, _ = prepare(transformer(), optax.sgd(0.1), loss_fn, grad_accum=2, schedule=lambda step: 0.5)
    metrics = fetch(step(state, batch)[1])
    assert set(metrics) == {"loss", "perplexity", "grad_norm", "lr"}
    assert metrics["lr"] == 0.5
