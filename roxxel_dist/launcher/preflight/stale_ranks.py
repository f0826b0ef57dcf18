"""Ranks that run on this host already."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.spec import log_dir_for

WORKER = "roxxel_dist.launcher.host.worker"
AGENT = "roxxel_dist.launcher.host.agent"
RUN_ID = "ROXXEL_RUN_ID"
LIMIT_S = 2.0
"""How long all processes together may take to be looked at."""


def stale_ranks(run_id: str | None, run_dir: str | None, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The ranks of this user on this host: `pid`, `run_id`, `seconds` of age, whether they are `ours`, and an `orphan`.

    A rank is what the worker runs in, and, for `run_id`, every process that has it in its environment. It is ours if
    its run is kept in the folder `run_dir`, or has that run id where no folder is given. It is an orphan if no agent
    watches over it any more. The ranks of a launch that this process is itself part of, and processes in another
    network (other hosts, as containers are), are left out.

    The kernel lets who reads the words of a process that is stuck in a driver wait with it. So that is done by a thread
    which is left behind after `limit_s`; the process that it stands at is `stuck`, and those behind it are not known.
    """
    found: list[dict[str, Any]] = []
    at: list[int] = []
    thread = threading.Thread(target=_look, args=(run_id, run_dir, found, at), name="stale_ranks", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        with suppress(OSError, ValueError):
            place = Path("/proc", str(at[-1]))
            stuck = {"run_id": "", "ours": False, "orphan": False, "seconds": _age(place), "stuck": True}
            found = [*found, {"pid": at[-1], **stuck}]
    return sorted(found, key=lambda rank: rank["pid"])


def _look(run_id: str | None, run_dir: str | None, found: list[dict[str, Any]], at: list[int]) -> None:
    outer = os.environ.get(RUN_ID)
    network = os.readlink("/proc/self/ns/net")
    folder = os.path.realpath(run_dir) if run_dir is not None else None
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        at[:] = [int(name)]
        with suppress(OSError, ValueError):  # it ended while we looked, or is not to be looked at
            place = Path("/proc", name)
            if place.stat().st_uid != os.getuid() or os.readlink(place / "ns/net") != network:
                continue
            rank = _rank(place, run_id, folder)
            if rank is None or rank["run_id"] == outer != run_id:
                continue
            more = {"seconds": _age(place), "orphan": _is_orphan(place), "stuck": False}
            found.append({"pid": int(name), **rank, **more})


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
    words = _strings(Path("/proc", parent, "cmdline"))
    return AGENT not in words and WORKER not in words  # a fork of a rank looks like the rank


def _variable(place: Path, name: str) -> str:
    values = [one.removeprefix(f"{name}=") for one in _strings(place / "environ") if one.startswith(f"{name}=")]
    return values[0] if values else ""


def _strings(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="surrogateescape").split("\0")


def _age(place: Path) -> float:
    started = int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")
