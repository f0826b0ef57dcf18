"""Whatever ends the tests, no process and no mount of them is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import leftovers
import pytest
from commands import gone, wait_for
from leftovers import MARK

TESTS = """
import os, subprocess, sys, time
from contextlib import nullcontext
from small_disks import mounted_disk
def test_that_lasts(tmp_path):
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    pids = [subprocess.Popen(words, start_new_session=new).pid for new in (False, True)]
    with mounted_disk(tmp_path / "disk", "64k") if os.geteuid() == 0 else nullcontext(tmp_path) as disk:
        (disk / "file").touch()
        if os.geteuid() == 0:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        open({told!r}, "w").write(" ".join(map(str, pids)) + "\\n")
        time.sleep(600)
"""

BESIDE = """
import os, sys
from pathlib import Path
import leftovers
from small_disks import mounted_disk
os.environ[leftovers.MARK] = leftovers.mark_of(os.getpid())
with mounted_disk(Path("disk"), "64k"):
    leftovers.unmount()
    sys.exit(0 if os.path.ismount("disk") else "the disk is gone")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_the_disk_of_another_pytest_that_runs_stays(tmp_path):
    """Also of one that has no workers, and so no process with its mark in its environment."""
    others = {name: value for name, value in os.environ.items() if name != MARK}
    environment = {**others, "PYTHONPATH": str(Path(leftovers.__file__).parent)}
    subprocess.run([sys.executable, "-c", BESIDE], cwd=tmp_path, env=environment, check=True)


@pytest.mark.parametrize(
    "number", [*(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGTERM, signal.SIGINT)), signal.SIGKILL]
)
def test_processes_and_mounts_end_with_the_tests(tmp_path, number):
    told = tmp_path / "pids"
    (tmp_path / "test_one.py").write_text(TESTS.format(told=str(told)))
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "leftovers",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "--basetemp",
        "temporary",
        "test_one.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(leftovers.__file__).parent)}
    with (tmp_path / "log").open("w") as log:
        tests = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
    wait_for(lambda: told.exists() and told.read_text().endswith("\n"), what="the start of two processes")
    tests.send_signal(number)
    tests.wait(60)
    wait_for(lambda: all(gone(int(pid)) for pid in told.read_text().split()), 30, "the end of both")
    wait_for(lambda: str(tmp_path / "temporary") not in Path("/proc/mounts").read_text(), 30, "the end of the mount")
