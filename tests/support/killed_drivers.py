"""Drivers of sweeps that are killed at random moments, and what must hold then."""

import time

LIMIT_S = 60.0


def until(condition, what, limit_s=LIMIT_S):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s} s for {what}"
        time.sleep(0.02)


def ended(process, limit_s=LIMIT_S):
    """Its exit code and what it said."""
    said, _ = process.communicate(timeout=limit_s)
    return process.returncode, said


def kill_and_go_on(study, chance, kills, count):
    """Kill drivers at random moments, and let the last one end; returns how many were killed."""
    killed = 0
    while killed < kills:
        driver = study.start("kept", count=count, workers=2)
        before = len(study.events)
        until(lambda: len(study.events) > before or driver.poll() is not None, "the driver")  # noqa: B023
        time.sleep(chance.uniform(0.0, 2.5))
        if driver.poll() is None:
            killed += 1
        driver.kill()
        driver.communicate()
        _check(study, whole=False)
        if len(study.ends()) == count:
            break
    code, said = ended(study.start("kept", count=count, workers=2), limit_s=5 * LIMIT_S)
    assert code == 0, said
    _check(study, whole=True)
    assert study.ends() == list(range(count))
    return killed


def _check(study, whole):
    """No result is lost or there twice, and no configuration is run under two numbers."""
    history = study.history
    configurations = [str(trial.params) for trial in history.trials.values()]
    assert len(set(configurations)) == len(configurations)
    results = {path.suffix[1:]: float(path.read_text() or "nan") for path in study.path.glob("result.*")}
    for number, trial in history.trials.items():
        if trial.state == "done":
            assert results[str(number)] == trial.value == trial.params["x"]
        elif whole:
            raise AssertionError(f"trial {number} is {trial.state}")
    worked = (study.path / "work").read_text().splitlines() if (study.path / "work").exists() else []
    assert {line.split(" ", 1)[0] for line in worked} >= set(results)
    by_trial = {}
    for line in worked:
        number, params = line.split(" ", 1)
        assert by_trial.setdefault(number, params) == params, "a trial was run with two configurations"
