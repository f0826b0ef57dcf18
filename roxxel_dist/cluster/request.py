"""Asking all ranks of a running job for a checkpoint of the same step, at no cost a step.

Each rank counts its calls of `due`, and a thread of its own speaks for it. When somebody asks, rank 0's thread starts a
round. On every rank the thread (1) takes the lock that `due` needs, (2) tells its count to rank 0, (3) learns from rank
0 the number of the call that shall save, D = 1 + the largest count, (4) notes D, and lets go of the lock.

Nobody misses it: from (1) to (4) a rank's count stands still, so when D is noted it is larger than the count of every
rank. Call D is still to come everywhere, and one call alone has that number. As all ranks make the same calls, it
belongs to the same step; counts stay right where steps do not (a run that goes back to an earlier step).

Nobody waits for ever: threads wait for threads alone, and these need nothing but jax's key-value store, which C++ in
rank 0's process serves. A main thread that stands in `due` waits for its own thread. A main thread that stands in a
collective, for a rank that stands in `due`, holds no lock: its thread answers, the round ends, and the rank in `due`
goes on. A rank that has left its loop has said so under the key by which it would be asked, and keys are written once:
either it is asked first, and answers before it leaves, or rank 0 finds that it has left. Then no step is left to be
due, and the run's last checkpoint is the answer. A process that died or stopped ends the round after a limit.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from roxxel_dist.cluster.mailbox import post_answer, take_requests
from roxxel_dist.cluster.process import WAIT_LIMIT_S, key_value_store, once, process_count, process_index

POLL_S = 0.2
LONG_S = 86_400.0
"""One wait in the key-value store. A wait that times out costs rank 0 34 KB for good, so the waits must not be short;
what ends one is a value, or jax's own shutdown."""
RETRY_S = 0.5
LEAVE_S = 5.0
"""Seconds that leaving may take where the other ranks or the store do not answer."""
ASKED, LEFT = "save", "left"


@dataclasses.dataclass(kw_only=True)
class _Asked:
    """A request on its way: the call of `due` that saves for it, and that call's step once it was made."""

    id: str
    call: int | None = None
    step: int | None = None


