"""Ranks that run on this host already."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.host.process_tree import PARENT, STARTED, descendants, stat
from roxxel_dist.launcher.host.warm import NAME
from roxxel_dist.launcher.spec import log_dir_for

WORKER = "roxxel_dist.launcher.host.worker"
AGENT = "roxxel_dist.launcher.host.agent"
LIMIT_S = 2.0
"""How long all processes together may take to be looked at."""


def stale_ranks(run_id: str | None, run_dir: str | None, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """The ranks of this user on this host: `pid`, `run_id`, `seconds` of age, whether they are `ours`, and an `orphan`.

    A rank is what the worker runs in, and, for `run_id`, every process that has it in its environment. It is ours if
    its run is kept in the folder `run_dir`, or has that run id where no folder is given. It is an orphan if no agent
    watches over it any more. The ranks of a launch that this process is itself part of, and processes in another
    network (other hosts, as containers are), are left out.

    Reading the arguments of a process that is stuck in a driver blocks. So a thread reads them, and is abandoned after
    `limit_s`; the process at which it blocks is `stuck`, and those behind it are not known.
    """
    ranks: list[dict[str, Any]] = []
    current: list[int] = []
    thread = threading.Thread(target=_scan, args=(run_id, run_dir, ranks, current), name="stale_ranks", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        stuck = {"run_id": "", "ours": False, "orphan": False, "seconds": 0.0, "stuck": True}
        ranks = [*ranks, *({"pid": pid, **stuck} for pid in current)]
    return sorted(ranks, key=lambda rank: rank["pid"])


def _scan(run_id: str | None, run_dir: str | None, ranks: list[dict[str, Any]], current: list[int]) -> None:
    outer = os.environ.get("ROXXEL_RUN_ID")
    network = os.readlink("/proc/self/ns/net")
    watched = descendants(os.getpid())  # such as spare processes between two attempts
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        current[:] = [int(name)]
        with suppress(OSError):  # it ended meanwhile, or is not to be looked at
            place = Path("/proc", name)
            if place.stat().st_uid != os.getuid() or os.readlink(place / "ns/net") != network:
                continue
            words = _strings(place / "cmdline")
            is_worker = WORKER in words
            if not is_worker and run_id is None:
                continue
            variables = (word.partition("=") for word in _strings(place / "environ"))
            own_id = next((value for name, _, value in variables if name == "ROXXEL_RUN_ID"), "")
            ours = run_id is not None and own_id == run_id
            if run_dir is not None and (is_worker or ours):  # launches in other folders may have the same id
                command = tuple(words[words.index(WORKER) + 1 :]) if is_worker else ()
                kept = os.readlink(place / "cwd") / log_dir_for(command, own_id).parent
                ours = os.path.realpath(kept) == os.path.realpath(run_dir)
            if not (is_worker or ours) or own_id == outer != run_id:
                continue
            fields = stat(int(name))
            seconds = uptime - int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
            parent = _strings(Path("/proc", fields[PARENT].decode(), "cmdline"))
            if int(name) in watched:
                continue
            orphan = AGENT not in parent and WORKER not in parent  # a fork of a rank looks like the rank
            if not orphan and (place / "comm").read_text(errors="replace").strip() == NAME:
                continue  # of another host's agent, on the same machine
            rank = {"run_id": own_id, "ours": ours, "orphan": orphan, "seconds": seconds, "stuck": False}
            ranks.append({"pid": int(name), **rank})


def _strings(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="surrogateescape").split("\0")
