"""A checkpoint on request: a command puts a file into the run directory, and the job answers with another one.

Each request has its own id, so several people may ask at once, and no request overwrites another. Rank 0 looks for
requests at logged steps, and all ranks save the same one. Among several processes rank 0 announces one step ahead
whether to save: no rank waits for it at the logged step, and if rank 0 is stuck, it has entered fewer steps than the
ranks that wait, so the launcher names it (decisions.md: one step ahead).

The command that asks does not import jax.
"""

import contextlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REQUEST, ANSWER = ".save-request-", ".save-answer-"
ANNOUNCEMENT_TIMEOUT_S = 3600.0
"""Seconds that the other ranks wait for rank 0, which may have to validate or to write for long."""
KEPT_ANNOUNCEMENTS = 16
"""Keys of jax's key-value store that are not deleted yet: more logged steps than one rank can be ahead of another."""


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
    """The ids of all open requests; the next call gives only new ones.

    Raises:
        OSError: the folder cannot be read or written.
    """
    requests = [name.removeprefix(REQUEST) for name in os.listdir(folder) if name.startswith(REQUEST)]
    for request in requests:
        (folder / f"{REQUEST}{request}").unlink(missing_ok=True)  # it may be withdrawn in this moment
    return requests


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
    path.unlink(missing_ok=True)
    return answer


def sweep(folder: Path) -> None:
    """Remove requests to runs that are dead, and answers that came too late."""
    for path in (*folder.glob(f"{REQUEST}*"), *folder.glob(f"{ANSWER}*")):
        path.unlink(missing_ok=True)


class SaveRequests:
    """Which steps to save by request: the same ones on every rank. Only rank 0 touches files.

    Args:
        folder: the run directory.
        logged: whether a step is logged, and so may be saved on request.
    """

    def __init__(self, folder: str | Path, logged: Callable[[int], bool]) -> None:
        from roxxel_dist.cluster.distributed import is_primary, process_count

        self._folder, self._logged = Path(folder), logged
        self._primary, self._alone = is_primary(), process_count() == 1
        self._new: list[str] = []
        self._step_of: dict[str, int] = {}  # requests whose step is being saved
        self._answers: dict[str, dict[str, Any]] = {}  # by request; not written yet
        self._key: str | None = None  # of the announcement for the next logged step
        self._old_keys: deque[str] = deque()

    def should_save(self, step: int) -> bool:
        """Whether to save `step` by request. Every rank calls this once a step, at the same place.

        Raises:
            TimeoutError: rank 0 did not reach the step before `step` within an hour.
            LostRankError: jax's heartbeat reports a lost rank.
        """
        save = False
        if self._logged(step):
            if self._alone:
                self._look()
            save = bool(self._new) if self._primary else self._announced()
            self._key = None
            self._assign(step)
        if not self._alone and self._logged(step + 1):
            self._announce()
        return save

    def saved(self, step: int) -> None:
        """Say that the checkpoint of `step` is complete."""
        self._answer({"step": step}, [request for request, begun in self._step_of.items() if begun <= step])

    def failed(self, step: int, why: str) -> None:
        """Say that `step` could not be saved, so that the command that asked does not wait."""
        answer = {"error": f"step {step} could not be saved: {why}"}
        self._answer(answer, [request for request, begun in self._step_of.items() if begun == step])

    def finish(self, step: int) -> None:
        """The run ends, and `step`, its last one, is saved: the answer to all open requests."""
        self._look()
        self._assign(step)
        self.saved(step)

    def _announce(self) -> None:
        """On rank 0, tell whether to save the next step, which is a logged one; elsewhere, note under which key."""
        from roxxel_dist.cluster.distributed import unique_key
        from roxxel_dist.cluster.jax_private import key_value_store

        self._key = unique_key("save")
        if self._primary:
            self._look()
            key_value_store().key_value_set(self._key, "yes" if self._new else "no")
            self._old_keys.append(self._key)
            if len(self._old_keys) > KEPT_ANNOUNCEMENTS:
                key_value_store().key_value_delete(self._old_keys.popleft())

    def _announced(self) -> bool:
        from roxxel_dist.cluster.distributed import wait_for_key

        if self._key is None:  # the first step of all
            return False
        what = f"waited {ANNOUNCEMENT_TIMEOUT_S:.0f} s for rank 0 to say whether to save (look at its log)"
        return wait_for_key(self._key, ANNOUNCEMENT_TIMEOUT_S, what) == "yes"

    def _look(self) -> None:
        """Take in new requests; also a chance for an answer that could not be written."""
        if self._primary:
            self._write_answers()
            with contextlib.suppress(OSError):  # a network file system that is away for a moment
                self._new += take_requests(self._folder)

    def _assign(self, step: int) -> None:
        self._step_of |= dict.fromkeys(self._new, step)
        self._new = []

    def _answer(self, answer: dict[str, Any], requests: list[str]) -> None:
        for request in requests:
            del self._step_of[request]
            self._answers[request] = answer
        self._write_answers()

    def _write_answers(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: again at the next logged step
            for request in list(self._answers):
                post_answer(self._folder, request, self._answers[request])
                del self._answers[request]
