import pytest

from roxxel_dist.train.step.throughput import StepTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def steps(meter, clock, count, seconds=0.5, tokens=1000):
    for _ in range(count):
        meter.step(tokens)
        clock.now += seconds


def test_time_and_tokens_since_the_last_report(clock):
    meter = StepTimer()
    assert meter.report() == {}
    steps(meter, clock, 4)
    assert meter.report() == {"ms_per_step": 500.0, "tokens_per_s": 2000.0}
    assert meter.report() == {}
    steps(meter, clock, 2, seconds=0.25)
    assert meter.report() == {"ms_per_step": 250.0, "tokens_per_s": 4000.0}
    assert meter.tokens_per_s == 4000.0


def test_a_save_between_reports_is_not_training(clock):
    meter = StepTimer()
    steps(meter, clock, 2)
    meter.mark_done()
    meter.pause()
    clock.now += 60
    meter.resume()
    steps(meter, clock, 2)
    assert meter.report() == {"ms_per_step": pytest.approx(500.0), "tokens_per_s": pytest.approx(2000.0)}


def test_a_report_within_a_pause_ends_where_the_steps_did(clock):
    meter = StepTimer()
    steps(meter, clock, 2)
    meter.mark_done()
    meter.pause()
    clock.now += 60
    assert meter.report()["ms_per_step"] == 500.0
    clock.now += 60
    meter.resume()
    steps(meter, clock, 1)
    assert meter.report()["ms_per_step"] == pytest.approx(500.0)


def test_a_compilation_is_forgotten(clock):
    meter = StepTimer()
    steps(meter, clock, 1, seconds=30)
    meter.restart()
    steps(meter, clock, 1)
    assert meter.report()["ms_per_step"] == 500.0
