"""The checkpoints of a run, as they are saved: by all ranks together while training goes on.

Orbax writes and reads the arrays; its manager is not used, because there a rank whose disk is full leaves the others
waiting for it. Here every rank reports how its part went, rank 0 decides, and all receive the same decision.
Decision 16.
"""

import contextlib
import json
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.metadata import MetaFile, comparable_loss, steps_to_keep
from roxxel_dist.checkpoint.reader import CheckpointReader, DamagedCheckpoint
from roxxel_dist.checkpoint.remote import RemoteCheckpoints
from roxxel_dist.cluster.distributed import (
    broadcast_from_primary,
    gather_to_primary,
    is_primary,
    process_count,
    process_index,
)
from roxxel_dist.objects.errors import StoreTimeoutError
from roxxel_dist.process.durable import make_folder, sync_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import hold_folder, is_held_here

SAVE_LIMIT_S = 3600.0
"""Seconds that all ranks together may take to write one checkpoint."""


class SaveError(RuntimeError):
    """The last checkpoint could not be saved."""


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """The end of a save."""

    step: int
    problem: str = ""
    """Why there is no such checkpoint; empty where there is one."""
    warning: str = ""
    """Of a checkpoint that is saved: what else failed, such as the deletion of an older one. It is tried again."""


class _Problem(NamedTuple):
    """Why a rank, or all of them, could not save; an empty text where they could."""

    text: str = ""
    store_away: bool = False
    """Whether it is an object store that does not answer: no later save would do better."""

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> "_Problem":
        return cls(f"rank {rank}: {files.cause(error)}", isinstance(error, StoreTimeoutError))


class _Ending(NamedTuple):
    """How a save ended, as rank 0 decides it and all ranks read it."""

    problem: _Problem = _Problem()
    left: tuple[int, ...] = ()
    """Steps of checkpoints that are no longer kept, and could not be deleted."""
    warning: str = ""
    """What failed after the checkpoint was complete."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save that is under way."""

    step: int
    val_loss: float | None
    meta: str
    temporary: Path
    begun: Future[files.PendingSave]


