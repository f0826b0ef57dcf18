"""Trials that pause at a checkpoint and go on: in the journal, in the controller, and in real trainings."""

import json
import os
import random
import time

import pytest
import trial_bodies
from commands import make_corpus
from decided import check_decisions
from killed_drivers import ended, until
from sweep_runs import Study
from trials import task

from roxxel_dist.sweep.trial import trial

ASHA = {
    "method": "random",
    "parameters": {"x": {"min": 0.0, "max": 1.0}},
    "early_terminate": {"type": "asha", "min_iter": 1, "eta": 2},
}


def steps_of(study):
    return [tuple(map(int, line.split())) for line in (study.path / "work").read_text().splitlines()]


def test_asha_pauses_at_rungs_and_the_best_go_on(study):
    ending = study.run(trial_bodies.sliced, ASHA, count=6, workers=2)
    assert ending.code == 0
    assert ending.reason.startswith(f"{len(study.of('result'))} trials have ended; ")
    assert check_decisions(study.events, ASHA, count=6) == sum(len(study.of(k)) for k in ("ask", "thaw", "pause"))
    history, trained = study.history, steps_of(study)
    assert len(trained) == len(set(trained)), "no step is trained twice"
    assert history.steps == len(trained) < 6 * 6
    states = {number: each.state for number, each in history.trials.items()}
    assert set(states.values()) == {"done", "paused"}
    done = [number for number, state in states.items() if state == "done"]
    assert all(len(history.trials[number].reports) == 6 for number in done)
    assert max(each.attempts for each in history.trials.values()) >= 2
    for each in history.trials.values():
        assert [step for step, _ in each.reports] == list(range(1, len(each.reports) + 1))
        assert each.value == min(value for _, value in each.reports)
    assert study.history.best.value == min(each.value for each in history.trials.values())
    # More trials: the rungs are still there, and paused trials go on beside the new ones.
    assert study.run(trial_bodies.sliced, ASHA, count=8, workers=2).code == 0
    assert len(study.history.trials) == 8
    assert len(steps_of(study)) == len(set(steps_of(study)))


def test_the_budget_of_steps_ends_a_search_and_more_goes_on(study):
    ending = study.run(trial_bodies.sliced, count=3, max_steps_total=8)
    assert (ending.code, ending.reason) == (
        0, "the budget of steps is spent (--max_steps_total); 1 are paused, and go on where they are given more",
    )  # fmt: skip
    assert [each.state for each in study.history.trials.values()] == ["done", "paused"]
    assert study.history.steps == len(steps_of(study)) == 8
    [pause] = study.of("pause")
    assert (pause["trial"], pause["step"], pause["rule"]) == (1, 2, "max_steps_total")
    assert study.run(trial_bodies.sliced, count=3).code == 0
    assert study.ends() == [0, 1, 2]
    assert sorted(steps_of(study)) == [(number, step) for number in range(3) for step in range(1, 7)]
    assert [event["trial"] for event in study.of("thaw")] == [1]


def test_the_hours_of_a_search_count_over_starts(study):
    assert study.run(trial_bodies.sliced, count=1, max_hours=0.3 / 3600).reason.startswith("the hours of the search")
    assert study.history.count("paused") == 1
    assert "goes on" not in study.run(trial_bodies.sliced, count=1, max_hours=0.3 / 3600).reason
    assert study.of("thaw") == []
    assert study.run(trial_bodies.sliced, count=1, max_hours=1.0).code == 0
    assert study.ends() == [0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_paused_and_thawed_trial_is_equal_to_the_bit(study):
    """Of a real training: each row, with the digest of the rows read and the losses."""
    make_corpus(study.path.parent)
    sweep = {
        "method": "random",
        "parameters": {"lr": {"min": 0.001, "max": 0.01}},
        "early_terminate": {"type": "asha", "min_iter": 1, "eta": 9},
    }
    study.task = lambda number, params, attempt: task(study.path, number, params=params, attempt=attempt)
    assert study.run(trial.run, sweep, count=1).code == 0
    [each] = study.history.trials.values()
    assert (each.state, each.attempts, len(study.of("pause")), len(study.of("thaw"))) == ("done", 2, 1, 1)
    whole = Study(study.path / "whole", study.address)
    whole.task = lambda number, params, attempt: task(study.path, 1, params=params, attempt=attempt)
    assert whole.run(trial.run, {**sweep, "early_terminate": None}, count=1).code == 0
    assert whole.history.trials[0].params == each.params
    assert whole.history.trials[0].reports == each.reports

    def rows(number):
        timed = ("ms_per_step", "tokens_per_s", "ram_gb", "vram_gb", "mfu", "hfu", "_", "time")
        parsed = map(json.loads, (study.path / "trials" / number / "metrics.jsonl").read_text().splitlines())
        return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in parsed]

    assert len(rows("0")) == 12
    assert rows("0") == rows("1")


ASHA_BAYES = {**ASHA, "method": "bayes"}
"""Trials at random would go on as well whatever is known of paused ones."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_drivers_that_are_killed_decide_the_same(study, kills):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    chance, count = random.Random(seed), 4 * kills
    for _ in range(kills):
        driver, before = study.start("sliced", ASHA_BAYES, count=count, workers=2), len(study.events)
        until(lambda: len(study.events) > before or driver.poll() is not None, "the driver")  # noqa: B023
        time.sleep(chance.uniform(0.0, 1.5))
        driver.kill()
        driver.communicate()
    code, said = ended(study.start("sliced", ASHA_BAYES, count=count, workers=2), limit_s=300)
    assert code == 0, said
    assert check_decisions(study.events, ASHA_BAYES, count=count) >= count
    history, ends = study.history, study.ends()
    assert len(ends) == len(set(ends)), "a result is there once"
    assert sorted(history.trials) == list(range(count))
    assert len({str(each.params) for each in history.trials.values()}) == count
    for each in history.trials.values():
        assert each.state in ("done", "paused")
        assert [step for step, _ in each.reports] == list(range(1, len(each.reports) + 1)), "no report is lost"
        assert each.value == min(value for _, value in each.reports)
    assert {number for number, each in history.trials.items() if each.state == "done"} == set(ends)
