"""Requests to a running job: files in a folder, each of which the job takes away and answers by a second file.

A request is NAME.request, its answer NAME.answer; both are JSON objects. Who asks imports no jax.
"""

import contextlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.process.durable import write_file

REQUEST, ANSWER = ".request", ".answer"


class Mailbox:
    """The requests in a folder, and their answers.

    Args:
        folder: is made by the first request, and removed with the last answer. The folder above must be there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder: Path = Path(folder)

    def post(self, content: Mapping[str, Any], name: str = "") -> str:
        """Ask, under a new name where none is given; returns the name. Raises OSError."""
        name = name or secrets.token_hex(8)
        while True:
            self.folder.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # somebody took the last answer, and the folder
                write_file(self.folder / f"{name}{REQUEST}", json.dumps(content) + "\n", sync=False)
                return name

    def withdraw(self, name: str) -> None:
        """Take a request away that nobody has taken."""
        (self.folder / f"{name}{REQUEST}").unlink(missing_ok=True)

    def take_answer(self, name: str) -> dict[str, Any] | None:
        """The answer to a request; None where there is none yet. Raises OSError."""
        path = self.folder / f"{name}{ANSWER}"
        try:
            answer = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        self._remove()
        return answer

    def take_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, content) of the requests that are there, which are taken away. One that cannot be read is left."""
        taken: list[tuple[str, dict[str, Any]]] = []
        with contextlib.suppress(OSError):  # no folder; or a network file system that is away for a moment
            for path in sorted(self.folder.glob(f"*{REQUEST}")):
                with contextlib.suppress(OSError, ValueError):
                    content = json.loads(path.read_text(encoding="utf-8"))
                    path.unlink()
                    taken.append((path.stem, content))
        return taken

    def answer(self, name: str, content: Mapping[str, Any]) -> None:
        """Answer a request. Raises OSError."""
        write_file(self.folder / f"{name}{ANSWER}", json.dumps(content) + "\n", sync=False)

    def clear(self) -> None:
        """Delete requests and answers, and what a writer that died left of them. Raises OSError."""
        for path in self.folder.glob("*"):
            if REQUEST in path.name or ANSWER in path.name:
                path.unlink(missing_ok=True)
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()
