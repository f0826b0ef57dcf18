"""The files that a run writes while it trains: checkpoints, the cursor, answers to requests to save."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from roxxel_dist.checkpoint.metadata import CheckpointMetadata, write_cursor
from roxxel_dist.checkpoint.store import CheckpointStore, SaveError
from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.cluster.progress import agent_pipe
from roxxel_dist.cluster.save_requests import SaveRequests
from roxxel_dist.train.exporter import Exporter
from roxxel_dist.train.log.base import CRASH_LIMIT_S
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.weights.files import BEST, NEWEST

WEIGHTS_LIMIT_S = 600.0
"""Seconds that a finished run may take to write its weights."""
STOP_LIMIT_S = 10.0
"""The same for a run that was asked to stop: it must end soon, and writes the weights after it resumes."""
LAST_WORDS_LIMIT_S = 3600.0
"""Seconds that the other ranks wait at the end for rank 0, which may still draw plots and write files."""


class CheckpointManager:
    """Saves the checkpoints of a run, and logs the results. All ranks make the same calls.

    `export` also writes the weights into files, `with_state` what the model has beside its parameters too.
    """

    def __init__(
        self,
        folder: Path,
        store: CheckpointStore,
        last_step: int,
        log: Callable[[str], None],
        *,
        export: bool,
        with_state: bool,
    ) -> None:
        self._folder, self._store, self._last_step, self._log = folder, store, last_step, log
        self.requests: SaveRequests = SaveRequests(folder)
        enabled = export and is_primary()
        self._exporter = Exporter(folder, store, log, enabled=enabled, with_state=with_state)

    def __enter__(self) -> "CheckpointManager":
        if is_primary():
            self._exporter.begin(self._store.latest_step() or 0, self._store.best_step())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exporter.wait(STOP_LIMIT_S if kind is None else CRASH_LIMIT_S)

    def save(self, step: int, state: TrainState, metadata: CheckpointMetadata, val_loss: float | None) -> None:
        """Begin to save; of the first checkpoint, wait until it is there, and raise SaveError if it is not."""
        first = self._store.latest_step() is None
        self._store.save(step, state, metadata.to_dict(), val_loss=val_loss)
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
                self.requests.failed(ended.step, ended.problem)
            else:
                if ended.warning:
                    self._log(ended.warning)
                self.requests.saved(ended.step)
                if is_primary():
                    agent_pipe().send({"saved": ended.step})
                self._write_cursor(ended.step, finished=False)
                if self._store.best_step() == ended.step:
                    self._exporter.want(BEST, ended.step)

    def steps(self) -> list[int]:
        """The steps of all checkpoints; one that is under way counts too, if it ends well."""
        self._store.settle()
        return self._store.steps()

    def finish(self, step: int) -> None:
        """Wait for the last save; SaveError if it failed."""
        try:
            self._store.wait()
        except SaveError as error:
            newest = self._store.latest_step()
            raise SaveError(f"{error}, then continue the run from step {newest} with resume=True") from None
        self.poll()
        if is_primary():
            self.requests.finish(step)
        if (newest := self._store.latest_step()) is not None:
            self._exporter.want(NEWEST, newest)

    def mark_finished(self, step: int) -> None:
        """Write down that the run has no step left, once its weights are written."""
        self._exporter.wait(WEIGHTS_LIMIT_S)
        barrier("weights", LAST_WORDS_LIMIT_S)  # a rank that left would set the launcher's clock for rank 0
        self._write_cursor(step, finished=True)

    def _write_cursor(self, step: int, *, finished: bool) -> None:
        if is_primary():
            write_cursor(self._folder, step, self._last_step, finished=finished)
