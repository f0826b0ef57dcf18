"""Optimizers that ask for more than a gradient: for the loss, or for what a step does not have."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import losses, make, module, told, train

from roxxel_dist import Phase
from roxxel_dist.process.exit_codes import UserError

STEPS = 6
PHASES = [Phase(STEPS, 8, 17)]


def seen():
    """Plain descent that keeps the loss it was given."""

    def update(updates, state, params=None, *, value):
        return updates, jnp.float32(value)

    return optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), update)


PLACES = {
    "alone": (seen, lambda state: state),
    "in a chain": (lambda: optax.chain(optax.sgd(1e-2), seen()), lambda state: state[1]),
    "in MultiSteps": (lambda: optax.MultiSteps(seen(), 1), lambda state: state.inner_opt_state),
    "behind apply_if_finite": (lambda: optax.apply_if_finite(seen(), 3), lambda state: state.inner_state),
}
LAYOUTS = {"plain": {}, "accumulated": {"grad_accum_steps": 4}}


QUICK = [("in a chain", "plain"), ("in MultiSteps", "accumulated")]
EVERY = list(itertools.product(PLACES, LAYOUTS))


@pytest.mark.parametrize(
    ("place", "layout"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in EVERY if case not in QUICK)],
)
def test_the_loss_is_given(corpus, tmp_path, place, layout):
    optimizer, found = PLACES[place]
    made = train(corpus, tmp_path, phases=PHASES, optimizer=optimizer(), **LAYOUTS[layout])
    assert float(found(made.state.optimizer)) == losses(tmp_path)[-1][1] > 0


def test_a_plateau_lowers_the_rate(corpus, tmp_path):
    optimizer = optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=2, rtol=0.5))
    made = train(corpus, tmp_path, phases=PHASES, optimizer=optimizer)
    assert float(made.state.optimizer[1].scale) == 0.25


NEEDY = {
    "lbfgs": (optax.lbfgs, "value_fn"),
    "a line search": (lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)), "value_fn"),
    "another name": (
        lambda: optax.GradientTransformationExtraArgs(
            lambda params: (), lambda updates, state, params=None, *, batch, **more: (updates, state)
        ),
        "batch",
    ),
}


@pytest.mark.parametrize("name", NEEDY)
def test_what_a_step_does_not_have_is_refused_at_the_beginning(corpus, tmp_path, name):
    optimizer, asked = NEEDY[name]
    with pytest.raises(
        UserError, match=rf"^optimizer asks for [^:]*'{asked}' in its update, and a step gives .*line search$"
    ):
        make(corpus, tmp_path, optimizer=optimizer())


def test_a_mistake_in_an_optimizer_stays_one(corpus, tmp_path):
    wrong = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: jnp.dot(updates, 1))
    with pytest.raises(TypeError, match="dot"):
        make(corpus, tmp_path, optimizer=wrong)


@pytest.mark.parametrize("done", [0, 3])
def test_the_moments_of_a_given_optimizer_start_new_with_a_line(corpus, tmp_path, done):
    net = module()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.step[...] = np.uint32(done)
    train(corpus, tmp_path, phases=PHASES, model=net, optimizer=optimizer, max_steps=1)
    line = "the nnx.Optimizer has done 3 steps: its moments and counts are not used, they start at zero"
    assert (line in told(tmp_path)) == bool(done)
