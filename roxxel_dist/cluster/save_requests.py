"""A checkpoint on request: rank 0 looks for requests at logged steps, and all ranks save the same step.

Among several processes rank 0 says one step ahead what it has found, so at the logged step nobody waits for it. (A rank
that stops before it has said so has entered fewer steps than those that wait: the launcher names it.)
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from roxxel_dist.cluster.distributed import is_primary, key_value_store, once, process_count, unanswered
from roxxel_dist.cluster.mailbox import post_answer, take_requests

LIMIT_S = 3600.0
"""Seconds that the other ranks wait for rank 0, which may have to validate or to write for long."""
KEPT = 16
"""Keys of jax's key-value store that are not deleted yet: more logged steps than one rank can be ahead of another."""


class SaveRequests:
    """Which steps somebody wants saved: the same ones on every rank. Rank 0 alone touches files.

    Args:
        folder: the run directory.
        logged: whether a step is logged, and so may be saved on request.
    """

    def __init__(self, folder: str | Path, logged: Callable[[int], bool]) -> None:
        self._folder, self._logged = Path(folder), logged
        self._new: list[str] = []
        self._saving: dict[str, int] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._key: str | None = None
        self._old_keys: deque[str] = deque()

    def due(self, step: int) -> bool:
        """Whether to save `step` because somebody asked. Every rank calls this once a step, at the same place.

        Raises:
            TimeoutError: rank 0 did not come to the step before within an hour.
        """
        due = False
        if self._logged(step):
            if process_count() == 1:
                self._look()
            due = bool(self._new) if is_primary() else self._said()
            self._key = None
            if due:
                self._saving |= dict.fromkeys(self._new, step)
                self._new = []
        if process_count() > 1 and self._logged(step + 1):
            self._say()
        return due

    def answered(self, step: int) -> None:
        """Say that the checkpoint of `step` is complete."""
        self._settle({"step": step}, [request for request, due in self._saving.items() if due <= step])

    def failed(self, step: int, why: str) -> None:
        """Say that `step` could not be saved, so that who asked for it does not wait."""
        answer = {"error": f"step {step} could not be saved: {why}"}
        self._settle(answer, [request for request, due in self._saving.items() if due == step])

    def finish(self, step: int) -> None:
        """The run ends, and `step`, its last one, is saved: the answer to all who asked until now."""
        self._look()
        self._saving |= dict.fromkeys(self._new, step)
        self.answered(step)

    def _say(self) -> None:
        """Rank 0's word for the next step, which is a logged one; the others note under which key it will be."""
        self._key = once("save")
        if not is_primary():
            return
        self._look()
        key_value_store().key_value_set(self._key, "yes" if self._new else "no")
        self._old_keys.append(self._key)
        if len(self._old_keys) > KEPT:
            key_value_store().key_value_delete(self._old_keys.popleft())

    def _said(self) -> bool:
        if self._key is None:  # the first step of all
            return False
        try:
            return key_value_store().blocking_key_value_get(self._key, int(LIMIT_S * 1000)) == "yes"
        except jax.errors.JaxRuntimeError as error:
            raise unanswered(
                error, f"waited {LIMIT_S:.0f} s for rank 0 to say whether to save (look at its log)"
            ) from error

    def _look(self) -> None:
        """Take in new requests; also a chance for an answer that could not be written."""
        if is_primary():
            self._settle({}, [])
            try:
                self._new += take_requests(self._folder)
            except OSError:  # a network file system that is away for a moment; training goes on without
                return

    def _settle(self, answer: dict[str, Any], requests: list[str]) -> None:
        for request in requests:
            del self._saving[request]
            self._answers[request] = answer
        for request in list(self._answers):
            try:
                post_answer(self._folder, request, self._answers[request])
            except OSError:  # a full disk: again at the next logged step
                return
            del self._answers[request]
