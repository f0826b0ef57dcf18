"""TensorBoard: event files in `tensorboard/` of the run directory, which `tensorboard --logdir` reads while they grow.

Every process writes a file of its own. One that goes on behind an earlier step says so in it, and TensorBoard leaves
out what it has of later ones: each step is there once.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.process.exit_codes import pip_install
from roxxel_dist.train.log.base import TrackerError

FOLDER = "tensorboard"
FLUSH_S = 10


class TensorboardTracker:
    """Writes every scalar of every logged step, the config as hyperparameters, and the sample at the end as text.

    For rank 0 alone. The package is imported at the first row: where it is missing, a line says so.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = Path(run_dir, FOLDER), config
        self._writer: Any = None
        self._step = 0

    def row(self, row: Mapping[str, Any]) -> None:
        """Write one logged step."""
        self._step = int(row["step"])
        writer = self._open(self._step)
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                writer.add_scalar(name, value, self._step)

    def sample(self, text: str) -> None:
        """Write what the model wrote."""
        self._open(self._step).add_text("sample", text.replace("\n", "  \n"), self._step)  # Markdown's line ends

    def rewind(self, step: int) -> None:
        """Training goes back to `step`: the next row begins a file that voids the later ones."""
        self.close()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first: int) -> Any:
        """The writer; a new one says that it goes on with step `first`."""
        if self._writer is not None:
            return self._writer
        try:
            from tensorboardX import SummaryWriter
            from tensorboardX.summary import hparams
        except ImportError as error:
            raise TrackerError(f"no TensorBoard: {pip_install('tensorboard')}") from error
        name = f".{time.time_ns()}"  # else a file that is begun within the same second replaces another
        self._writer = SummaryWriter(str(self._folder), purge_step=first, flush_secs=FLUSH_S, filename_suffix=name)
        fields = {name: _plain(value) for name, value in self._config.items() if value is not None}
        for summary in hparams(fields, {"train_loss": 0.0, "val_loss": 0.0}):
            self._writer.file_writer.add_summary(summary)
        return self._writer


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
