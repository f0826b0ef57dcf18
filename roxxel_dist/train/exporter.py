"""The weights of a run in files of their own: of the checkpoint with the lowest val_loss, and of the last one.

They are read back from a finished checkpoint by one process alone, in the background: training waits for nothing, and
nothing that goes wrong here is more than a line.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.train import checkpoint_files as files
from roxxel_dist.train.standing import META
from roxxel_dist.train.weights_file import LIMIT, link_weights, step_of, temporary_of, write_weights

NEWEST, BEST = "model_weights.msgpack", "best_model_weights.msgpack"


class Exporter:
    """Writes the files of one run; where it is not enabled, it only takes away what is not the run's any more.

    Args:
        run: the run directory.
        checkpoints: the folder of its checkpoints.
        say: where lines for people go.
        enabled: whether to write anything.
    """

    def __init__(self, run: Path, checkpoints: Path, say: Callable[[str], None], *, enabled: bool) -> None:
        self._run, self._checkpoints, self._say, self._enabled = run, checkpoints, say, enabled
        self._wanted: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, newest: int, best: int | None) -> None:
        """Make the files those of a run that begins, or goes on, with these checkpoints.

        Args:
            newest: step of the newest one; 0 where there is none.
            best: step of the one with the lowest val_loss.
        """
        for name in (NEWEST, BEST):
            path = self._run / name
            # The run went back, and these steps never were; at once, for the same step may come again.
            void = (step_of(path) or 0) > newest or (name == BEST and best is None)
            with contextlib.suppress(OSError):
                temporary_of(path).unlink(missing_ok=True)
                if void:
                    path.unlink(missing_ok=True)
        if best is not None:
            self.want(BEST, best)

    def want(self, name: str, step: int) -> None:
        """Have the file `name` hold the weights of `step`, soon; what was wanted for it before is not, any more."""
        if not self._enabled:
            return
        with self._lock:
            self._wanted[name] = step
            if self._thread is None:
                # A daemon: a file system that hangs must not keep the process.
                self._thread = threading.Thread(target=self._work, name="weights", daemon=True)
                self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Until all that is wanted is written, or for so long; then nothing more is begun."""
        thread = self._thread
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            with self._lock:
                self._wanted.clear()
            self._say(f"weights are still being written after {limit_s:.0f} s: going on without them")

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                name = next(iter(self._wanted))
                step = self._wanted.pop(name)
            checkpoint = self._checkpoints / str(step)
            try:
                self._write(self._run / name, step, checkpoint)
            except Exception as error:
                if checkpoint.exists():  # else it was deleted meanwhile, and a later one is wanted
                    why = files.cause(error)
                    self._say(
                        f"{name} could not be written ({why}): the checkpoint of step {step} has the same weights"
                    )

    def _write(self, path: Path, step: int, checkpoint: Path) -> None:
        if step_of(path) == step:
            return
        best = path.with_name(BEST)
        if step_of(best) == step:
            with contextlib.suppress(OSError):
                return link_weights(best, path)
        shapes = files.parameter_shapes(json.loads((checkpoint / META).read_bytes())["shapes"])
        size = sum(shape.size * shape.dtype.itemsize for shape in shapes.values())
        if size >= LIMIT:
            self._enabled = False
            self._say(
                f"the weights take {size / 1e9:.1f} GB: {NEWEST} and {BEST} are written below {LIMIT / 1e9:.0f} GB; "
                f"the checkpoints have larger ones"
            )
            return None
        params = files.read_params(checkpoint, shapes)
        if checkpoint.exists():  # it was there to the end, so all of it was read
            write_weights(path, step, params)
        return None
