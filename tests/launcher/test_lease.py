"""Links that are cut: the launcher's own ends nothing for a time, that of one host ends its ranks soon."""

import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import CONTROLLER, Cluster

from roxxel_dist.launcher.agent.agent import HostLease
from roxxel_dist.launcher.job.spec import Limits

Until = Callable[[Callable[[], Any], str], None]
BEAT = """
touch up.$ROXXEL_ATTEMPT.$ROXXEL_PROCESS_ID
until [ -e go ]; do date +%s.%N >> beats.$ROXXEL_ATTEMPT.$ROXXEL_PROCESS_ID; sleep 0.2; done
"""
LIMITS = Limits()
CUT_S = 13.0
"""Longer than a host alone may be silent."""
WAYS = pytest.mark.parametrize("way", ["ssh", "exec over ssh"])


class Job:
    """Ranks that say every 0.2 s that they live, launched over ssh, or by a command of which ssh is a part."""

    def __init__(self, hosts: Cluster, folder: Path, until: Until, way: str, *options: object, ranks: int) -> None:
        self.hosts, self.folder, self.until = hosts, folder, until
        words = [*hosts.launch(way), "--max-restarts", 1, *options]
        self.screen = folder / "screen.txt"
        with self.screen.open("wb") as screen:
            self.process = hosts.popen(
                [sys.executable, "-m", "roxxel_dist", *words, "--", "bash", "-c", BEAT],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )
        self.wait_until_up(0, ranks)

    def wait_until_up(self, attempt: int, ranks: int) -> None:
        up = lambda: len(list(self.folder.glob(f"up.{attempt}.*"))) == ranks  # noqa: E731
        self.until(lambda: up() or self.process.poll() is not None, f"{ranks} ranks of attempt {attempt}")
        assert self.process.poll() is None, self.screen.read_text()

    def beats(self, attempt: int, rank: int) -> list[float]:
        return [float(line) for line in (self.folder / f"beats.{attempt}.{rank}").read_text().split()]

    def end(self) -> str:
        (self.folder / "go").touch()
        assert self.process.wait(60) == 0
        return self.screen.read_text()

    def block(self, *rules: str) -> None:
        """Packets of the launcher's machine that match are lost, until `unblock`."""
        for rule in rules:
            assert self.hosts.run(["iptables", "-A", *rule.split(), "-j", "DROP"]).returncode == 0

    def unblock(self) -> None:
        assert self.hosts.run(["iptables", "-F"]).returncode == 0


