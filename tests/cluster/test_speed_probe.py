"""The speed probe of a rank: what it writes, and what it leaves alone."""

import threading
import time

from roxxel_dist.cluster.progress import Progress, create, read
from roxxel_dist.cluster.speed_probe import SpeedProbe, measure


def test_it_writes_its_time_beside_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("roxxel_dist.cluster.speed_probe.PROBE_S", 0.001)
    fd = create(tmp_path / "progress", 2)
    progress, step = Progress(str(tmp_path / "progress"), 1), 0
    end = time.monotonic() + 30
    with SpeedProbe(progress):
        while not read(fd, 2)[1].probe_s or step < 1000:
            step += 1
            progress.enter(step)
            progress.finish(step)
            assert time.monotonic() < end
    with progress.doing("save"):
        pass
    other, own = read(fd, 2)
    assert (own.entered, own.done, own.activity, own.pauses) == (step, step, "step", 2)
    assert 0 < own.probe_s < 1
    assert other.probe_s == 0
    assert "speed probe" not in {thread.name for thread in threading.enumerate()}
    assert measure() > 0


def test_without_a_launcher_there_is_none():
    with SpeedProbe(Progress(None, 0)):
        assert "speed probe" not in {thread.name for thread in threading.enumerate()}
