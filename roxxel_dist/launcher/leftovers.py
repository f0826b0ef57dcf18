"""Ranks that run on this host already."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.job import log_dir_for

WORKER = "roxxel_dist.launcher.worker"
AGENT = "roxxel_dist.launcher.agent"
RUN_ID = "ROXXEL_RUN_ID"


def leftovers(run_id: str | None, run_dir: str | None) -> list[dict[str, Any]]:
    """The ranks of this user on this host: `pid`, `run_id`, `seconds` of age, whether they are `ours`, and an `orphan`.

    A rank is what the worker runs in, and, for `run_id`, every process that has it in its environment. It is ours if
    its run is kept in the folder `run_dir`, or has that run id where no folder is given. It is an orphan if no agent
    watches over it any more. The ranks of a launch that this process is itself part of, and processes in another
    network (other hosts, as containers are), are left out.
    """
    outer = os.environ.get(RUN_ID)
    network = os.readlink("/proc/self/ns/net")
    folder = os.path.realpath(run_dir) if run_dir is not None else None
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with suppress(OSError, ValueError):  # it ended while we looked, or is not to be looked at
            place = Path("/proc", name)
            if place.stat().st_uid != os.getuid():
                continue
            rank = _rank(place, run_id, folder)
            if rank is None or (rank["run_id"] == outer != run_id) or os.readlink(place / "ns/net") != network:
                continue
            found.append({"pid": int(name), **rank, "seconds": _age(place), "orphan": _is_orphan(place)})
    return sorted(found, key=lambda rank: rank["pid"])


def _rank(place: Path, run_id: str | None, folder: str | None) -> dict[str, Any] | None:
    """The rank that a process is, or None."""
    words = _strings(place / "cmdline")
    is_worker = WORKER in words
    if not is_worker and run_id is None:
        return None
    own_id = _variable(place, RUN_ID)
    ours = run_id is not None and own_id == run_id
    if folder is not None:  # launches in other folders, or by other users' homes, may have the same id
        command = tuple(words[words.index(WORKER) + 1 :]) if is_worker else ()
        ours = (is_worker or ours) and _run_dir(place, command, own_id) == folder
    return {"run_id": own_id, "ours": ours} if is_worker or ours else None


def _run_dir(place: Path, command: tuple[str, ...], run_id: str) -> str:
    """The folder in which the run of a rank is kept."""
    return os.path.realpath(os.readlink(place / "cwd") / log_dir_for(command, run_id).parent)


def _is_orphan(place: Path) -> bool:
    parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    return AGENT not in _strings(Path("/proc", parent, "cmdline"))


def _variable(place: Path, name: str) -> str:
    values = [one.removeprefix(f"{name}=") for one in _strings(place / "environ") if one.startswith(f"{name}=")]
    return values[0] if values else ""


def _strings(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="surrogateescape").split("\0")


def _age(place: Path) -> float:
    started = int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")
