"""A checkpoint on request: a command asks in the mailbox of the run directory, and waits for the answer.

Rank 0 looks about once a second, saves, and answers. A request during a save is answered by the next save.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from roxxel_dist.process.mailbox import Mailbox

FOLDER = ".save"
LOOK_EVERY_S = 1.0


def mailbox(run: str | Path) -> Mailbox:
    """The requests to save in a run directory; an answer is {"step": saved step} or {"error": text}."""
    return Mailbox(Path(run, FOLDER))


class SaveRequests:
    """The requests to save in a run directory, for rank 0, which alone reads them.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        self._mailbox = mailbox(folder)
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
