"""Numbers of micro-batches, virtual shards and packed documents are those of plain jax on the whole batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import module
from states import init_state

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh, scalars_on
from roxxel_dist.data.packing import Packed
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import InitialState, as_optimizer
from roxxel_dist.train.step.step import fetch, make_step, unpack_loss
from roxxel_dist.train.steps import StepOptions, make_steps

ROWS, LENGTH, VOCABULARY, SHARDS = 16, 9, 20, 4
SUM_BOUND = 4 * ROWS * LENGTH * np.finfo(np.float32).eps
"""Of a float32 sum of so many numbers in another order, with a few operations on each; relative to their sizes."""
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
SEGMENTS = np.cumsum(np.random.default_rng(1).random((ROWS, LENGTH)) < 0.3, 1).astype(np.int32)
ROW, COLUMN = np.indices((ROWS, LENGTH))
SOME = (ROW * 5 + COLUMN * 3) % 11 < 2
"""About a fifth of the tokens, another number in each row."""
LATE = SOME & (ROW % 2 == 1) & (ROW >= ROWS // 2)
"""None in one of the micro-batches, be they each second row or the first rows of a shard."""
MASKS = {"none": SOME | True, "counts": SOME, "shares": SOME, "zero": LATE, "nothing": SOME & False}


def build():
    return module(dim=8, vocab_size=VOCABULARY)


def losses_of(model, tokens, segments, mask):
    """(cross-entropy, whether it is right, whether it counts) of each token that is predicted."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    counted = jnp.asarray(mask[:, 1:]) & (segments[:, 1:] == segments[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets), logits.argmax(-1) == targets, counted


def loss_function(kind, packed):
    """A loss of masked tokens as users write it: a mean, without care for a micro-batch in which no token counts."""

    def loss_fn(model, batch):
        rows = batch.tokens if packed else batch
        tokens, mask = rows % 1000, rows >= 1000  # the mask travels with the tokens
        losses, right, counted = losses_of(model, tokens, batch.segments if packed else jnp.zeros_like(tokens), mask)
        if kind == "none":  # rows of equal weight
            return {"loss": losses.mean(), "accuracy": right.mean(), "balance_loss": 0.1 * jnp.square(losses).mean()}
        count = counted.sum()
        weight = counted.mean() / 10 if kind == "shares" else count
        return {
            "loss": (losses * counted).sum() / count,
            "accuracy": (right * counted).sum() / count,
            "balance_loss": 0.1 * (jnp.square(losses) * counted).sum() / count,
            "loss_weight": weight,
        }

    return loss_fn


def batch_of(kind, packed):
    tokens = TOKENS + 1000 * MASKS[kind].astype(np.int32)
    return Packed(tokens, SEGMENTS, np.zeros_like(SEGMENTS)) if packed else tokens


def plain(kind, packed):
    """(gradient, {"loss", "accuracy", "balance_loss"}) of the whole batch."""
    graphdef, params = nnx.split(build())
    segments = SEGMENTS if packed and kind != "none" else np.zeros_like(SEGMENTS)

    def loss_of(params):
        losses, right, counted = losses_of(nnx.merge(graphdef, params), TOKENS, segments, MASKS[kind])
        means = [(x * counted).sum() / counted.sum() for x in (losses, right, jnp.square(losses))]
        numbers = {"loss": means[0], "accuracy": means[1], "balance_loss": 0.1 * means[2]}
        return numbers["loss"] + numbers["balance_loss"], numbers

    grads, numbers = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(grads)]
    leaves = [np.asarray(leaf) for _, leaf in nnx.to_flat_state(grads)]
    return dict(zip(names, leaves, strict=True)), numbers


def measured(kind, packed, accum, sharded):
    """(gradient, metrics, losses of a validation) of one step with a learning rate of 1."""
    mesh, optimizer, loss_fn = make_mesh(2), as_optimizer(optax.sgd(1.0)), loss_function(kind, packed)
    sharding = batch_sharding(mesh)
    options = StepOptions(virtual_shards=SHARDS if sharded else 0, grad_accum=accum)
    steps = make_steps(build(), loss_fn, optimizer, mesh, options, optimizer.settings(1) | {"spike_factor": 0.0})
    state, hparams = steps.init()
    batch = jax.tree.map(lambda array: jax.device_put(array, sharding), batch_of(kind, packed))
    before = jax.tree.map(np.asarray, state.params)
    if sharded:
        compiler = AotCompiler(mesh)
        compiler.prepare("step", steps.train, state, hparams, batch)
        compiler.prepare("evaluate", steps.evaluate(), state.params, state.rest, hparams, batch)
        step, evaluate = compiler.get("step"), compiler.get("evaluate")
    else:
        step, evaluate = steps.train, steps.evaluate()
    validation = fetch(evaluate(state.params, state.rest, hparams, batch))
    after, metrics = step(state, hparams, batch)
    params = after.parts[0].params if sharded else after.params
    if sharded:
        compiler.close()
    grads = {name: before[name] - np.asarray(params[name]) for name in before}
    return grads, before, fetch(metrics).scalars, validation


