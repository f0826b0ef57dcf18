"""A checkpoint on request: a command touches a file in the run directory, and waits until the job takes it away.

The job looks about once a second, saves, writes the answer into a second file, and then deletes the first one. A
request during a save is answered by the next save. The command that asks does not import jax.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.durable import write_file

REQUEST, ANSWER = ".save-request", ".save-answer"
LOOK_EVERY_S = 1.0


def post_request(folder: Path) -> None:
    """Ask the job that trains in `folder`.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / REQUEST).touch()


def read_answer(folder: Path) -> dict[str, Any] | None:
    """{"step": saved step} or {"error": text}; None while the request is open.

    Raises:
        OSError: the folder cannot be read.
    """
    if (folder / REQUEST).exists():
        return None
    with contextlib.suppress(FileNotFoundError):  # a run that began has deleted both
        return json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    return None


def sweep(folder: Path) -> None:
    """Delete what earlier runs left. The answers go first: else they would answer the request."""
    for path in (*folder.glob(f"*{ANSWER}*"), folder / REQUEST):
        path.unlink(missing_ok=True)


class SaveRequests:
    """The requests to save in a run directory, for rank 0, which alone reads them.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._asked: int | None = None  # when, as the file has it
        self._step: int | None = None  # that is being saved for it
        self._answer: dict[str, Any] | None = None  # not written yet
        self._look_at = 0.0

    def is_open(self) -> bool:
        """Whether a request waits for a save to begin."""
        if self._step is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._write_answer()
            if self._answer is None:
                self._look()
        return self._step is None and self._answer is None and self._asked is not None

    def begin(self, step: int) -> None:
        """The save of `step` begins, and is for the open request."""
        self._step = step

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is complete."""
        if self._step is not None and self._step <= step:
            self._end({"step": step})

    def failed(self, step: int, why: str) -> None:
        """`step` could not be saved, so the command that asked shall not wait."""
        if self._step == step:
            self._end({"error": f"step {step} could not be saved: {why}"})

    def finish(self, step: int) -> None:
        """The run ends, and `step`, its last one, is saved: the answer to what is open."""
        self._look()
        if self._asked is not None:
            self._end({"step": step})

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # no request; or a network file system that is away for a moment
            self._asked = (self._folder / REQUEST).stat().st_mtime_ns

    def _end(self, answer: Mapping[str, Any]) -> None:
        self._step, self._answer = None, dict(answer)
        self._write_answer()

    def _write_answer(self) -> None:
        if self._answer is None:
            return
        request, answer = self._folder / REQUEST, self._folder / ANSWER
        with contextlib.suppress(OSError):  # a full disk: again at the next look
            write_file(answer, json.dumps(self._answer) + "\n", sync=False)
            asked, self._answer, self._asked = self._asked, None, None
            if request.stat().st_mtime_ns == asked:  # else somebody asked again meanwhile
                request.unlink()
