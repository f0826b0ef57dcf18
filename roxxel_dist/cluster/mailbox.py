"""How a command asks a running job for a checkpoint: small files in the run directory, with an id each.

Several people may ask at once: nobody's file is ever written by another. Standard library only: the command that asks
does not import jax.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REQUEST, ANSWER = ".save-request-", ".save-answer-"


def post_request(folder: Path) -> str:
    """Ask the job that trains in `folder`, and return the id under which it will answer.

    Raises:
        OSError: the folder cannot be written.
    """
    request = secrets.token_hex(8)
    (folder / f"{REQUEST}{request}").touch(exist_ok=False)  # an empty file is whole as soon as it is there
    return request


def withdraw(folder: Path, request: str) -> None:
    """Take a request back, if the job has not seen it, or throw its answer away."""
    for name in (REQUEST, ANSWER):
        with contextlib.suppress(OSError):
            (folder / f"{name}{request}").unlink()


def take_requests(folder: Path) -> list[str]:
    """The ids of all who ask now; the next call gives only new ones.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.name.startswith(REQUEST)]
    return [name.removeprefix(REQUEST) for name in found if _unlinked(folder / name)]


def post_answer(folder: Path, request: str, answer: Mapping[str, Any]) -> None:
    """Write the answer to one request, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{ANSWER}{request}"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dict(answer)) + "\n", encoding="utf-8")
    os.replace(part, path)


def take_answer(folder: Path, request: str) -> dict[str, Any] | None:
    """The answer to a request, which is gone then; None where there is none yet."""
    path = folder / f"{ANSWER}{request}"
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    _unlinked(path)
    return answer


def sweep(folder: Path) -> None:
    """Take away what was asked of runs that are dead, and what they answered too late."""
    for name in (REQUEST, ANSWER):
        for path in folder.glob(f"{name}*"):
            _unlinked(path)


def _unlinked(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:  # the one who asked has given up in this moment
        return False
    return True
