"""Real launchers, started as programs of their own, and what tests ask about processes."""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import slurm_cluster
from hosts import Cluster
from launchers import Launcher
from machines import missing
from ray_nodes import RayNodes, ray_nodes
from slurm_desk import Desk

from roxxel_dist.cli import main
from roxxel_dist.launcher.host import command as host_command
from roxxel_dist.launcher.job.spec import SCALE_ENV, Limits
from roxxel_dist.launcher.transport import connection

LIMIT_S = 180.0
SCALE = 0.2
"""Of the time limits of the jobs of this room, but for those on hosts of their own: tests wait for silences."""
RUN_ID = f"run_{os.getpid()}"
"""Of this test process alone: another one's ranks are not what this one's have left."""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which only waits for its parent, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition, with a limit that only a hang reaches."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.01)


@dataclass
class Launch:
    """A launcher that runs."""

    process: Launcher
    folder: Path

    def wait(self) -> tuple[int, str, str]:
        """Its exit code, what it showed, and its messages."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, (out or b"").decode(), err.decode()

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()

    def lines(self, rank: int) -> list[str]:
        """The text of a log without header and prefixes."""
        return [line.split(" | ", 1)[1] for line in self.log(rank).rstrip("\n").split("\n")[1:]]

    def family(self) -> dict[str, list[int]]:
        """The guard that the launcher has started, its agent, the keepers of the ranks, and everything below."""
        (guard,) = psutil.Process(self.process.pid).children()
        (agent,) = guard.children()
        everything = [guard, *guard.children(recursive=True)]
        return {
            "guard": [guard.pid],
            "agent": [agent.pid],
            "keepers": [child.pid for child in agent.children()],
            "all": [process.pid for process in everything],
        }

    def marks(self, pattern: str, count: int) -> list[Path]:
        """Files that ranks make in the folder to say that they are ready."""
        wait_until(lambda: len(list(self.folder.glob(pattern))) >= count, f"{count} files {pattern}")
        return sorted(self.folder.glob(pattern))


@pytest.fixture(autouse=True)
def time_scale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` finds it, here and in programs that a test starts."""
    if request.node.get_closest_marker("cluster") is None:
        monkeypatch.setenv(SCALE_ENV, str(SCALE))


@pytest.fixture(autouse=True)
def few_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clients and commands that this process starts ask to die with it.

    They would be forks, and one of a process that has used jax takes 50 ms of CPU. Tests that kill a launcher start
    one of its own.
    """
    for module in (connection, host_command):
        monkeypatch.setattr(module, "die_with_parent", None)


@pytest.fixture
def limits() -> Limits:
    """Of a job of this room."""
    return Limits().scaled(SCALE)


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive


@pytest.fixture
def until() -> Callable[[Callable[[], Any], str], None]:
    return wait_until


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `roxxel-dist WORDS` in this process, in a folder, with these variables alone if any are given."""

    def run(*words: object, cwd: Path, environ: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            if environ is not None:
                for name in list(os.environ):
                    patch.delenv(name)
                for name, value in {SCALE_ENV: str(SCALE), **environ}.items():
                    patch.setenv(name, value)
            code = main([str(word) for word in words])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture
def launch(tmp_path: Path, limits: Limits) -> Iterator[Callable[..., Launch]]:
    """Start a launcher with `tmp_path` as its working directory; its temporary files go to `tmp_path/tmp`."""
    (tmp_path / "tmp").mkdir()
    started: list[Launcher] = []

    def start(
        *command: str,
        stdout: int | None = None,
        environ: dict[str, str] | None = None,
        limits: Limits = limits,
        **job: Any,
    ) -> Launch:
        fields = {"nprocs": 2, "run_id": RUN_ID, "max_restarts": 0, "log_dir": str(tmp_path / "logs"), **job}
        fields |= {"command": command, "limits": dataclasses.asdict(limits)}
        outer = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")}
        env = {**outer, "TMPDIR": str(tmp_path / "tmp"), **(environ or {})}
        process = Launcher(fields, tmp_path, env, stdout)
        started.append(process)
        return Launch(process=process, folder=tmp_path)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


@pytest.fixture
def cluster() -> Iterator[Callable[[int], Cluster]]:
    """Make so many hosts (about 0.1 s); they and all that runs on them are gone after the test."""
    if why := missing():
        pytest.skip(why)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(Cluster(count))


@pytest.fixture
def desk(cluster: Callable[[int], Cluster], tmp_path: Path) -> Iterator[Callable[[int], Desk]]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with ExitStack() as stack:

        def make(count: int = 2) -> Desk:
            (tmp_path / "home").mkdir()
            (tmp_path / "work").mkdir()
            slurm = stack.enter_context(slurm_cluster.Slurm(cluster(count), tmp_path / "home"))
            return Desk(slurm=slurm, folder=tmp_path / "work")

        yield make


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes that both have joined."""
    if why := missing():
        pytest.skip(why)
    with ray_nodes(2, head=("--include-dashboard", "false")) as started:
        started.wait_until_joined("h2")
        yield started
