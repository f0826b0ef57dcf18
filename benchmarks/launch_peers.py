"""The same no-op ranks under torchrun and mpirun: kill -9 of one, until every rank is gone, in turns with the launcher.

How each is started, on two hosts with two ranks each: the launcher and mpirun by one command on a third machine, which
reach the hosts by ssh; torchrun by one command on each host, with a static rendezvous, or c10d, on the first one.
"""

import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from hosts import Cluster
from launch_jobs import RANK, Ends, Job, MissedError, over_ssh
from launch_table import Row, Setting, Tally

PORT = 29400
LIMIT_S = 30.0
"""How long a peer may take; a longer time counts as this."""
ENOUGH = 3
"""A peer that took longer so many times is not measured again."""
OURS = "roxxel-dist"


def peers(setting: Setting) -> Iterator[Row]:
    """Ours against each."""
    with Cluster(2) as hosts:
        launches = _launches(hosts)
        tallies = {name: Tally(f"kill -9 of a rank, 2 hosts of 2 ranks: {name}") for name in launches}
        beyond = dict.fromkeys(launches, 0)
        for number in range(setting.count):
            for name, launch in launches.items():
                if len(tallies[name].times) == beyond[name] == ENOUGH:
                    continue
                tallies[name].add(lambda name=name, launch=launch, number=number: _once(name, launch, number, beyond))
    mine = tallies[OURS]
    yield Row(what=mine.what, target="", times=mine.times, missed=mine.missed, by_median=True)
    for name in ("torchrun, static", "torchrun, c10d", "mpirun"):
        what = f"kill -9 of a rank, 2 hosts of 2 ranks: over {name}"
        if name not in tallies:
            yield Row(what=what, target="ahead of it", note="not installed")
            continue
        theirs = tallies[name]
        yield _against(what, mine, theirs, beyond[name])


def _against(what: str, mine: Tally, theirs: Tally, beyond: int) -> Row:
    """The times of a peer, met where the slower of ours is below its median."""
    late = f"; {beyond} of {len(theirs.times)} were not gone after {LIMIT_S:g} s" if beyond else ""
    ahead = "" if not (mine.times and theirs.times) else f"ours {statistics.median(mine.times):.3g} s{late}"
    ratio = [one / statistics.median(theirs.times) for one in mine.times] if theirs.times else []
    note = f"it takes {statistics.median(theirs.times):.3g} s (n {len(theirs.times)}), {ahead}" if ratio else ""
    return Row(
        what=what,
        target="ahead of it: < 1 of its median",
        limit=1.0,
        times=ratio,
        unit="of it",
        missed=[*mine.missed, *theirs.missed],
        note=note,
    )


def _once(name: str, launch: Callable[[], Job], number: int, beyond: dict[str, int]) -> float:
    with launch() as job:
        pids = job.up()
        with closing(Ends(pids.values())) as ends:
            begun = time.monotonic()
            os.kill(pids[number % 4], signal.SIGKILL)
            try:
                return ends.wait(LIMIT_S) - begun
            except MissedError:
                if name == OURS:
                    raise
                beyond[name] += 1
                return LIMIT_S


def _launches(hosts: Cluster) -> Mapping[str, Callable[[], Job]]:
    """What is installed."""
    found: dict[str, Callable[[], Job]] = {OURS: lambda: Job(over_ssh(hosts, RANK, "--procs-per-host", 2), 4, hosts)}
    if torchrun := _program("torchrun"):
        found["torchrun, static"] = lambda: _torchrun(hosts, torchrun, "static")
        found["torchrun, c10d"] = lambda: _torchrun(hosts, torchrun, "c10d")
    if mpirun := _program("mpirun"):
        found["mpirun"] = lambda: _mpirun(hosts, mpirun)
    return found


def _program(name: str) -> str | None:
    """Beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _torchrun(hosts: Cluster, torchrun: str, backend: str) -> Job:
    first, second = hosts.names

    def words(node: int) -> list[object]:
        common: list[object] = [torchrun, "--nnodes", 2, "--nproc-per-node", 2, "--node-rank", node]
        endpoint = f"{hosts.address(first)}:{PORT}"
        if backend == "static":
            meet: list[object] = ["--master-addr", hosts.address(first), "--master-port", PORT]
        else:
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench"]
        return [*common, *meet, "--max-restarts", 0, "--no-python", *RANK]

    return Job(words(0), 4, hosts, on=first, also=[(second, words(1))], env={"OMP_NUM_THREADS": "1"})


def _mpirun(hosts: Cluster, mpirun: str) -> Job:
    words: list[object] = [mpirun, "--allow-run-as-root", "-np", 4]
    words += ["--host", ",".join(f"{name}:2" for name in hosts.names), "--oversubscribe"]
    words += ["--mca", "plm_rsh_agent", f"ssh -F {hosts.ssh_config}", "--mca", "oob_tcp_if_include", "eth0"]
    return Job([*words, *RANK], 4, hosts)