class SaveRequests:
    """Within it, a training loop learns which steps somebody wants saved: the same ones on every rank.

    All ranks enter it, make the same calls of `due`, and leave it. Rank 0 looks into the folder, and answers there.

    Args:
        folder: the run directory.
        limit_s: seconds that the ranks have to agree on a step.
    """

    def __init__(self, folder: str | Path, limit_s: float = WAIT_LIMIT_S) -> None:
        self._folder = Path(folder)
        self._limit_s = limit_s
        self._rank, self._ranks = process_index(), process_count()
        self._closed = threading.Event()
        self._store = _Store(once("save"), self._closed) if self._ranks > 1 else None
        work = self._follow if self._rank else self._lead
        self._thread = threading.Thread(target=work, name="save requests", daemon=True)
        self._lock = threading.Lock()
        self._calls = self._round = 0
        self._step: int | None = None
        self._saved: int | None = None
        self._due: set[int] = set()
        self._broken: str | None = None
        self._asked: list[_Asked] = []  # the last two: of rank 0
        self._answers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "SaveRequests":
        self._thread.start()
        return self

    def due(self, step: int) -> bool:
        """Whether to save `step` because somebody asked. Every rank calls this once a step, at the same place.

        Raises:
            TimeoutError: rank 0 asked this rank how far it is, and did not say what follows from it.
        """
        with self._lock:
            self._calls += 1
            self._step = step
            if self._broken:
                raise TimeoutError(self._broken)
            if self._calls not in self._due:
                return False
            self._due.remove(self._calls)
            for one in self._asked:
                if one.call == self._calls:
                    one.step = step
            return True

    def answered(self, step: int) -> None:
        """Say that the checkpoint of `step` is complete. May be called every step: free where nobody waits."""
        self._saved = step
        if self._asked:
            self._settle({"step": step}, lambda one: one.step is not None and one.step <= step)

    def failed(self, step: int, why: str) -> None:
        """Say that `step` could not be saved, so that who asked for it does not wait."""
        if self._asked:
            self._settle({"error": f"step {step} could not be saved: {why}"}, lambda one: one.step == step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock.acquire(timeout=LEAVE_S):  # in vain: a round that hangs in a dying job; its thread is left behind
            self._closed.set()
            self._lock.release()
            if self._store and self._rank:
                self._store.put(f"{self._round}/ask/{self._rank}", LEFT, LEAVE_S)  # what its thread waits for
        self._closed.set()
        self._thread.join(LEAVE_S)
        if self._rank == 0 and not self._thread.is_alive():
            self._look()
            if kind is None and self._saved is not None and self._saved == self._step:  # nothing newer will be saved
                self._settle({"step": self._saved}, lambda one: True)
            self._write_answers()

    def _lead(self) -> None:
        """Rank 0's thread, which alone touches files."""
        while not self._closed.wait(POLL_S):
            self._write_answers()
            self._look()
            if any(one.call is None for one in self._asked) and not self._decide():
                return

    def _look(self) -> None:
        try:
            new = take_requests(self._folder)
        except OSError:  # a network file system that is away for a moment; training goes on without
            return
        with self._lock:
            self._asked += [_Asked(id=request) for request in new]

    def _decide(self) -> bool:
        """Choose the call that saves for all new requests; false where no call will, because a rank has left."""
        with self._lock:
            if self._closed.is_set():
                return False
            counts, absent, left = self._count()
            call = 0 if absent or left else 1 + max(counts)
            if self._store:
                self._store.put(f"{self._round}/call", str(call), self._limit_s)
            self._round += 1
            if call:
                self._due.add(call)
                for one in self._asked:
                    one.call = one.call or call
        if absent and not left:
            why = f"rank {absent[0]} of {self._ranks} did not say within {self._limit_s:.0f} s which step it is in"
            self._settle({"error": why}, lambda one: one.call is None)
        return not left

    def _count(self) -> tuple[list[int], list[int], bool]:
        """(calls of `due` that each rank has made, ranks that do not say it, whether a rank has left its loop)."""
        counts, absent = [self._calls], []
        if not self._store:
            return counts, absent, False
        others = range(1, self._ranks)
        for rank in others:
            if not self._store.put(f"{self._round}/ask/{rank}", ASKED, self._limit_s):
                return counts, absent, True
        end = time.monotonic() + self._limit_s
        for rank in others:
            count = self._store.get(f"{self._round}/count/{rank}", max(end - time.monotonic(), 0.001))
            absent += [rank] if count is None else []
            counts += [int(count or 0)]
        return counts, absent, False

    def _follow(self) -> None:
        """The thread of every other rank."""
        assert self._store
        while True:
            asked = f"{self._round}/ask/{self._rank}"
            if self._closed.is_set():
                self._store.put(asked, LEFT, LEAVE_S)
            if self._store.get(asked) != ASKED:
                return
            with self._lock:
                self._store.put(f"{self._round}/count/{self._rank}", str(self._calls), self._limit_s)
                call = self._store.get(f"{self._round}/call", 2 * self._limit_s)
                self._round += 1
                if call is None:
                    self._broken = (
                        f"rank {self._rank} was asked by rank 0 which step it is in, said it, and heard nothing for "
                        f"{2 * self._limit_s:.0f} s: look at rank 0's log"
                    )
                    return
                if int(call):
                    self._due.add(int(call))

    def _settle(self, answer: dict[str, Any], whose: Callable[[_Asked], bool]) -> None:
        with self._lock:
            self._answers |= {one.id: answer for one in self._asked if whose(one)}
            self._asked = [one for one in self._asked if not whose(one)]

    def _write_answers(self) -> None:
        with self._lock:
            answers, self._answers = self._answers, {}
        for request, answer in answers.items():
            try:
                post_answer(self._folder, request, answer)
            except OSError:  # a full disk: again with the next look
                with self._lock:
                    self._answers[request] = answer


class _Store:
    """jax's key-value store under a prefix of its own, for threads that a network error must not end.

    A coordinator that is gone for good is not this class's business: jax ends the process then.
    """

    def __init__(self, prefix: str, closed: threading.Event) -> None:
        self._client, self._prefix, self._closed = key_value_store(), prefix, closed

    def put(self, key: str, value: str, limit_s: float) -> bool:
        """Write a key that nobody has written; false where somebody has written something else, or on time-out."""
        end = time.monotonic() + limit_s
        while True:
            try:
                self._client.key_value_set(f"{self._prefix}/{key}", value)
                return True
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" in str(error):  # perhaps by this very call, and the reply was lost
                    return self.get(key, limit_s) == value
            if self._pause(end):
                return False

    def get(self, key: str, limit_s: float | None = None) -> str | None:
        """Wait for a key; None on time-out, or when the loop was left and the store does not answer."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while True:
            wait_s = LONG_S if end is None else max(end - time.monotonic(), 0.001)
            try:
                return self._client.blocking_key_value_get(f"{self._prefix}/{key}", int(1000 * wait_s) + 1)
            except jax.errors.JaxRuntimeError:
                if self._pause(end):
                    return None

    def _pause(self, end: float | None) -> bool:
        """Wait a little before another try; true where there shall be none."""
        return (end is not None and time.monotonic() >= end) or self._closed.wait(RETRY_S)
