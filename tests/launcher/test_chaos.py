"""The short form of `make chaos`: some kinds of faults over one training on three hosts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import chaos
from chaos_faults import KINDS, choose
from hosts import Cluster

SHORT = ("kill rank", "exception", "drop link", "kill launcher", "SIGTERM")
LAUNCHER = (
    "kill launcher while it drains",
    "kill launcher in a save",
    "kill launcher while a host is replaced",
    "Ctrl-C twice",
    "SIGHUP",
    "SIGUSR1",
    "reset ssh",
    "full state folder",
)
RANKS = (
    "runtime exception",
    "crash in the first step",
    "reset connections",
    "read-only folder",
    "deleted logs",
    "stop data workers",
)
HOSTS = ("host back without its folder", "host back with other versions", "launcher's link", "stop agent")


def test_a_seed_chooses_the_same_faults_each_time_and_every_kind_of_them() -> None:
    count = 2 * len(KINDS)
    chosen = choose(1, count, ("h1", "h2"))
    assert chosen == choose(1, count, ("h1", "h2"))
    assert chosen != choose(2, count, ("h1", "h2"))
    assert sorted(fault.kind for fault in chosen) == sorted([*KINDS, *KINDS])
    assert all(number / (count + 1) <= fault.place < (number + 1) / (count + 1) for number, fault in enumerate(chosen))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_under_faults_is_the_undisturbed_one(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    hosts = cluster(3)
    summary = chaos(hosts, tmp_path, choose(1, len(SHORT), hosts.names, SHORT))
    assert summary.faults == dict.fromkeys(SHORT, 1)
    assert summary.codes[-9] == 1
    assert summary.codes[0] == 1


@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["ssh", "exec over ssh"])
@pytest.mark.parametrize("kinds", [LAUNCHER, RANKS, HOSTS], ids=["launcher", "ranks", "hosts"])
def test_faults_at_unlucky_moments_change_nothing(
    cluster: Callable[[int], Cluster], tmp_path: Path, kinds: tuple[str, ...], way: str
) -> None:
    hosts = cluster(3)
    summary = chaos(hosts, tmp_path, choose(3, len(kinds), hosts.names, kinds), way=way)
    assert summary.faults == dict.fromkeys(kinds, 1)
    assert summary.codes[0] == 1
