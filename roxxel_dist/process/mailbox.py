"""Requests to a running job: files in a folder, each of which the job takes away and answers by a second file.

A request is NAME.request, its answer NAME.answer; both are JSON objects. Who asks imports no jax.
"""

import contextlib
import json
import secrets
import time
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
        requests: list[tuple[str, dict[str, Any]]] = []
        with contextlib.suppress(OSError):  # no folder; or a network file system that is away for a moment
            for path in sorted(self.folder.glob(f"*{REQUEST}")):
                with contextlib.suppress(OSError, ValueError):
                    content = json.loads(path.read_text(encoding="utf-8"))
                    path.unlink()
                    requests.append((path.stem, content))
        return requests

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


SAVE_FOLDER = ".save"
LOOK_EVERY_S = 1.0


def save_mailbox(run: str | Path) -> Mailbox:
    """The requests to save in a run directory; an answer is {"step": saved step} or {"error": text}."""
    return Mailbox(Path(run, SAVE_FOLDER))


class SaveRequests:
    """The requests to save in a run directory, for rank 0, which alone reads them.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self._mailbox = save_mailbox(folder)
        self._waiting: list[str] = []  # no save has begun since they came
        self._saving: list[str] = []  # for which a step is being saved
        self._step: int | None = None
        self._answers: dict[str, dict[str, Any]] = {}  # not written yet
        self._look_at = 0.0

    def is_open(self) -> bool:
        """Whether a request waits for a save to begin."""
        if self._step is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._look()
        return self._step is None and bool(self._waiting)

    def begin(self, step: int) -> None:
        """The save of `step` begins, and is for the open requests."""
        self._step, self._saving, self._waiting = step, [*self._saving, *self._waiting], []

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        if self._step is not None and self._step <= step:
            self._end({"step": step})

    def failed(self, step: int, why: str) -> None:
        """`step` could not be saved, so the commands that asked shall not wait."""
        if self._step == step:
            self._end({"error": f"step {step} could not be saved: {why}"})

    def finish(self, step: int) -> None:
        """The run ends, and `step`, its last one, is saved: the answer to what is open."""
        self._look()
        self.begin(step)
        self._end({"step": step})

    def _look(self) -> None:
        self._write_answers()
        self._waiting += [name for name, _ in self._mailbox.take_requests()]

    def _end(self, answer: dict[str, Any]) -> None:
        self._answers |= dict.fromkeys(self._saving, answer)
        self._step, self._saving = None, []
        self._write_answers()

    def _write_answers(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: again at the next look
            for name in [*self._answers]:
                self._mailbox.answer(name, self._answers[name])
                del self._answers[name]
