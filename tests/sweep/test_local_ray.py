"""The Ray that a sweep starts for itself: real ones, each in a process of its own."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from sweep_runs import Study

from roxxel_dist.launcher.backends.ray.cluster import ClusterError
from roxxel_dist.sweep import local_ray
from roxxel_dist.sweep.local_ray import HELD, PREFIX, sweep_leftovers

LIMIT_S = 60.0
LISTENS = """
import os
import psutil
from roxxel_dist.sweep.local_ray import local_ray
before = dict(os.environ)
for _ in range(2):
    with local_ray(3, 0.5, print) as (ray, _):
        assert ray.get(ray.remote(lambda: 3).remote(), timeout=60) == 3
        assert ray.cluster_resources()["CPU"] == 2
        mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
        found = {link.laddr.ip for one in mine for link in one.net_connections() if link.status == "LISTEN"}
        print(*sorted(found), flush=True)
    assert dict(os.environ) == before
"""


@pytest.fixture
def temporary(monkeypatch):
    """A short temporary directory of the test's own."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # of a cluster that it must not join
    return Study(tmp_path, None)


def until(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.02)


def of(folder):
    """The processes that work in a folder, by their command line or environment."""
    found = []
    for one in psutil.process_iter():
        try:
            lines = [*one.cmdline(), *one.environ().values()]
            if one.status() != psutil.STATUS_ZOMBIE and any(str(folder) in line for line in lines):
                found.append(one)
        except psutil.Error:
            continue
    return [one for one in found if one.pid != os.getpid()]


@pytest.mark.long
def test_ctrl_c_in_the_terminal_reaches_trials_through_the_driver_alone(study, temporary):
    driver = study.start("stays", count=2, workers=2)
    until(lambda: len(study.events if (study.path / "journal.jsonl").exists() else []) >= 7, "two trials")
    [folder] = temporary.glob(f"{PREFIX}*")
    assert folder.stat().st_mode & 0o077 == 0, "nobody else reads its token or writes to its sockets"
    os.killpg(driver.pid, signal.SIGINT)
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 42, said
    assert "2 running trials will save and end" in said
    assert len(list(study.path.glob("saved.*"))) == 2
    assert study.ends() == []
    assert not list(temporary.glob(f"*{PREFIX}*"))


@pytest.mark.cluster
def test_nothing_outlives_a_killed_driver(study, temporary):
    driver = study.start("stays", count=2, workers=2)
    until(lambda: len(list(study.path.glob("up.*"))) == 2, "two trials")
    assert len(of(temporary)) > 4
    driver.kill()
    began = time.monotonic()
    driver.communicate()
    until(lambda: not of(temporary), "all its processes")
    print(f"all gone after {time.monotonic() - began:.2f} s")


def test_what_a_killed_driver_left_is_taken_away_and_nothing_that_is_somebodys(temporary):
    left, held, other = temporary / f"{PREFIX}left", temporary / f"{PREFIX}held", temporary / "ray"
    for folder in (left, held, other):
        folder.mkdir()
        (folder / HELD).touch()
    with (held / HELD).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep_leftovers()
        assert {path.name for path in temporary.iterdir()} == {held.name, other.name}
    sweep_leftovers()
    assert [path.name for path in temporary.iterdir()] == [other.name]


@pytest.mark.cluster
def test_a_sweep_whose_ray_has_no_folder_any_more_ends_with_its_running_trials(study, temporary):
    driver = study.start("leaves", count=3, workers=1)
    until((study.path / "up.0").exists, "the trial")
    (folder,) = temporary.glob(f"{PREFIX}*")
    folder.rename(temporary / "cleaned")
    (study.path / "go").touch()
    said, _ = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 69, said
    assert f"the folder of the sweep's Ray, {folder}, was removed, so no more trials can begin: name a folder" in said
    assert (study.ends(), study.of("fail")) == ([0], [])
    (temporary / "cleaned").rename(folder)  # for its processes, which end


@pytest.mark.cluster
def test_a_ray_that_does_not_start_is_started_again_and_names_the_fix(study, temporary, monkeypatch):
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    driver = study.start("leaves", count=1)
    said, _ = driver.communicate(timeout=2 * LIMIT_S)
    assert "it is started again" in said
    assert "set RAY_gcs_server_port_wait_time_s to more than 0 s, or use a cluster that runs (--ray_address)" in said


@pytest.mark.cluster
def test_it_listens_on_loopback_alone_and_can_be_made_again(temporary):
    env = {**os.environ, "RAY_ADDRESS": "192.0.2.1:6379"}
    done = subprocess.run([sys.executable, "-c", LISTENS], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert {address.removeprefix("::ffff:") for line in lines for address in line.split()} == {"127.0.0.1"}
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("error", "helps"), [("The current node timed out during startup.", False), ("no port", True)])
def test_the_advice_is_one_that_can_help(temporary, monkeypatch, error, helps):
    """Ray gives its node 30 s, whatever the variable of the head's port says."""
    monkeypatch.setenv(local_ray.WAIT_ENV, "120")

    def init(**_):
        raise RuntimeError(error)

    with pytest.raises(ClusterError, match="start the sweep again when the machine has less to do") as caught:
        local_ray._start(SimpleNamespace(init=init), temporary, 1)
    assert ("RAY_gcs_server_port_wait_time_s" in str(caught.value)) is helps
