"""A real Ray cluster for tests: `ray start` on hosts that are network namespaces, the first one its head."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from commands import wait_for
from hosts import ROOT, Cluster

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
CPUS = 2
GPUS = 4
"""Ray only counts them."""
END_S = 30.0
STAY = "touch up.$ROXXEL_PROCESS_ID; sleep 1000; true"
"""A rank that says that it is up, and stays."""
OURS = ("roxxel_dist", "RayNode", "sleep 1000")


@dataclass
class RayNodes:
    """Ray on the hosts of a cluster."""

    hosts: Cluster
    folder: Path
    token: bool
    daemons: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    options: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Of the last `ray start` on each host."""

    @property
    def address(self) -> str:
        return f"{self.hosts.address(self.hosts.names[0])}:6379"

    @property
    def environment(self) -> dict[str, str]:
        """What Ray, and who uses it, finds in its environment."""
        common = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_ADDRESS": self.address,
        }
        if not self.token:
            return common | {"RAY_AUTH_MODE": "disabled"}
        return common | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}

    def start(self, name: str, *options: object) -> None:
        """Start Ray on a host; does not wait until it has joined."""
        head = name == self.hosts.names[0]
        role = ["--head", "--port", 6379, "--no-monitor"] if head else ["--address", self.address]
        # Each its own, as on machines: Ray unpacks a job's files there, and takes away what lies in the way.
        role += ["--temp-dir", self.folder / name]
        words = [*RAY, "start", "--block", *role, "--node-ip-address", self.hosts.address(name), "--num-cpus", CPUS]
        words += ["--num-gpus", GPUS, "--object-store-memory", 80_000_000, "--disable-usage-stats"]
        words += ["--include-log-monitor", "false", *options]  # its messages are not read
        env = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        with (self.folder / f"{name}.log").open("ab") as log:
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.daemons[name] = self.hosts.popen(words, on=name, env=env, **pipes)
        self.options[name] = options

    def wait_until_joined(self, name: str, limit_s: float = 300) -> None:
        """Until a host is a node of the cluster. A `ray start` that gave up, after 30 s, is typed again."""
        log, end = self.folder / f"{name}.log", time.monotonic() + limit_s
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < end, f"Ray on {name} has not joined after {limit_s:g} s: {log.read_text()}"
            for host, daemon in list(self.daemons.items()):
                if daemon.poll() is not None:
                    self.start(host, *self.options[host])
            time.sleep(0.1)

    def wait_until_up(self, name: str, limit_s: float = 120) -> None:
        """Until Ray says where the cluster is, which comes some seconds after the head's port is open."""
        told, end = self.folder / name / "ray_current_cluster", time.monotonic() + limit_s
        while not told.exists():
            assert time.monotonic() < end, f"Ray on {name} is not up after {limit_s:g} s"
            time.sleep(0.1)

    def stop(self, name: str) -> None:
        """End Ray on a host as a person would; what does not end is killed with the host."""
        daemon = self.daemons.pop(name)
        daemon.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(END_S)

    def kill(self, name: str) -> None:
        """End Ray on a host as a crash would: its daemon, and whatever it then leaves."""
        for pid in self.hosts.processes(name):
            if "raylet/raylet" in _line(pid):
                os.kill(pid, signal.SIGKILL)
        self.daemons.pop(name).wait(END_S)

    def ours(self) -> dict[str, list[str]]:
        """What runs of a launch on any host: its ranks, agents and actors."""
        found = {name: [_line(pid) for pid in self.hosts.processes(name)] for name in (*self.hosts.names, "controller")}
        mine = {name: [line for line in lines if any(part in line for part in OURS)] for name, lines in found.items()}
        return {name: lines for name, lines in mine.items() if lines}

    def pid(self, name: str, part: str) -> int:
        """The oldest process of a host whose command line holds `part`."""
        found = [psutil.Process(pid) for pid in self.hosts.processes(name) if part in _line(pid)]
        return min(found, key=lambda one: one.create_time()).pid  # process numbers wrap around


def _line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:  # it has ended
        return ""


@contextmanager
def ray_nodes(
    count: int, *, token: bool = True, head: tuple[object, ...] = (), names: tuple[str, ...] = ()
) -> Iterator[RayNodes]:
    """Ray on so many hosts, gone at the end. `head`: options of the first `ray start`; `names`: of the hosts."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets are made in it: their paths must be short
    secret = folder / "token"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    try:
        with Cluster(count, names) as hosts:
            nodes = RayNodes(hosts=hosts, folder=folder, token=token)
            try:
                for name in hosts.names:
                    nodes.start(name, *(head if name == hosts.names[0] else ()))
                    if name == hosts.names[0]:
                        _wait_for_head(nodes)
                yield nodes
            finally:
                for name in reversed(list(nodes.daemons)):
                    nodes.stop(name)
    finally:
        shutil.rmtree(folder)


def _wait_for_head(nodes: RayNodes) -> None:
    """Until its port is open: a worker that asks before gives up."""
    head, port = nodes.address.split(":")
    script = f"for i in $(seq 300); do echo 2>/dev/null >/dev/tcp/{head}/{port} && exit; sleep 0.1; done; exit 1"
    if nodes.hosts.run(["bash", "-c", script], on=nodes.hosts.names[0]).returncode:
        raise RuntimeError(f"Ray does not start: {(nodes.folder / f'{nodes.hosts.names[0]}.log').read_text()}")


def words(address: str, hosts: int, *more: object) -> list[object]:
    return [sys.executable, "-m", "roxxel_dist", "launch", "ray", "--address", address, "--hosts", hosts, *more]


def launch(nodes: RayNodes, folder: Path, *more: object, hosts: int = 2, **options: Any) -> Any:
    env = nodes.environment | options.pop("env", {})
    return nodes.hosts.run(words(nodes.address, hosts, *more), on="h1", cwd=folder, env=env, **options)


def begin(nodes: RayNodes, folder: Path, *more: object, ranks: int = 2) -> "subprocess.Popen[bytes]":
    """A launch whose ranks are all up."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = nodes.hosts.popen(words("auto", 2, *more), on="h1", cwd=folder, env=nodes.environment, **pipes)
    # A node may still be joining, and Ray has --place-timeout to find it.
    wait_for(lambda: process.poll() is not None or len(list(folder.glob("up.*"))) == ranks, 240, "the ranks' start")
    assert process.poll() is None, process.communicate()
    return process
