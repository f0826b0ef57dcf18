"""ASHA: rungs, who is promoted, and that nothing but the history decides."""

from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.sweep.schedulers import Asha
from roxxel_dist.sweep.study.journal import History

RULE = {"type": "asha", "min_iter": 1, "eta": 2}


def history_of(curves, paused=()):
    """Trials that have reported these values, and run or are paused."""
    history = History()
    for number, values in enumerate(curves):
        history.apply({"event": "ask", "trial": number, "params": {}, "point": []})
        for step, value in enumerate(values, 1):
            history.apply({"event": "report", "trial": number, "step": step, "value": value})
        if number in paused:
            pause = {"step": len(values), "value": values[-1], "rule": "asha", "reason": "", "seconds": 1.0}
            history.apply({"event": "pause", "trial": number, **pause})
    return history


def scheduler_of(history, rule=RULE):
    asha = Asha(rule, history.sign)
    for number, trial in history.trials.items():
        asha.note(history, number, trial.step)
    return asha


def test_a_trial_pauses_at_a_rung_unless_it_is_among_the_best():
    history = history_of([[1.0], [2.0]])
    asha = scheduler_of(history)
    assert asha.judge(history, 0) == {}
    assert asha.judge(history, 1)[1].reason == "2 of 2 at report 1, of which the best 1/2 go on"
    assert scheduler_of(history_of([[1.0]])).judge(history_of([[1.0]]), 0)[0].kind == "pause"
    between = history_of([[1.0], [2.0, 9.0, 9.0]])
    assert scheduler_of(between).judge(between, 1) == {}


def test_the_highest_rung_goes_first_and_the_best_of_it():
    history = history_of([[5.0], [4.0], [3.0], [2.0, 2.0], [1.0, 1.0]], paused={0, 1, 2, 3, 4})
    asha = scheduler_of(history)
    assert asha.choose(history, can_ask=True) == (4, "1 of 2 at report 2, of which the best 1/2 go on")
    assert asha.estimate(history) == {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}


def test_one_goes_on_to_the_end_where_there_are_no_new_ones():
    history = history_of([[5.0]], paused={0})
    asha = scheduler_of(history)
    assert asha.choose(history, can_ask=True) is None
    assert asha.choose(history, can_ask=False) == (0, "1 of 1 at report 1, of which the best 1/2 go on")


def test_the_best_value_so_far_counts_unless_strict():
    history = history_of([[1.0, 9.0], [2.0, 2.0]], paused={0, 1})
    assert scheduler_of(history).choose(history, can_ask=True)[0] == 0
    assert scheduler_of(history, {**RULE, "strict": True}).choose(history, can_ask=True)[0] == 1


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), min_size=1, max_size=8), st.data())
def test_the_order_in_which_it_learned_decides_nothing(curves, data):
    paused = data.draw(st.sets(st.sampled_from(range(len(curves)))))
    history = history_of(curves, paused)
    first, again = scheduler_of(history), Asha(RULE, 1.0)
    for number in data.draw(st.permutations(list(history.trials))):
        again.note(history, number, history.trials[number].step)
    for can_ask in (False, True):
        assert first.choose(history, can_ask=can_ask) == again.choose(history, can_ask=can_ask)
    for number in history.trials:
        assert first.judge(history, number) == again.judge(history, number)
    assert first.estimate(history) == again.estimate(history)


def test_failed_trials_keep_no_place_at_a_rung():
    history = history_of([[0.1], [0.4], [0.5]], paused={1, 2})
    asha = Asha({"type": "asha", "min_iter": 1, "eta": 3}, 1.0)
    for number in range(3):
        asha.note(history, number, 1)
    history.apply({"event": "fail", "trial": 0, "time": 1.0, "kind": "nan", "reason": "", "log": None})
    assert asha.choose(history, can_ask=False) == (1, "1 of 2 at report 1, of which the best 1/3 go on")


def test_a_trial_that_ends_before_it_pauses_counts_its_seconds_once():
    history = history_of([[0.1]], paused={0})
    result = {"params": {}, "value": 0.1, "more": {}, "stopped": None, "seconds": 1.5, "time": 2.0}
    history.apply({"event": "result", "trial": 0, **result})
    assert history.trials[0].seconds == 1.5
