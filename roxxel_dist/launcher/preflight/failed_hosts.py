"""Hosts whose devices did not pass are remembered for a day, so that the next jobs of this user do without them.

A host has a file, in a folder for each cluster, beside the index of jobs. What cannot be written is not
remembered.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.process.durable import state_dir, write_file

KEPT_S = 24 * 3600.0
ALL = "all"


def _folder(backend: Backend) -> Path:
    """That of the hosts of a cluster. Raises FileNotFoundError where this user has no home."""
    kind = type(backend).__name__.removesuffix("Backend").lower()
    return state_dir().parent / "failed-hosts" / (f"{kind}-{backend.cluster}" if backend.cluster else kind)


def _file(backend: Backend, host: str) -> Path:
    return _folder(backend) / f"{quote(host, safe='')}.json"


def known(backend: Backend) -> dict[str, str]:
    """The hosts of a backend that failed within the last day, and why."""
    found: dict[str, str] = {}
    for host in backend.hosts:
        with suppress(OSError, ValueError, TypeError, KeyError):
            value = json.loads(_file(backend, host).read_text(encoding="utf-8"))
            if 0 <= time.time() - float(value["time"]) < KEPT_S:
                found[host] = str(value["why"])
    return found


def remember(backend: Backend, host: str, why: str) -> None:
    """Note that a host failed now. There is nothing to remember of this machine: it has no other in its place."""
    if backend.is_local:
        return
    with suppress(OSError):
        path = _file(backend, host)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, json.dumps({"time": time.time(), "why": why}) + "\n", sync=False)


def forget(backend: Backend, hosts: Sequence[str]) -> None:
    """Note that hosts are good again."""
    for host in hosts:
        with suppress(OSError):
            _file(backend, host).unlink()


def forget_of_user(names: Sequence[str]) -> list[str]:
    """Forget hosts of every cluster, or all hosts; returns those that were known."""
    gone: list[str] = []
    with suppress(FileNotFoundError):
        for path in sorted((state_dir().parent / "failed-hosts").glob("*/*.json")):
            host = unquote(path.stem)
            if host in names or list(names) == [ALL]:
                with suppress(OSError):
                    path.unlink()
                    gone.append(host)
    return gone
