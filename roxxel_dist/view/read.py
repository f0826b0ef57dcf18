"""Runs and studies for programs and notebooks: `roxxel_dist.read_run` and `roxxel_dist.read_study`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.place.directory import CONFIG, METRICS, is_run, no_run
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.sweep.study import folder as studies
from roxxel_dist.sweep.study.folder import flat
from roxxel_dist.train.log.csv_jsonl import read_rows
from roxxel_dist.view.run import CheckpointState, PhaseSpan, RunReader

WIDTH = 80
"""Letters that a list of names or steps takes in what is shown at a prompt."""


class Columns(Mapping[str, np.ndarray]):
    """A table as a mapping: arrays of one length by name, in the order of the rows. Columns of numbers are float64,
    with NaN for missing values; others are object arrays, with None, and so are those with a whole number that no
    float64 is."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns: dict[str, np.ndarray] = {name: _column([row.get(name) for row in rows]) for name in names}

    def __repr__(self) -> str:
        """The number of rows, and the names."""
        count = len(next(iter(self.values()), ()))
        return f"<Columns of {count:,} rows: {shorten(', '.join(self) or 'none', WIDTH, placeholder=' ...')}>"

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`. Raises ImportError if pandas is not installed."""
        from importlib import import_module  # an optional package

        return import_module("pandas").DataFrame(self._columns)


def _column(values: Sequence[Any]) -> np.ndarray:
    if all(value is None or _is_float(value) for value in values):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _is_float(value: Any) -> bool:
    """Whether it is a number that float64 keeps."""
    return isinstance(value, float) or (
        isinstance(value, int) and abs(value) <= sys.float_info.max and int(float(value)) == value
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, read from disk."""

    path: Path
    metrics: Columns
    """A row for each logged step: "step", "train_loss" and so on; NaN if a value is missing or not finite."""
    config: Mapping[str, Any]
    """The fields of its config; empty for a run of a bare `Trainer`."""
    phases: tuple[PhaseSpan, ...]
    checkpoints: tuple[CheckpointState, ...]

    def __repr__(self) -> str:
        """The place and the sizes; `metrics` and `config` have the rest."""
        steps = shorten(", ".join(str(one.step) for one in self.checkpoints) or "no step", WIDTH, placeholder=" ...")
        return f"<RunData {self.path}: {self.metrics!r}, {len(self.phases)} phase(s), checkpoints of {steps}>"


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """A study, read from disk."""

    path: Path
    metric: str
    goal: str
    trials: Columns
    """A row for each trial: "trial", "state", "value", "seconds", "attempts", "reason", and its parameters by name."""
    best: int | None
    """The number of the best trial; None before any trial has a value."""

    def __repr__(self) -> str:
        """The place, the goal and the best trial; `trials` has the rest."""
        best = "none has a value" if self.best is None else f"the best is {self.best}"
        return f"<StudyData {self.path}: {self.goal} {self.metric}, {self.trials!r}, {best}>"

    def run(self, trial: int) -> RunData:
        """The run of a trial. Raises ValueError if it is not on this disk, or was another kind of program."""
        return read_run(self.path / studies.TRIALS / str(trial))


def read_run(path: str | Path) -> RunData:
    """Read a run directory, also while it trains; from a bucket, without its checkpoints. Raises ValueError if it is
    not a run; the message suggests the closest run."""
    folder = local_run(path)
    if not is_run(folder):
        raise UserError(no_run(folder, absolute(Path(path))))
    state = RunReader(folder).read(deadline=0.0)  # its rows are read below
    config = load_yaml(folder / CONFIG) if (folder / CONFIG).exists() else {}
    config.pop(RECORD, None)
    metrics = Columns(read_rows(folder / METRICS))
    return RunData(path=folder, metrics=metrics, config=config, phases=state.phases, checkpoints=state.checkpoints)


def read_study(path: str | Path) -> StudyData:
    """Read the folder of a sweep, also while it runs. Raises ValueError if it is not a sweep."""
    study = studies.read_study(path)
    names = ("value", "seconds", "attempts", "reason")
    rows = [
        {"trial": trial.number, "state": study.state_of(trial)}
        | {name: getattr(trial, name) for name in names}
        | flat(trial.params)
        for trial in study.history.trials.values()
    ]
    best, sweep = study.history.best, study.sweep
    trials, number = Columns(rows), best and best.number
    return StudyData(path=study.path, metric=sweep.metric, goal=sweep.goal, trials=trials, best=number)
