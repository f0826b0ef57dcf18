"""Drivers that are stopped (Ctrl-Z, a frozen container) for longer than Ray may be silent, and go on."""

import os
import signal
import time

import psutil
import pytest
from killed_drivers import ended, until

from roxxel_dist.process import file_lock, process_stat
from roxxel_dist.process.process_stat import AwakeClock

TIMES = {"process.process_stat.GAP_S": 0.5, "sweep.ray_executor.LOST_S": 2.0}
TIMES |= {"sweep.ray_executor.ASK_S": 0.2}
STOPS, STOP_S = 2, 2.5


def stop(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOP_S)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "whole",
    [pytest.param(False, id="the driver alone", marks=pytest.mark.long), pytest.param(True, id="all its processes")],
)
def test_a_driver_that_was_stopped_does_not_take_ray_for_lost(study, whole):
    study.more["times"] = TIMES
    driver = study.start("leaves", count=1)
    until((study.path / "up.0").exists, "the trial")
    for _ in range(STOPS):
        children = psutil.Process(driver.pid).children(recursive=True) if whole else []
        stop([driver.pid, *(child.pid for child in children)])
        time.sleep(0.5)
    (study.path / "go").touch()
    code, said = ended(driver)
    assert code == 0, said
    assert "all 1 trials have ended" in said


def read_until(clock, seconds, pause_s):
    """Read a clock until so many seconds have gone by; returns how many it counts."""
    end, begin = time.monotonic() + seconds, clock.now()
    while time.monotonic() < end:
        time.sleep(pause_s)
        clock.now()
    return clock.now() - begin


def test_a_gap_counts_only_so_much(monkeypatch):
    monkeypatch.setattr(process_stat, "GAP_S", 0.5)
    clock = AwakeClock()
    assert read_until(clock, 1.0, 0.01) >= 0.9  # who reads often enough has all of it
    before = clock.now()
    time.sleep(1.5)
    assert clock.now() - before <= 0.5


def test_a_stop_is_no_silence_of_the_holder_of_a_lock(tmp_path, monkeypatch):
    """It is asked at least as often as it would have been without the stop."""
    monkeypatch.setattr(process_stat, "GAP_S", 0.2)
    looks, lock = [], file_lock.take_lock(tmp_path / "lock")

    def pause(seconds):  # each pause is a stop of this process
        looks.append(seconds)
        time.sleep(0.4)

    real = file_lock.time
    monkeypatch.setattr(
        file_lock, "time", type("Stopped", (), {"sleep": staticmethod(pause), "monotonic": real.monotonic})
    )
    with pytest.raises(ValueError, match="held"):
        file_lock.wait_for_lock(tmp_path / "lock", str, lambda owner: "held", limit_s=1.0, log=lambda line: None)
    assert len(looks) >= 5
    assert lock is not None
    file_lock.release_lock(lock)
