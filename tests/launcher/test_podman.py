"""`launch exec --via 'podman exec -i {host}'`: a real engine, whose containers have the files of this machine."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hosts import ROOT

pytestmark = pytest.mark.cluster

Until = Callable[[Callable[[], Any], str], None]

NAMES = [f"roxxel-{os.getpid()}-{letter}" for letter in "ab"]
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=8000:8000")
ENGINES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (((), ()), (("--runtime", "runc"), LIMITS))
"""Options of podman, and of its `run`: as it is installed, and for a machine that is a container itself."""
WAIT = ("sleep", "1000")
STAY = """
echo $$ > tmp.$ROXXEL_PROCESS_ID; mv tmp.$ROXXEL_PROCESS_ID up.$ROXXEL_ATTEMPT.$ROXXEL_NUM_PROCESSES.$ROXXEL_PROCESS_ID
[ $ROXXEL_ATTEMPT = 1 ] || sleep 1000; true
"""


def podman(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["podman", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[list[str]]:
    """Two that wait; each sees this machine's files, and writes below `tmp_path` alone."""
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip("these tests need: root, and apt-get install podman runc")
    files = ["--network=host", f"--volume={ROOT}:{ROOT}:ro", f"--volume={tmp_path}:{tmp_path}"]
    try:
        for name in NAMES:
            tried = [
                podman(*engine, "run", "--detach", "--rm", f"--name={name}", *more, *files, "--rootfs", "/:O", *WAIT)
                for engine, more in ENGINES
                if podman("container", "exists", name).returncode
            ]
            if podman("container", "exists", name).returncode:
                pytest.skip(f"this podman starts no container here: {tried[-1].stderr}")
        yield NAMES
    finally:
        podman("rm", "--force", "--ignore", "--time=0", *NAMES)  # one of them may be gone


def inside(name: str) -> list[str]:
    """What runs in a container, beside what waits."""
    told = podman("top", name, "args")
    return [line for line in told.stdout.splitlines()[1:] if line.split() != [*WAIT]]


def start(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    words = ["launch", "exec", "--hosts", ",".join(NAMES), "--via", "podman exec -i {host}", *options]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "roxxel_dist", *words, "--", "bash", "-c", STAY],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )


@pytest.mark.parametrize("fault", ["client", "rank", "container", "launcher"])
def test_a_killed_part_of_a_job_in_containers(fault: str, containers: list[str], tmp_path: Path, until: Until) -> None:
    """A job that can go on does, and nothing is left in a container that lives."""
    first, other = containers
    launch = start(tmp_path, "--min-hosts", "1", "--host-timeout", "5", "--host-lease", "10")
    said = tmp_path / "said"
    try:
        until(lambda: len(list(tmp_path.glob("up.0.2.*"))) == 2 or launch.poll() is not None, "the ranks")
        assert len(inside(other)) > 1, said.read_text()
        if fault == "client":
            (client,) = (one for one in psutil.Process(launch.pid).children() if other in one.cmdline())
            client.kill()
        elif fault == "rank":
            podman("exec", other, "kill", "-9", (tmp_path / "up.0.2.1").read_text().strip())
        elif fault == "container":
            podman("kill", other)
        else:
            launch.send_signal(signal.SIGKILL)
        assert launch.wait(120) == (-signal.SIGKILL if fault == "launcher" else 0), said.read_text()
    finally:
        launch.kill()
        launch.wait()
    again = [path.name for path in tmp_path.glob("up.1.*")]
    assert len(again) == {"client": 2, "rank": 2, "container": 1, "launcher": 0}[fault], said.read_text()
    for name in [first] if fault == "container" else [first, other]:
        until(lambda name=name: not inside(name), f"everything in {name} to be gone")
