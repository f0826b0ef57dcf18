import pytest
from tables import one_test

from roxxel_dist.sweep.schedulers import Hyperband, bands
from roxxel_dist.sweep.study.journal import History, Trial

BY_MAX = {"type": "hyperband", "max_iter": 5, "eta": 2, "s": 2}


def study(*numbers):
    return History(trials={number: Trial(number=number, params={}) for number in numbers})


def poor(rule, sign, values, running):
    hyperband, history = Hyperband(rule, sign), study(*values)
    for number, reported in values.items():
        for step, value in enumerate(reported, 1):
            history.trials[number].reports.append((step, value))
            hyperband.note(history, number, step)
    return {number: why.reason for number, why in hyperband.judge(history, 0).items() if number in running}


@one_test(
    ("rule", "longest", "expected"),
    [
        (BY_MAX, 9, [1, 2]),
        (BY_MAX, 2, [1, 2]),
        (BY_MAX, 1, [1]),
        ({"max_iter": 27, "s": 2}, 99, [3, 9]),
        ({"max_iter": 27, "s": 9}, 99, [1, 3, 9]),
        ({"min_iter": 3}, 100, [3, 9, 27, 81]),
        ({"min_iter": 1, "eta": 1.5}, 6, [1, 1, 2, 3, 5]),
        ({"min_iter": 3}, 0, []),
        ({"max_iter": 27, "s": 10**9}, 99, [1, 3, 9]),
        ({"max_iter": 1e300, "s": 2}, 99, []),
    ],
)
def test_bands_are_those_of_wandb(rule, longest, expected):
    assert [band for band in bands(rule) if band <= longest] == expected


def test_a_rule_without_bands_is_an_error():
    with pytest.raises(ValueError, match="no iteration is left"):
        bands({"max_iter": 2, "s": 1, "eta": 3})
    with pytest.raises(ValueError, match="eta"):
        bands({"min_iter": 2, "eta": 1})


def test_the_example_of_wandbs_engine():
    trials = {0: [10, 9], 1: [10, 10], 2: [10, 8, 8], 3: [10, 7, 7], 4: [10, 6, 6]}
    assert list(poor(BY_MAX, 1.0, trials, [1, 2, 3])) == [1]


def test_a_goal_of_more_is_the_same_with_the_sign_turned():
    trials = {0: [-10, -9], 1: [-10, -10], 2: [-10, -8, -8], 3: [-10, -7, -7], 4: [-10, -6, -6]}
    found = poor(BY_MAX, -1.0, trials, [1, 2, 3])
    assert found == {1: "-10 after 2 reports; the best 1/2 of the trials had -8 or better at report 2"}


def test_the_report_of_the_band_is_judged_and_not_the_one_after_it():
    assert poor({"min_iter": 3}, 1.0, {0: [9.0] * 20}, [0]) == {}
    assert poor({"min_iter": 3}, 1.0, {0: [1.0] * 20, 1: [9.0] * 2}, [0, 1]) == {}
    assert list(poor({"min_iter": 3}, 1.0, {0: [1.0] * 20, 1: [9.0] * 3}, [0, 1])) == [1]


def test_the_best_value_so_far_counts_unless_strict():
    trials = {0: [1.0, 1.0, 1.0], 1: [5.0, 0.5, 5.0]}
    rule = {"min_iter": 1}
    assert poor(rule, 1.0, trials, [1]) == {}
    assert list(poor({**rule, "strict": True}, 1.0, trials, [1])) == [1]


def test_strict_judges_at_the_last_band_alone():
    trials = {0: [1.0, 1.0], 1: [5.0, 0.5], 2: [5.0, 5.0]}
    rule = {"min_iter": 1, "eta": 2, "strict": True}
    assert list(poor(rule, 1.0, trials, [0, 1, 2])) == [2]


class Read(list):
    """Reports of a trial, which count how many of them are looked at."""

    looked = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Read.looked += len(found) if isinstance(key, slice) else 1
        return found


def test_what_a_report_costs_does_not_grow_with_the_number_of_reports_and_trials():
    hyperband, work = Hyperband({"min_iter": 3}, 1.0), {}
    for trial in range(400):
        before, history = Read.looked, study(trial)
        reports = history.trials[trial].reports = Read()
        for step in range(1, 21):
            reports.append((step, trial + 1 / step))
            hyperband.note(history, trial, step)
            hyperband.judge(history, trial)
        work[trial] = Read.looked - before
    assert set(work.values()) == {2 * 20}  # each report: itself, and whether it is the last


def test_a_trial_that_is_run_again_replaces_its_values():
    hyperband, history = Hyperband({"min_iter": 1, "eta": 2}, 1.0), study(0, 1, 2)
    for trial, value in enumerate((1.0, 2.0, 3.0)):
        history.trials[trial].reports = [(1, value)]
        hyperband.note(history, trial, 1)
    assert list(hyperband.judge(history, 0)) == [2]
    history.trials[2].reports = [(1, 0.5)]
    hyperband.note(history, 2, 1)
    assert list(hyperband.judge(history, 2)) == [1]
