"""When the state of a run is saved, or copied in memory, and what follows a save: cursor, weights, answers.

What all ranks do after a step beside training, rank 0 announces one step ahead. Each announcement names the step of the
next one, about a second later. An ordinary step makes no request, and an announcement that is read has been there for a
step. A rank 0 that is stuck has entered fewer steps than the ranks that wait for it, so the launcher names it. Another
rank that is asked to stop sets a key, at which rank 0 looks before it announces. Decision 7.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import TABLE, read_verified
from roxxel_dist.checkpoint.memory import MemoryTier
from roxxel_dist.checkpoint.metadata import META, write_cursor
from roxxel_dist.checkpoint.store import CheckpointStore, SaveError
from roxxel_dist.cluster.distributed import barrier, is_primary, process_count, unanswered, unique_key, wait_for_key
from roxxel_dist.cluster.jax_private import key_value_store
from roxxel_dist.cluster.preemption import stop_requested
from roxxel_dist.place.directory import leftovers_of
from roxxel_dist.process.durable import SaveRequests
from roxxel_dist.process.progress import agent_pipe
from roxxel_dist.train.log.base import CRASH_LIMIT_S
from roxxel_dist.train.position import Position
from roxxel_dist.train.resources import Resources
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.files import BEST, LIMIT, NEWEST, step_of, write_weights

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
    """Gives every rank the same `Announcement` after the same step. All ranks make the same calls.

    Rank 0 reads the `requests` to save, and decides of the copies of the state in `memory`.
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

    def announcement(self, step: int) -> Announcement:
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
        """Publish, on rank 0, what to do after the step `_next`; elsewhere, note under which key."""
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
        """What to do, by rank 0, after `step`, when `done` steps are done."""
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


WEIGHTS_LIMIT_S = 600.0
"""Seconds that a finished run may take to write its weights."""
STOP_LIMIT_S = 10.0
"""The same for a run that was asked to stop: it must end soon, and writes the weights after it resumes."""
LAST_WORDS_LIMIT_S = 3600.0
"""Seconds that the other ranks wait at the end for rank 0, which may still draw plots and write files."""


class Saves:
    """Saves and copies the state of a run where it is due, or asked for. All ranks make the same calls.

    As a context manager it writes files of weights in the background. `stopped` says whether the run was asked to stop
    before its end; that step is saved. `memory` has the copies in memory, if there are any.
    """

    def __init__(self, held: Resources, position: Position) -> None:
        options, log = position.parts.options, held.log.text
        self._held, self._store, self._log = held, held.store, log
        self._position, self._options = position, options
        self.stopped: bool = False
        self.memory: MemoryTier | None = held.memory
        self._requests = SaveRequests(held.folder)
        self.agreement: StepAgreement = StepAgreement(self._requests, self.memory)
        enabled, with_state = options.export_weights and is_primary(), bool(position.split.state_names)
        self._exporter = Exporter(held.folder, held.store, log, enabled=enabled, with_state=with_state)
        self._needed = False  # whether the last save must be on disk, whatever copies there are in memory

    def __enter__(self) -> "Saves":
        if is_primary():
            self._exporter.begin(self._store.latest_step() or 0, self._store.best_step())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exporter.wait(STOP_LIMIT_S if kind is None else CRASH_LIMIT_S)

    def due(self, done: int) -> tuple[bool, bool]:
        """Whether to save a checkpoint after a step, as it is due or asked for; whether to copy the state in memory."""
        last_step, announced = self._position.last_step, self.agreement.announcement(done)
        self.stopped = announced.stop and done < last_step
        save = announced.save or self.stopped or self._options.is_due("checkpoint", done, last_step)
        copy = self.memory is not None and self.memory.accept(announced.copy)
        return save, copy and done < last_step

    def idle_since(self) -> float:
        """The time on the clock of the copies in memory."""
        return self.memory.clock() if self.memory is not None else 0.0

    def keep(self, done: int, val_loss: float | None, idle_since: float, *, save: bool, copy: bool) -> None:
        """Save and copy the state after a step; the devices have waited since `idle_since`."""
        if save:
            self._held.progress.say("save")
            self.save(done, val_loss)
        if self.memory is not None and copy:  # behind the save: the copy says what is on its way to the disk
            pending = self._store.pending_step if self._needed else None
            metadata = self._position.checkpoint_metadata(done).to_dict()
            self.memory.save(done, self._position.state, metadata, pending, idle_since)

    def save(self, done: int, val_loss: float | None = None) -> None:
        """Begin to save; of the first checkpoint, wait until it is there, and raise SaveError if it is not."""
        options, position = self._options, self._position
        forever = done in (options.keep_steps or ()) or (options.keep_every and done % options.keep_every == 0)
        self._needed = bool(forever or val_loss is not None or options.on_bad_step == "rewind")
        first = self._store.latest_step() is None
        self._store.save(done, position.state, position.checkpoint_metadata(done).to_dict(), val_loss=val_loss)
        if first:  # on all ranks at the same step, which is what a wait costs once
            try:
                self._store.wait()
            except SaveError as error:
                raise SaveError(f"{error}: the run ends here, as nothing of it would be kept") from None

    def poll(self) -> None:
        """Log how the saves have gone that have ended since; costs nothing where none has. Raises what keeps
        the run from its bucket: StoreError, LeaseLostError."""
        if (check := self._store.check_run) is not None:
            check()
        while self._store.unreported and (ended := self._store.poll()) is not None:
            if ended.problem:
                self._log(f"{ended.problem}. Training continues, and the next save is tried")
                self._requests.failed(ended.step, ended.problem)
            else:
                if ended.warning:
                    self._log(ended.warning)
                self._requests.saved(ended.step)
                if is_primary():
                    agent_pipe().send({"saved": ended.step})
                self._write_cursor(ended.step, finished=False)
                if self._store.best_step() == ended.step:
                    self._exporter.want(BEST, ended.step)

    def steps(self) -> list[int]:
        """The steps of all checkpoints; one that is under way counts too, if it ends well."""
        self._store.settle()
        return self._store.steps()

    def finish(self) -> None:
        """Wait for the last save; SaveError if it failed."""
        try:
            self._store.wait()
        except SaveError as error:
            newest = self._store.latest_step()
            raise SaveError(f"{error}, then continue the run from step {newest} with {argument('resume')}") from None
        self.poll()
        if is_primary():
            self._requests.finish(self._position.step)
        if (newest := self._store.latest_step()) is not None:
            self._exporter.want(NEWEST, newest)

    def mark_finished(self) -> None:
        """Write down that the run has no step left, once its weights are written."""
        self._exporter.wait(WEIGHTS_LIMIT_S)
        barrier("weights", LAST_WORDS_LIMIT_S)  # a rank that left would set the launcher's clock for rank 0
        self._write_cursor(self._position.step, finished=True)

    def _write_cursor(self, step: int, *, finished: bool) -> None:
        if is_primary():
            write_cursor(self._held.folder, step, self._position.last_step, finished=finished)