KINDS = ["none", "counts", "shares", "zero"]
QUICK = [("shares", False, 4, True), ("zero", True, 4, False)]
EVERY = list(itertools.product(KINDS, [False, True], [1, 2, 4], [False, True]))


@pytest.mark.parametrize(
    ("kind", "packed", "accum", "sharded"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in EVERY if case not in QUICK)],
)
def test_every_number_is_that_of_the_whole_batch(kind, packed, accum, sharded):
    grads, params, scalars, validation = measured(kind, packed, accum, sharded)
    expected, numbers = plain(kind, packed)
    for name, value in numbers.items():
        assert scalars[name] == pytest.approx(float(value), rel=SUM_BOUND, abs=SUM_BOUND), name
        if name != "accuracy":
            assert validation[name] == pytest.approx(float(value), rel=SUM_BOUND), name
    norm = float(np.sqrt(sum(np.square(np.asarray(grad, np.float64)).sum() for grad in expected.values())))
    assert scalars["grad_norm"] == pytest.approx(norm, rel=SUM_BOUND)
    for name, grad in expected.items():  # a difference of parameters is rounded as they are
        rounding = np.finfo(np.float32).eps * np.abs(params[name]).max()
        np.testing.assert_allclose(grads[name], grad, rtol=0, atol=SUM_BOUND * norm + rounding, err_msg=name)


@pytest.mark.parametrize(
    ("accum", "sharded"),
    [(2, False), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, False), (1, True), (2, True)))],
)
def test_a_batch_in_which_nothing_is_predicted_changes_nothing(accum, sharded):
    grads, _, scalars, validation = measured("nothing", False, accum, sharded)
    assert all((grad == 0).all() for grad in grads.values())
    assert (scalars["loss"], scalars["accuracy"], scalars["grad_norm"]) == (0, 0, 0)
    assert validation["loss_weight"] == 0


@pytest.mark.parametrize("accum", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_weight_that_is_no_number_is_seen(accum):
    def loss_fn(model, batch):
        losses = losses_of(model, batch, jnp.zeros_like(batch), jnp.ones_like(batch, bool))[0]
        return {"loss": losses.mean() * jnp.nan, "loss_weight": jnp.nan}

    mesh, optimizer = make_mesh(1), as_optimizer(optax.sgd(1.0))
    split, state, hparams = init_state(build(), InitialState(optimizer), mesh)
    hparams |= scalars_on(mesh, optimizer.settings(1) | {"spike_factor": 0.0})
    step = make_step(split, loss_fn, optimizer, state, batch_sharding(mesh), grad_accum=accum)
    health = fetch(step(state, hparams, jax.device_put(TOKENS, batch_sharding(mesh)))[1]).health
    assert health.bad_step == 1


def test_numbers_in_bfloat16_are_added_in_float32():
    """256 + 1 is 256 in bfloat16."""

    def loss_fn(model, batch):
        first = batch[0, 0]
        number = jnp.where(first == TOKENS[0, 0] + 1000, 256, 1).astype(jnp.bfloat16)
        return {"loss": losses_of(model, batch % 1000, batch * 0, batch > 0)[0].mean(), "number": number}

    mesh, optimizer = make_mesh(1), as_optimizer(optax.sgd(1.0))
    split, state, hparams = init_state(build(), InitialState(optimizer), mesh)
    hparams |= scalars_on(mesh, optimizer.settings(1) | {"spike_factor": 0.0})
    step = make_step(split, loss_fn, optimizer, state, batch_sharding(mesh), grad_accum=2)
    batch = TOKENS + 1000 * (ROW == 0).astype(np.int32)
    assert fetch(step(state, hparams, jax.device_put(batch, batch_sharding(mesh)))[1]).scalars["number"] == 128.5


def test_a_weight_of_each_row_is_refused():
    with pytest.raises(UserError, match=r"loss_weight of the loss function is an array of shape \(4,\): take its sum"):
        unpack_loss({"loss": np.float32(1), "loss_weight": np.ones(4)})
