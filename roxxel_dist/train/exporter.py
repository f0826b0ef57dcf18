"""The files of a run's newest and best weights, written from its checkpoints in the background. Decision 20."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import TABLE, read_verified
from roxxel_dist.checkpoint.metadata import META
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.place.files import leftovers_of
from roxxel_dist.weights.files import BEST, LIMIT, NEWEST, step_of, write_weights


class Exporter:
    """Writes the weights of a run's newest and best checkpoints into files of their own.

    They are read back from a finished checkpoint by one process alone, in the background: training waits for nothing,
    and nothing that goes wrong here is more than a line in `log`. Where it is not enabled, it only deletes files that
    are not the run's any more.
    """

    def __init__(
        self,
        run: Path,
        store: CheckpointStore,
        log: Callable[[str], None],
        *,
        enabled: bool,
        with_state: bool = True,
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