@WAYS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", ["both ways", "no packet comes in", "no packet goes out", "the launcher is stopped"])
@pytest.mark.cluster
def test_a_cut_of_the_launchers_own_link_ends_nothing(
    how: str, count: int, way: str, cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    job = Job(cluster(count), tmp_path, until, way, ranks=count)
    time.sleep(1)
    match how:
        case "both ways":
            job.hosts.drop(CONTROLLER)
        case "no packet comes in":
            job.block("INPUT -s 10.77.0.0/24")
        case "no packet goes out":
            job.block("OUTPUT -d 10.77.0.0/24")
        case _:
            job.process.send_signal(signal.SIGSTOP)
    time.sleep(CUT_S)
    match how:
        case "both ways":
            job.hosts.restore(CONTROLLER)
        case "the launcher is stopped":
            job.process.send_signal(signal.SIGCONT)
        case _:
            job.unblock()
    time.sleep(CUT_S)  # the links come back within as long as they were cut: TCP tries less and less often
    said = job.end()
    assert not list(tmp_path.glob("up.1.*")), said
    assert "restart" not in said
    if how != "the launcher is stopped":
        assert said.count("this machine seems to be disconnected; the ranks continue without it for 50 s more") == 1
        assert said.count("all hosts respond again, after ") == 1


@WAYS
@pytest.mark.cluster
def test_when_the_lease_is_over_the_ranks_end_and_the_restart_counts(
    way: str, cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    job = Job(cluster(2), tmp_path, until, way, "--host-lease", 14, ranks=2)
    job.hosts.drop(CONTROLLER)
    cut = time.time()
    time.sleep(19)
    ends = [job.beats(0, rank)[-1] - cut for rank in (0, 1)]
    assert all(CUT_S < end < 17 for end in ends), ends
    job.hosts.restore(CONTROLLER)
    job.wait_until_up(1, 2)
    said = job.end()
    assert "has sent nothing for 14 s (--host-lease; nor had other hosts at first" in said
    assert "restart 1 of 1" in said


@WAYS
@pytest.mark.parametrize("how", ["all its links", "its link to the launcher", "it and then the launcher's link"])
@pytest.mark.cluster
def test_a_host_that_is_cut_off_alone_ends_its_ranks_before_others_replace_them(
    how: str, way: str, cluster: Callable[[int], Cluster], tmp_path: Path, until: Until
) -> None:
    options = ["--spare-hosts", 1, "--host-timeout", 1, "--host-lease", 20]
    job = Job(cluster(3), tmp_path, until, way, *options, ranks=2)
    time.sleep(1)
    if how == "its link to the launcher":
        address = job.hosts.address("h2")
        job.block(f"INPUT -s {address}", f"OUTPUT -d {address}")
    else:
        job.hosts.drop("h2")
    cut = time.time()
    if how == "it and then the launcher's link":
        time.sleep(4)
        job.hosts.drop(CONTROLLER)
        time.sleep(3)
        job.hosts.restore(CONTROLLER)
    job.wait_until_up(1, 2)
    time.sleep(1)
    said = job.end()
    assert "going on without h2, with h3 instead" in said
    assert job.beats(0, 1)[-1] < min(job.beats(1, 0)[0], job.beats(1, 1)[0])
    if how != "it and then the launcher's link":
        assert job.beats(1, 1)[0] - cut < 30


class Agents:
    """The leases of three hosts, with a clock for all and how long each has heard nothing."""

    def __init__(self) -> None:
        terms = {"limit": 60.0, "hosts": 3, "token": "t", "address": "127.0.0.1"}
        self.leases = [HostLease({**terms, "index": index}, LIMITS) for index in range(3)]
        (self.port,) = [lease.port for lease in self.leases if lease.port is not None]
        for lease in self.leases[1:]:
            lease.meet(self.port)
        self.now = 100.0

    def check(self, *silent: float) -> list[bool]:
        """Two rounds, as agents do them: all ask, and take in what they are sent."""
        for _ in range(2):
            for lease, silent_s in zip(self.leases, silent, strict=True):
                lease.check(silent_s, self.now)
            for lease, silent_s in [*zip(self.leases, silent, strict=True)] * 2:
                while lease.fd is not None and select.select([lease.fd], [], [], 0)[0]:
                    lease.receive(silent_s, self.now)
        return [lease.holds for lease in self.leases]


@pytest.fixture
def agents() -> Iterator[Agents]:
    made = Agents()
    yield made
    for lease in made.leases:
        lease.close()


@pytest.mark.parametrize("heard", range(3))
def test_a_lease_holds_only_while_no_host_hears_the_launcher(heard: int, agents: Agents) -> None:
    silent = [30.0] * 3
    silent[heard] = 0.4
    assert agents.check(*silent) == [False] * 3
    silent[heard] = LIMITS.orphan_s + 0.1
    assert agents.check(*silent) == [True] * 3
    silent[heard] = 0.2  # it hears again; the others have TCP's next try before them
    assert agents.check(*silent) == [index != heard for index in range(3)]


def test_an_old_question_or_that_of_a_stranger_holds_no_lease(agents: Agents) -> None:
    assert agents.check(30, 30, 0) == [False] * 3
    assert agents.check(30, 0, 30) == [True, False, True]  # asked by 1 a moment ago
    assert agents.check(0, 0, 0) == [False] * 3
    agents.now += LIMITS.fresh_s + 0.1
    assert agents.check(30, 0, 30) == [False] * 3
    stranger = HostLease({"limit": 60.0, "hosts": 3, "token": "other", "address": "127.0.0.1", "index": 1}, LIMITS)
    stranger.meet(agents.port)
    stranger.check(30, agents.now)
    assert agents.check(30, 0, 30) == [False] * 3
    stranger.close()


def test_the_only_host_has_a_lease_and_needs_no_answer() -> None:
    lease = HostLease({"limit": 60.0, "hosts": 1, "token": "t", "address": "127.0.0.1", "index": 0}, LIMITS)
    assert (lease.fd, lease.port) == (None, None)
    for silent_s, holds in ((0.0, False), (LIMITS.orphan_s, True), (0.0, False)):
        lease.check(silent_s, 100.0)
        assert lease.holds is holds
