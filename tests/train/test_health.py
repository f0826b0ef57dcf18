import jax
import numpy as np
import pytest

from roxxel_dist.train.step.bad_steps import WARM, LossMonitorState, update_monitor

monitored = jax.jit(update_monitor, static_argnames="skip")


def watch(losses, *, factor=0.0, skip=False, norms=None):
    """The health after these losses, and which of them were bad."""
    health, found = LossMonitorState.initial(np.zeros), []
    for i, loss in enumerate(losses):
        norm = 1.0 if norms is None else norms[i]
        health, bad = monitored(health, np.int32(i + 1), *map(np.float32, (loss, norm, factor)), skip=skip)
        found.append(bool(bad))
    return health, found


def test_the_first_step_that_is_no_number_is_kept():
    health, bad = watch([3.0, 2.0, np.nan, 2.0, np.inf])
    assert bad == [False, False, True, False, True]
    assert int(health.bad_step) == 3
    assert np.isnan(health.bad_loss)
    assert int(health.good) == 3


def test_a_gradient_that_is_no_number_is_bad_too():
    health, bad = watch([3.0, 2.0], norms=[1.0, np.inf])
    assert bad == [False, True]
    assert int(health.bad_step) == 2


def test_where_steps_are_skipped_the_latest_is_kept_and_all_are_counted():
    health, _ = watch([3.0, np.nan, 2.0, np.nan, np.nan], skip=True)
    assert (int(health.bad_step), int(health.skipped), int(health.in_a_row)) == (5, 3, 2)


def test_bad_steps_leave_the_mean_alone():
    health, _ = watch([4.0, np.nan, 2.0])
    assert float(health.mean) == pytest.approx(3.0)


def test_a_spike_is_a_loss_far_above_the_mean_of_those_before():
    calm = [2.0] * WARM
    assert watch([*calm, 5.9], factor=3)[1][-1] is False
    health, bad = watch([*calm, 6.1, 2.0], factor=3)
    assert bad[-2:] == [True, False]
    assert int(health.bad_step) == WARM + 1
    assert watch([*calm, 600.0])[1][-1] is False  # a factor of 0 looks for none


@pytest.mark.parametrize(
    ("mean", "factor", "usual", "spike"),
    [
        (2.0, 3, 5.9, 6.1),
        (-3.0, 2, -3.0, 0.1),
        (-3.0, 2, -0.1, 0.1),
        (-3.0, 1.5, -1.6, -1.4),
        (-3.0, 3, 2.9, 3.1),
        (-0.01, 2, -0.005, 0.1),
    ],
)
def test_a_spike_is_as_far_above_a_negative_mean_as_above_a_positive_one(mean, factor, usual, spike):
    calm = [mean] * (3 * WARM)
    assert not any(watch([*calm, usual], factor=factor)[1])
    assert watch([*calm, spike], factor=factor)[1].index(True) == len(calm)


def test_no_spike_is_called_before_there_is_a_mean():
    assert not any(watch([2.0, 100.0, 50.0], factor=2)[1])
