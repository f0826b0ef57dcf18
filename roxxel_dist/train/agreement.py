"""What all ranks do after a step beside training: stop, save, copy the state. Rank 0 announces it one step ahead.

Each announcement names the step of the next one, about a second later. An ordinary step makes no request, and an
announcement that is read has been there for a step. A rank 0 that is stuck has entered fewer steps than the ranks that
wait for it, so the launcher names it. Another rank that is asked to stop sets a key, at which rank 0 looks before it
announces. Decision 7.
"""

import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import jax

from roxxel_dist.checkpoint.memory import MemoryTier
from roxxel_dist.cluster.distributed import is_primary, process_count, unanswered, unique_key, wait_for_key
from roxxel_dist.cluster.jax_private import key_value_store
from roxxel_dist.cluster.preemption import stop_requested
from roxxel_dist.process.durable import SaveRequests

PERIOD_S = 1.0
"""Seconds from one announcement to the next; at least a step."""
ANNOUNCEMENT_LIMIT_S = 3600.0
"""Seconds that the other ranks wait for rank 0, which may have to validate or to write for long."""
KEPT_ANNOUNCEMENTS = 16
"""Keys that are not deleted yet: more steps than one rank can be ahead of another."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What all ranks do after one step."""

    next_step: int
    """The step of the next announcement."""
    stop: bool = False
    save: bool = False
    copy: dict[str, Any] | None = None
    """The fields of a `memory_schedule.CopyDecision`."""


class StepAgreement:
    """The same `Announcement` after the same step on every rank. All ranks make the same calls.

    Args:
        requests: requests to save, which rank 0 reads.
        memory: the copies of the state in memory, of which rank 0 decides.
    """

    def __init__(self, requests: SaveRequests, memory: MemoryTier | None) -> None:
        self._requests, self._memory = requests, memory
        self._primary, self._alone = is_primary(), process_count() == 1
        self._stop_key = unique_key("stop")
        self._stop_is_sent = False
        self._key = ""  # of the announcement for `_next`
        self._old_keys: deque[str] = deque()

    def begin(self, step: int) -> None:
        """The next step is `step` + 1, and may take longer or shorter than those before: a run or a phase begins.

        An announcement that was not acted on is dropped, and made again for `step` + 1.
        """
        self._interval, self._announced = 1, (step, time.monotonic())
        self._next = step + 1
        if not self._alone:
            self._announce(step)

    def after(self, step: int) -> Announcement:
        """What to do after `step`. Every rank calls this once a step, at the same place.

        Raises:
            TimeoutError: rank 0 did not reach the step before `step` within an hour.
            LostRankError: jax's heartbeat reports a lost rank.
        """
        if self._alone:
            announcement = self._decide(step, step)
        else:
            self._send_stop()
            announcement = Announcement(next_step=self._next)
            if step == self._next:
                what = f"waited {ANNOUNCEMENT_LIMIT_S:.0f} s for rank 0 to announce step {step} (look at its log)"
                announcement = Announcement(**json.loads(wait_for_key(self._key, ANNOUNCEMENT_LIMIT_S, what)))
                self._next = announcement.next_step
        if announcement.save and self._primary:
            self._requests.begin(step)
        if not self._alone and step == self._next - 1:
            self._announce(step)
        return announcement

    def _announce(self, done: int) -> None:
        """On rank 0, publish what to do after the step `_next`; elsewhere, note under which key."""
        self._key = unique_key("step")
        if self._primary:
            before, since = self._announced
            self._announced = done, time.monotonic()
            if done > before:
                # At most twice as many steps as before: the first steps are dispatched faster than they are done.
                steps = PERIOD_S * (done - before) / max(self._announced[1] - since, 1e-6)
                self._interval = max(1, min(int(steps), 2 * self._interval))
            key_value_store().key_value_set(self._key, json.dumps(asdict(self._decide(self._next, done))))
            self._old_keys.append(self._key)
            if len(self._old_keys) > KEPT_ANNOUNCEMENTS:
                key_value_store().key_value_delete(self._old_keys.popleft())

    def _decide(self, step: int, done: int) -> Announcement:
        """On rank 0: what to do after `step`, when `done` steps are done."""
        copy = self._memory.decide(step, done) if self._memory is not None else None
        next_step = step + self._interval
        if self._memory is not None and (due := self._memory.next_step) is not None:
            next_step = min(next_step, max(due, step + 1))
        return Announcement(
            next_step=next_step,
            stop=stop_requested() or (not self._alone and self._is_stop_sent()),
            save=self._requests.is_open(),
            copy=None if copy is None else asdict(copy),
        )

    def _send_stop(self) -> None:
        if not (self._primary or self._stop_is_sent) and stop_requested():
            key_value_store().key_value_set(self._stop_key, "", allow_overwrite=True)  # another rank may have
            self._stop_is_sent = True

    def _is_stop_sent(self) -> bool:
        try:
            key_value_store().key_value_try_get(self._stop_key)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return False
            raise unanswered(error, "asked for requests to stop") from error
        return True
