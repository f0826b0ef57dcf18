import functools

import jax
import numpy as np
import optax
import pytest

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.schedule import LrSchedule, learning_rate, schedule_change

MOST_STEPS = 1000
RUNS = ((2, 1), (100, 0), (1000, 37), (250_000, 2000))


def settings(total, **fields):
    return OptimizerConfig(**fields).settings(total)


@functools.cache
def compiled(kind):
    """The rates of a kind of schedule, of its numbers and of many steps."""
    return jax.jit(jax.vmap(lambda numbers, step: learning_rate(kind, numbers, step), (None, 0)))


def rates(kind, numbers, steps):
    numbers = {name: np.float32(value) for name, value in numbers.items()}  # as a step has them
    steps = np.asarray(steps, np.int32)
    padded = np.pad(steps, (0, -len(steps) % MOST_STEPS), mode="edge")  # one program for all of them
    return np.asarray(compiled(kind)(numbers, padded))[: len(steps)]


def exactly(schedule, steps):
    """In float64: in float32 optax's own are off by 1e-4 where the rate is small."""
    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.vmap(schedule))(np.asarray(steps, np.float64)))


def optax_schedule(kind, lr, total, warmup, decay):
    """What optax has for it, joined by hand."""
    after = {
        "constant": optax.constant_schedule(lr),
        "linear": optax.linear_schedule(lr, lr * 0.01, total - warmup),
        "cosine": optax.cosine_decay_schedule(lr, total - warmup, alpha=0.01),
        "wsd": optax.join_schedules(
            [optax.constant_schedule(lr), optax.cosine_decay_schedule(lr, decay, alpha=0.01)], [total - warmup - decay]
        ),
    }[kind]
    return optax.join_schedules([optax.linear_schedule(lr / (warmup + 1), lr, warmup), after], [warmup])


@pytest.mark.parametrize(("total", "warmup"), RUNS)
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_the_formula_is_optaxs(kind, total, warmup):
    lr = 3e-4
    numbers = settings(total, lr=lr, lr_schedule=kind, warmup_steps=warmup)
    steps = np.unique(np.linspace(0, total + total // 10, 400).astype(int))
    edges = [warmup - 1, warmup, warmup + 1, total - int(numbers["decay_steps"]), total - 1, total]
    steps = np.union1d(steps, [step for step in edges if step >= 0])
    want = exactly(optax_schedule(kind, lr, total, warmup, int(numbers["decay_steps"])), steps)
    np.testing.assert_allclose(rates(kind, numbers, steps), want, rtol=1e-6)


def test_cosine_is_optaxs_warmup_cosine():
    numbers = settings(500, lr=0.1, warmup_steps=25)
    want = optax.warmup_cosine_decay_schedule(0.1 / 26, 0.1, 25, 500, end_value=0.001)
    steps = np.arange(501)
    np.testing.assert_allclose(rates("cosine", numbers, steps), exactly(want, steps), rtol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [None, 0, 1, 50])
def test_no_step_has_rate_zero_and_the_peak_is_reached(kind, warmup):
    got = rates(kind, settings(100, lr=1.0, lr_schedule=kind, warmup_steps=warmup), np.arange(100))
    peak = 5 if warmup is None else warmup
    assert (got > 0).all()
    assert got[peak] == 1.0
    assert got.max() == 1.0
    assert (np.diff(got[: peak + 1]) > 0).all()
    assert (np.diff(got[peak:]) <= 0).all()


def test_where_they_end():
    for kind, last in (("cosine", 0.01), ("linear", 0.01), ("constant", 1.0), ("wsd", 0.01)):
        got = rates(kind, settings(1000, lr=1.0, lr_schedule=kind), [999, 1000, 5000])
        np.testing.assert_allclose(got, last, rtol=0.2)
        np.testing.assert_allclose(got[1:], last, rtol=1e-6)


def test_wsd_is_stable_for_two_fifths_or_until_its_decay():
    got = rates("wsd", settings(1000, lr=1.0, lr_schedule="wsd", warmup_steps=100), np.arange(1000))
    assert (got[100:501] == 1.0).all()
    assert got[502] < 1.0
    got = rates("wsd", settings(1000, lr=1.0, lr_schedule="wsd", warmup_steps=100, decay_steps=200), np.arange(1000))
    assert (got[100:801] == 1.0).all()
    assert got[802] < 1.0
    assert got[900] == pytest.approx(0.505)


def test_an_unknown_schedule_is_told():
    with pytest.raises(ValueError, match="lr_schedule is 'step': it must be one of cosine, linear, constant, wsd"):
        learning_rate("step", settings(10), 0)


@pytest.mark.parametrize(
    ("fields", "total", "message"),
    [
        ({"warmup_steps": 100}, 100, "warmup_steps is 100: it must be below the run's 100 steps"),
        ({}, 0, "total_steps is 0: a schedule needs at least 1"),
        ({"lr_schedule": "wsd", "warmup_steps": 60}, 100, "warmup_steps is 60: with 40 steps of wsd .* it leaves none"),
        (
            {"lr_schedule": "wsd", "warmup_steps": 50, "decay_steps": 51},
            100,
            "decay_steps is 51: with 50 steps of warm-up that is more than the run's 100 steps; use at most 50",
        ),
    ],
)
def test_what_does_not_fit_into_the_run(fields, total, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields).settings(total)


@pytest.mark.parametrize("fields", [{}, {"warmup_steps": 0}, {"lr_schedule": "wsd"}, {"lr_schedule": "constant"}])
@pytest.mark.parametrize("total", [1, 2, 3, 19, 20])
def test_the_shortest_runs_have_a_schedule(fields, total):
    OptimizerConfig(**fields).settings(total)


def test_a_decay_that_just_fits():
    numbers = settings(100, lr_schedule="wsd", warmup_steps=50, decay_steps=50)
    assert (numbers["warmup_steps"], numbers["decay_steps"], numbers["total_steps"]) == (50, 50, 100)


def test_what_an_amendment_does_is_told():
    plans = [Plan([Shape(steps=total, batch_size=2, seq_len=8)], {"self": [(0, 4096)]}, 1) for total in (1000, 2000)]

    def scheduled(total, kind="linear"):
        return LrSchedule(
            kind=kind, scaling="none", settings=settings(total, lr=1.0, warmup_steps=0, lr_schedule="linear")
        )

    assert schedule_change(500, scheduled(1000), scheduled(2000), *plans) == (
        "learning rate of step 501: 0.505 before, 0.752 now\n"
        "learning rate of the last step: 0.011 at step 1,000 before, 0.0105 at step 2,000 now"
    )
    assert "step 501: 1 before, 0.752 now" in schedule_change(500, scheduled(1000, "constant"), scheduled(2000), *plans)
    assert "step 1,001: none before, 0.505 now" in schedule_change(1000, scheduled(1000), scheduled(2000), *plans)
