"""The words that start a trial's program as the ranks that it wants."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROXXEL = (sys.executable, "-u", "-m", "roxxel_dist")
GRACE_S = 12
"""What a launcher gives its ranks to save: less than what a trial gets to end."""


def count(task: Mapping[str, Any]) -> int:
    """How many processes a trial has."""
    return int(task.get("hosts") or 1) * int(task.get("procs_per_host") or 1)


def with_ranks(
    task: Mapping[str, Any], words: Sequence[str], alone: Sequence[str] = (), *, env: Iterable[str] = ()
) -> list[str]:
    """A program as the ranks of a trial: itself where it is one, through the launcher where there are more.

    Args:
        task: says how many, and where.
        words: of the program, as they stand behind `--` of `launch`.
        alone: go before them where there is no launcher.
        env: names of the variables that the ranks need; on other hosts they have no others of this process.
    """
    if count(task) == 1:
        return [*alone, *words]
    hosts, procs, gpus = int(task.get("hosts") or 1), str(task["procs_per_host"] or 1), task.get("gpus_per_host")
    dealt = ["--grace", str(GRACE_S), *(["--gpus-per-host", str(int(gpus))] if gpus else []), "--", *words]
    if hosts == 1:
        return [*ROXXEL, "launch", "local", "--nprocs", procs, *dealt]
    where = ["--address", task.get("ray_address") or "auto", "--hosts", str(hosts), "--procs-per-host", procs]
    where += ["--cpus-per-host", f"{task.get('cpus_per_host') or 1:g}"] + ["--insecure"] * bool(task.get("insecure"))
    named = [word for name in env for word in ("--env", name)]
    return [*ROXXEL, "launch", "ray", *where, *named, *dealt]