class Exporter:
    """Writes the weights of a run's newest and best checkpoints into files of their own.

    They are read back from a finished checkpoint by one process alone, in the background: training waits for nothing,
    and nothing that goes wrong here is more than a line in `log`. Where it is not enabled, it only deletes files that
    are not the run's any more.
    """

    def __init__(
        self, run: Path, store: CheckpointStore, log: Callable[[str], None], *, enabled: bool, with_state: bool = True
    ) -> None:
        self._run, self._store, self._log, self._enabled = run, store, log, enabled
        self._with_state = with_state
        self._steps: dict[str, int] = {}
        """By file, the step that it shall hold and does not yet."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, newest: int, best: int | None) -> None:
        """Make the files those of a run that begins, or goes on, with checkpoints of these steps; 0 for none."""
        for name in (NEWEST, BEST):
            path = self._run / name
            # The run went back, and these steps never were; at once, for the same step may come again.
            void = path.exists() and ((step_of(path) or 0) > newest or (name == BEST and best is None))
            with contextlib.suppress(OSError):
                for left in (*leftovers_of(path), *([path] if void else [])):
                    left.unlink(missing_ok=True)
                if void:
                    self._store.delete_in_bucket(name)
        if best is not None:
            self.want(BEST, best)

    def want(self, name: str, step: int) -> None:
        """Write the weights of `step` into the file `name` soon; this replaces an earlier request for the file."""
        if not self._enabled:
            return
        with self._lock:
            self._steps[name] = step
            if self._thread is None:
                # A daemon: a file system that hangs must not keep the process.
                self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
                self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Wait until all requested weights are written, at most `limit_s`; after the limit no other write begins."""
        thread = self._thread
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            with self._lock:
                self._steps.clear()
            self._log(f"weights are still being written after {limit_s:.0f} s: going on without them")

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._steps:
                    self._thread = None
                    return
                name, step = self._steps.popitem()
            checkpoint = self._store.folder / str(step)
            try:
                self._write(self._run / name, step, checkpoint)
            except Exception as error:
                if checkpoint.exists():  # else it was deleted meanwhile, and a later one is wanted
                    what = "is damaged" if isinstance(error, ValueError) else "has the same weights"
                    why = error.strerror if isinstance(error, OSError) and error.strerror else files.cause(error)
                    self._log(f"{name} could not be written ({why}): the checkpoint of step {step} {what}")

    def _write(self, path: Path, step: int, checkpoint: Path) -> None:
        if step_of(path) == step:
            return
        if not all((checkpoint / name).exists() for name in (META, TABLE)):
            self._store.fetch_meta(step)  # a cleaner has deleted this host's copy of a checkpoint in a bucket
        saved, table = read_verified(checkpoint, step)
        size = files.model_bytes(saved.shapes)
        if size >= LIMIT:
            self._enabled = False
            self._log(
                f"the weights take {size / 1e9:.1f} GB: {NEWEST} and {BEST} are written below {LIMIT / 1e9:.0f} GB; "
                f"the checkpoints have larger ones"
            )
            return
        self._store.fetch_model(step)
        params, state = files.read_model(checkpoint, saved, table)
        if checkpoint.exists():  # it was there to the end, so all of it was read
            write_weights(path, step, params, state if self._with_state else {})
