"""Drivers that are asked to end, or killed, and started again."""

import os
import random
import signal
import time

import psutil
import pytest
import trial_bodies
from killed_drivers import ended, kill_and_go_on, until


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end between the two looks
        return False


def ups(study):
    """The processes of trials that are at work, by trial."""
    return {int(path.suffix[1:]): int(path.read_text() or 0) for path in study.path.glob("up.*")}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_driver_that_is_asked_to_end_lets_trials_save_and_goes_on_later(study, number):
    driver = study.start("stays", count=2, workers=2)
    until(lambda: len(ups(study)) == 2 and len(study.of("report")) == 2, "two trials")
    driver.send_signal(number)
    code, said = ended(driver)
    assert code == 42, said
    assert "2 running trials will save and end" in said
    assert "asked to end; 2 trials to continue at the next start" in said
    assert sorted(path.name for path in study.path.glob("saved.*")) == ["saved.0", "saved.1"]
    assert study.ends() == []
    assert [trial.state for trial in study.history.trials.values()] == ["running", "running"]
    assert study.run(trial_bodies.stays, count=2, workers=2).code == 0
    assert study.ends() == [0, 1]
    assert [trial.attempts for trial in study.history.trials.values()] == [2, 2]
    assert len(study.of("report")) == 2


@pytest.mark.long
def test_a_trial_that_does_not_end_is_killed_when_asked_again(study):
    driver = study.start("deaf", count=1)
    until(lambda: ups(study) and study.of("report"), "the trial")
    driver.terminate()
    time.sleep(1.5)
    assert driver.poll() is None
    driver.terminate()
    assert ended(driver)[0] == 42
    until(lambda: not alive(ups(study)[0]), "its process")


def test_workers_die_with_a_killed_driver_and_the_next_one_goes_on(study):
    driver = study.start("stays", count=2, workers=2)
    until(lambda: len(ups(study)) == 2, "two trials")
    until(lambda: len(study.of("report")) == 2, "their reports")
    driver.kill()
    began = time.monotonic()
    until(lambda: not any(alive(pid) for pid in ups(study).values()), "the workers")
    print(f"workers gone after {time.monotonic() - began:.3f} s")
    driver.communicate()
    assert study.run(trial_bodies.stays, count=2, workers=2).code == 0
    assert [event["attempt"] for event in study.of("start")] == [0, 0, 1, 1]
    assert study.ends() == [0, 1]


def test_a_second_driver_of_a_study_says_who_is_there(study):
    first = study.start("stays", count=1)
    until(lambda: ups(study) and study.of("start"), "the first driver's trial")
    second = study.start("stays", count=1)
    line = second.stdout.readline()
    assert f"waiting up to 30 s for another process (pid {first.pid} on host" in line
    first.kill()
    first.communicate()
    code, said = ended(second)
    assert code == 0, said
    assert [event["attempt"] for event in study.of("start")] == [0, 1]
    assert study.ends() == [0]


def test_a_trial_that_was_stopped_but_not_written_has_its_result_without_another_run(study):
    from roxxel_dist.sweep.study.journal import Journal

    told = {"metric": "val_loss", "goal": "minimize", "method": "random", "seed": 0, "driver": {}}
    with Journal(study.path, print) as journal:
        journal.append({"event": "study", **told}, {"event": "ask", "trial": 0, "params": {"x": 0.5}, "point": [0.5]})
        journal.append({"event": "start", "trial": 0, "attempt": 0, "node": "h1", "pid": 1})
        for step, value in ((1, 4.0), (2, 2.0), (3, 3.0)):
            journal.append({"event": "report", "trial": 0, "step": step, "value": value})
        journal.append({"event": "stop", "trial": 0, "step": 3, "value": 3.0, "rule": "hyperband", "reason": "poor"})
    assert study.run(trial_bodies.square, count=1).code == 0
    [event] = study.of("result")
    assert (event["value"], event["stopped"], event["params"]) == (2.0, "hyperband", {"x": 0.5})
    assert len(study.of("start")) == 1


def test_nothing_is_lost_or_repeated_when_a_driver_is_killed(study):
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    kill_and_go_on(study, random.Random(seed), 1, 6)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_repeated_when_drivers_are_killed_at_20_moments(study):
    assert kill_and_go_on(study, random.Random(11), 20, 120) == 20
