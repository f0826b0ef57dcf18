"""Requests to a job that hosts join or leave it: files beside its logs, which its controller answers.

A request is a file NAME.request; the controller takes it away, and writes NAME.answer.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.cluster.durable import write_file

FOLDER = "members"
REQUEST, ANSWER = ".request", ".answer"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Hosts that shall join a job, or leave it."""

    file: Path
    """Of the answer."""
    joins: bool
    """Join; or else leave."""
    hosts: tuple[str, ...]


def folder_of(logs: str | Path) -> Path:
    """The folder of the requests to the job with these logs."""
    return Path(logs, FOLDER)


def clear(folder: Path) -> None:
    """Delete requests and answers. A folder that cannot be read has none."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in (REQUEST, ANSWER):
                path.unlink(missing_ok=True)


def post(folder: Path, hosts: Sequence[str], *, joins: bool) -> Path:
    """Ask; the file that the request is until it is taken. Raises OSError."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{secrets.token_hex(8)}{REQUEST}"
    write_file(path, json.dumps({"joins": joins, "hosts": list(hosts)}) + "\n", sync=False)
    return path


def read(folder: Path) -> Iterator[Request]:
    """Take the requests that are there. What is none, or cannot be read, is left."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in sorted(names):
        path = folder / name
        if path.suffix == REQUEST:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                values = json.loads(path.read_text(encoding="utf-8"))
                hosts = tuple(map(str, values["hosts"]))
                path.unlink()
                yield Request(file=path.with_suffix(ANSWER), joins=bool(values["joins"]), hosts=hosts)


def answer(request: Request, done: bool, text: str) -> None:
    """Answer a request. The asker may be gone, and a full disk ends no job."""
    with contextlib.suppress(OSError):
        write_file(request.file, json.dumps({"done": done, "text": text}) + "\n", sync=False)


def take_answer(request: Path) -> tuple[bool, str] | None:
    """Whether a request was followed, and the words for it; None where there is no answer yet."""
    path = request.with_suffix(ANSWER)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()
        return bool(values["done"]), str(values["text"])
    except FileNotFoundError:
        return None
