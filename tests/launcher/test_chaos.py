"""The short form of `make chaos`: five kinds of faults over one training on three hosts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import chaos
from chaos_faults import KINDS, choose
from hosts import Cluster

SHORT = ("kill rank", "exception", "drop link", "kill launcher", "SIGTERM")


def test_a_seed_chooses_the_same_faults_each_time_and_every_kind_of_them() -> None:
    chosen = choose(1, 2 * len(KINDS), ("h1", "h2"))
    assert chosen == choose(1, 2 * len(KINDS), ("h1", "h2"))
    assert chosen != choose(2, 2 * len(KINDS), ("h1", "h2"))
    assert sorted(fault.kind for fault in chosen) == sorted([*KINDS, *KINDS])
    assert all(number / 19 <= fault.place < (number + 1) / 19 for number, fault in enumerate(chosen))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_training_under_faults_is_the_undisturbed_one(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    hosts = cluster(3)
    summary = chaos(hosts, tmp_path, choose(1, len(SHORT), hosts.names, SHORT))
    assert summary.faults == dict.fromkeys(SHORT, 1)
    assert summary.codes[-9] == 1
    assert summary.codes[0] == 1