class CheckpointStore(CheckpointReader):
    """The checkpoints of one run, and new ones. All ranks make the same calls.

    A save that fails in the background changes nothing: training may go on, the checkpoints that there are stay, and
    the next save is tried afresh. In a bucket a save is complete when all of it is there; of a store that does not
    answer within its time limit, all ranks raise StoreTimeoutError when they next save, poll or wait.

    Args:
        folder: where they are. Every rank must see the same folder, if not for `remote`.
        max_to_keep: how many to keep, the newest ones; None for all. The one with the lowest val_loss stays too.
        keep_every: every so many steps, one is kept for ever.
        keep_steps: these steps are kept for ever.
        writes_later: only read, until `begin_writing` is called; without it the store begins to write at once.
        remote: the same checkpoints in a bucket, which alone count; the folder has what this host needs of them.

    Raises:
        ValueError: the folder cannot be written, another process saves there, or an option is below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        max_to_keep: int | None = 3,
        *,
        keep_every: int | None = None,
        keep_steps: Collection[int] | None = None,
        writes_later: bool = False,
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        for name, value in (("max_to_keep", max_to_keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1")
        self._keep = max_to_keep, keep_every, frozenset(keep_steps or ())
        self._writes, self._writes_later = False, writes_later
        self.check_run: Callable[[], None] | None = None if remote is None else remote.check_run
        """Raises what keeps the run from its bucket; None where it has none."""
        self._release: Callable[[], Any] = lambda: None
        self._passed_over: list[int] = []
        """Steps of damaged checkpoints, which `begin_writing` renames."""
        self._pending: tuple[_Save, Future[_Ending]] | None = None
        super().__init__(folder, remote=remote)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ended: deque[SaveResult] = deque()
        self.unreported: int = 0
        """Saves whose end `poll` has not reported yet."""
        self._problem = ""
        self._count = 0

    def _look(self) -> None:
        if self._writes_later:
            self.refresh()
        else:
            self.begin_writing()

    def _hint(self, step: int) -> str:
        """Nothing: a run goes on from an older checkpoint by itself."""
        del step
        return ""

    def begin_writing(self, *, nested: bool = True) -> None:
        """Hold the lock of the folder, made if it is missing, until `close`, and look again what it has.

        The lock of a run directory is that of the checkpoints in it too. All ranks call it together, rank 0 holds the
        lock. Of a store that writes already it changes nothing. If it is `nested`, another store of this process may
        write there too. Raises UserError: another process writes there; the message names it. Or the folder cannot be
        written.
        """
        if self._writes:
            return
        problem, sweeps, self._token = "", True, secrets.token_hex(4)
        if is_primary():
            held = files.lock_folder(self.folder)
            # A temporary folder may be of another store of this process, which saves now.
            sweeps = not is_held_here(held) or held != self.folder
            try:
                release = hold_folder(held, "saving checkpoints in", nested=nested)
                self._release = weakref.finalize(self, release)  # also for a store that is never closed
            except UserError as error:
                problem = str(error)
        decided = json.dumps([problem, sweeps, self._token])
        problem, sweeps, self._token = json.loads(broadcast_from_primary(self._name, decided))
        if problem:
            raise UserError(problem)
        try:
            self._saved, self._read_last = self._open_folder(writes=True, sweeps=sweeps), None
            if self._remote is not None:
                self._remote.keep_local(self._saved)
            for step in self._passed_over:
                if step in self._saved:
                    self._rename_damaged(step)
        except BaseException:
            self._release()
            raise
        self._writes, self._passed_over = True, []

    @property
    def writes(self) -> bool:
        """Whether this process saves in the folder, and no other one can."""
        return self._writes

    @property
    def pending_step(self) -> int | None:
        """The step that is being saved, or None."""
        return self._pending[0].step if self._pending else None

    def save(self, step: int, state: Any, meta: dict[str, Any], val_loss: float | None = None) -> None:
        """Begin to save; returns once the state may change, and be donated. First waits for the previous save to end.

        A step that is already saved is left as it is. `poll` and `wait` report errors of the disk.

        Args:
            step: optimizer steps done.
            state: a tree of arrays.
            meta: what else to keep; JSON.
            val_loss: decides which checkpoint is the best.
        """
        self.settle()
        if step in self._saved:
            return
        val_loss = comparable_loss(val_loss)
        text = MetaFile(files.shapes(state), meta, val_loss).to_json()
        self._count += 1
        # A name of its own: what a failed save, or a rank of an earlier job, still writes cannot get into this one.
        temporary = self.folder / f"{step}{files.TEMPORARY}-{self._token}-{self._count}"
        state = files.keys_to_data(state)
        # In the thread: Orbax wants an event loop, and the caller's thread may run one, as in a notebook.
        begun = self._thread.submit(self._begin, temporary, state)
        save = _Save(step=step, val_loss=val_loss, meta=text, temporary=temporary, begun=begun)
        self._pending = save, self._thread.submit(self._finish, save)
        self.unreported += 1
        begun.exception()

    def _begin(self, temporary: Path, state: Any) -> files.PendingSave:
        if self._remote is not None:  # the folder is a copy, which a cleaner may have deleted
            make_folder(self.folder)
        return files.begin(self._handler, temporary, state)

    def _finish(self, save: _Save) -> _Ending:
        """In the background: how the save ended, the same on all ranks.

        The order makes a checkpoint whole or absent, wherever it is cut off, and loses no older one for a newer one
        that is not there: 1. every rank writes its arrays and their digests into a temporary folder; 2. all report to
        rank 0; 3. rank 0 merges the parts, and renames the folder, which is the moment from which the checkpoint counts
        (in a bucket: the write of its table); 4. that name is brought to the disk; 5. older checkpoints are deleted; 6.
        all receive how it ended. The rows of the log were on disk before `save` was called.
        """
        problem, rank = _Problem(), process_index()
        try:
            writes, blocks = save.begun.result()
            hashed = files.hash_blocks(blocks, rank)  # of the copies in memory, while they are written
            for written in writes:
                written.result()
            files.write_part(save.temporary, save.step, hashed, rank)  # last: where it is, the files are final
            if self._remote is not None:
                self._remote.send_part(save.temporary, save.step, rank)
        except Exception as error:  # Orbax raises many kinds; all mean that there is no checkpoint
            problem = _Problem.of_error(rank, error)
        try:
            # A rank that failed reports too, so the others do not wait for it.
            texts = gather_to_primary(self._name, json.dumps(problem), SAVE_LIMIT_S)
            problems = [_Problem(*json.loads(text)) for text in texts]
        except TimeoutError as error:
            problems = [_Problem(str(error))]
        ending = _Ending()
        if is_primary():
            problem = next((each for each in problems if each.text), None) or self._commit(save)
            ending = _Ending(problem) if problem.text else self._prune(save)
            # Now: the others begin the next save when they have read what follows. The next save sweeps again.
            with contextlib.suppress(OSError):
                files.sweep(self.folder, self._token)  # another store of this process may be saving there
        problem, left, warning = json.loads(broadcast_from_primary(self._name, json.dumps(ending), SAVE_LIMIT_S))
        ending = _Ending(_Problem(*problem), tuple(left), warning)
        if self._remote is not None and not is_primary():
            kept = None if ending.problem.text else self._steps_to_keep(save)
            with contextlib.suppress(OSError):  # the local folder only holds copies; the next save tries again
                self._remote.keep_part(save.temporary, save.step, rank, kept)
        return ending

    def _steps_to_keep(self, save: _Save) -> set[int]:
        return steps_to_keep(self._saved | {save.step: save.val_loss}, *self._keep)

    def _commit(self, save: _Save) -> _Problem:
        """On rank 0, when every rank has written its part: the problem, or nothing."""
        try:
            ranks = process_count()
            if self._remote is not None:
                self._remote.gather_parts(save.temporary, save.step, ranks)
                files.delete(self.folder / str(save.step))  # that of a save which did not reach the bucket
            files.commit(self._handler, save.temporary, self.folder / str(save.step), save.meta, ranks)
            if self._remote is not None:
                self._remote.commit(save.step, ranks)
        except Exception as error:
            return _Problem.of_error(0, error)
        return _Problem()

    def _prune(self, save: _Save) -> _Ending:
        """On rank 0, when the checkpoint is complete: delete what is no longer kept. A failure of that is no failure of
        the save; what could not be deleted stays in `steps`, so the next save tries again."""
        superfluous = sorted(self._saved.keys() - self._steps_to_keep(save))
        try:
            sync_folder(self.folder)
        except OSError as error:  # a power failure may take the new checkpoint, so no older one is deleted
            text = f"the folder of the checkpoint of step {save.step} could not be synced ({files.cause(error)})"
            return _Ending(left=tuple(superfluous), warning=f"{text}: the disk may lose it in a power failure")
        left, causes = list[int](), dict[str, None]()
        for step in superfluous:
            try:
                if self._remote is not None:
                    self._remote.delete(step)
            except Exception as error:
                causes[files.cause(error)] = None
                left.append(step)
            try:
                files.delete(self.folder / str(step))
            except OSError as error:
                causes[files.cause(error)] = None
                if self._remote is None:
                    left.append(step)
        if not causes:
            return _Ending()
        which = f"step{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}" if left else "local copies"
        return _Ending(
            left=tuple(left),
            warning=f"the checkpoint of step {save.step} is saved in {self.folder}, and older ones ({which}) could not "
            f"be deleted ({'; '.join(causes)}): the next save tries again",
        )

    def poll(self) -> SaveResult | None:
        """The result of a save that has ended since the last call, each once; else None. Costs nothing."""
        if self._pending and self._pending[1].done():
            self.settle()
        if not self._ended:
            return None
        self.unreported -= 1
        return self._ended.popleft()

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until the save that was begun is over, well or not; or for so many seconds."""
        if self._pending is None:
            return
        save, finished = self._pending
        if limit_s is not None and not wait([finished], limit_s).done:
            return
        self._pending = None
        try:
            ending = finished.result()
        except Exception as error:  # the other ranks could not be asked
            ending = _Ending(_Problem(files.cause(error)))
        text = ending.problem.text
        if text:
            newest = self.latest_step()
            rest = "there is none yet" if newest is None else f"the newest complete one is of step {newest}"
            text = f"the checkpoint of step {save.step} could not be saved in {self.folder} ({text}); {rest}"
            if any(os.strerror(code) in ending.problem.text for code in files.FULL):
                text += f"; make room in {self.folder.parent}"
        else:
            kept = self._steps_to_keep(save) | {*ending.left}
            saved = self._saved | {save.step: save.val_loss}
            self._saved = {step: val_loss for step, val_loss in saved.items() if step in kept}
        self._problem = text
        self._ended.append(SaveResult(step=save.step, problem=text, warning=ending.warning))
        if ending.problem.store_away:
            raise StoreTimeoutError(text)

    def wait(self) -> None:
        """Wait until the last save is complete. Raises SaveError where it failed, now or earlier."""
        self.settle()
        if self._problem:
            raise SaveError(self._problem)

    def close(self, limit_s: float | None = None) -> None:
        """Finish what is being saved and let go of the thread.

        Args:
            limit_s: wait for no longer than so many seconds, after a failure that the other ranks must learn of.
        """
        with contextlib.suppress(StoreTimeoutError):  # it is one of `wait`'s problems then
            self.settle(limit_s)
        self._thread.shutdown(wait=self._pending is None)
        if self._pending is None:
            super().close()
            self._release()

    def delete_in_bucket(self, name: str) -> None:
        """Delete a void file of the run, by its name, in the bucket of the run if it has one. Raises OSError."""
        if self._remote is not None:
            self._remote.delete_file(name)

    def delete_later(self, step: int, meta: dict[str, Any]) -> None:
        """Make the checkpoint of `step` the newest one: it is kept with another `meta`, and later ones are deleted.
        Raises ValueError where there is none of that step, it is damaged, or the folder cannot be written."""
        self.settle()
        (saved, _), problem = self._read(step), ""
        if is_primary():
            try:  # in this order: cut off between, the old run is there
                files.replace_meta(self.folder / str(step), saved._replace(meta=meta).to_json())
                if self._remote is not None:
                    self._remote.send_meta(step)
                for other in (other for other in self.steps() if other > step):
                    if self._remote is not None:
                        self._remote.delete(other)
                    files.delete(self.folder / str(other))
            except (OSError, ValueError) as error:
                problem = files.cause(error)
        self._read_last = None
        if problem := broadcast_from_primary(self._name, problem):
            raise UserError(f"{self.folder} cannot go back to step {step} ({problem}): the folder must be writable")
        self._saved = {other: val_loss for other, val_loss in self._saved.items() if other <= step}

    def set_aside(self, damage: DamagedCheckpoint) -> str:
        """Rename a damaged checkpoint, and older ones that are damaged too; those that stay are as `steps` says.

        A store that does not write yet only passes over them, and renames them when it begins to write.

        Returns what was done, in a line for each. Raises ValueError, and renames nothing, where none is whole, and
        `damage` itself in a folder of another run.
        """
        lines = []
        for wrong in self._newer_than_whole(damage):
            if self._writes:
                lines.append(f"{wrong}; it is kept as {self._rename_damaged(wrong.step)}")
            else:
                del self._saved[wrong.step]
                self._passed_over.append(wrong.step)
                lines.append(f"{wrong}; it is passed over, and the next save renames it")
        self._read_last = None
        return "\n".join([*lines, f"going on from step {self.latest_step()}, the newest complete checkpoint"])

    def _newer_than_whole(self, damage: DamagedCheckpoint) -> list[DamagedCheckpoint]:
        """A damaged checkpoint, and those below it that are damaged too, to the newest one that is whole."""
        damages = [damage]
        while (step := max((s for s in self.steps() if s < damages[-1].step), default=None)) is not None:
            try:
                self.check(step)
                break
            except DamagedCheckpoint as another:
                damages.append(another)
        if len(damages) == len(self._saved):
            raise UserError(self._nothing_whole([f"step {wrong.step}: {wrong.why}" for wrong in damages]))
        return damages

    def _rename_damaged(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it does not count; returns its new name."""
        name, problem = "", ""
        if is_primary():
            try:
                if self._remote is not None:
                    self._remote.set_aside(step)
                name = files.set_aside(self.folder / str(step)).name
            except OSError as error:
                problem = files.cause(error)
        name, problem = json.loads(broadcast_from_primary(self._name, json.dumps([name, problem])))
        if problem:
            raise UserError(
                f"the damaged checkpoint of step {step} in {self.folder} cannot be renamed ({problem}): the folder "
                f"must be writable"
            )
        del self._saved[step]
        return name
