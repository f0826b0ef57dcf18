"""What a run keeps on disk while it trains: checkpoints, the answers to those who asked for one, and the cursor."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.cluster.save_requests import SaveRequests
from roxxel_dist.train.checkpoint import CheckpointStore, SaveError
from roxxel_dist.train.cursor import write_cursor
from roxxel_dist.train.exporter import BEST, NEWEST, Exporter
from roxxel_dist.train.log_queue import CRASH_LIMIT_S
from roxxel_dist.train.state import TrainState

WEIGHTS_LIMIT_S = 600.0
"""Seconds that the weights of a finished run may take to be written."""
STOP_LIMIT_S = 10.0
"""Of one that was asked to stop: whoever asked does not wait for long, and the run comes back to them."""
LAST_WORDS_LIMIT_S = 3600.0
"""Seconds that the other ranks wait for rank 0, which may have to draw and to write, at the end."""


class Keeper:
    """Saves, and tells how it went. All ranks make the same calls.

    Args:
        folder: the run directory.
        store: its checkpoints.
        last_step: of the run.
        say: where lines for people go.
        logged: whether a step is logged: what somebody asks for is saved at such a step.
        export: whether to write the weights into files of their own too.
    """

    def __init__(
        self,
        folder: Path,
        store: CheckpointStore,
        last_step: int,
        say: Callable[[str], None],
        logged: Callable[[int], bool],
        *,
        export: bool,
    ) -> None:
        self._folder, self._store, self._last_step, self._say = folder, store, last_step, say
        self._requests = SaveRequests(folder, logged)
        self._exporter = Exporter(folder, store.folder, say, enabled=export and is_primary())

    def __enter__(self) -> "Keeper":
        if is_primary():
            self._exporter.begin(self._store.latest_step() or 0, self._store.best_step())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exporter.wait(STOP_LIMIT_S if kind is None else CRASH_LIMIT_S)

    def asked(self, step: int) -> bool:
        """Whether somebody wants `step` saved; to be called once a step, on every rank."""
        return self._requests.should_save(step)

    def save(self, step: int, state: TrainState, meta: dict[str, Any], val_loss: float | None) -> None:
        """Begin to save; of the first checkpoint, wait until it is there.

        Raises:
            SaveError: there is no checkpoint, and this one could not be saved: the run ends before more work is lost.
        """
        first = self._store.latest_step() is None
        self._store.save(step, state, meta, val_loss=val_loss)
        if first:  # on all ranks at the same step, which is what a wait costs once
            try:
                self._store.wait()
            except SaveError as error:
                raise SaveError(f"{error}: the run ends here, as nothing of it would be kept") from None

    def hear(self) -> None:
        """Tell how the saves have gone that have ended since; costs nothing where none has."""
        while (ended := self._store.poll()) is not None:
            if ended.problem:
                self._say(f"{ended.problem}. Training goes on, and the next save is tried")
                self._requests.failed(ended.step, ended.problem)
            else:
                self._requests.saved(ended.step)
                self._point(ended.step, finished=False)
                if self._store.best_step() == ended.step:
                    self._exporter.want(BEST, ended.step)

    def last_good(self) -> int | None:
        """The newest checkpoint's step; one that is under way counts too, if it ends well."""
        self._store.settle()
        return self._store.latest_step()

    def finish(self, step: int) -> None:
        """Wait for the last save.

        Raises:
            SaveError: it failed.
        """
        self._store.wait()
        self.hear()
        self._requests.finish(step)
        if (newest := self._store.latest_step()) is not None:
            self._exporter.want(NEWEST, newest)

    def mark_finished(self, step: int) -> None:
        """Write down that the run has no step left, once its weights are written.

        Raises:
            TimeoutError: rank 0 does not come to its end.
        """
        self._exporter.wait(WEIGHTS_LIMIT_S)
        barrier("weights", LAST_WORDS_LIMIT_S)  # a rank that left would set the launcher's clock for rank 0
        self._point(step, finished=True)

    def _point(self, step: int, *, finished: bool) -> None:
        if is_primary():
            write_cursor(self._folder, step, self._last_step, finished=finished)


def restore(store: CheckpointStore, step: int, like: TrainState) -> TrainState:
    """The state of a checkpoint, where `like` lies. Bad steps before it are forgotten: they were told.

    How many there were in a row is not: a run that was killed must end where one that went on would have.
    """
    state: TrainState = store.restore(step, like)
    none, also = (jax.make_array_from_callback((), like.step.sharding, lambda _: np.int32(0)) for _ in range(2))
    return state._replace(health=state.health._replace(bad_step=none, skipped=also))
