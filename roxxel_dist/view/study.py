"""A study on disk, with its journal read as it grows."""

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from roxxel_dist.place.directory import DEFINITION, JOURNAL
from roxxel_dist.process.file_lock import LOCK, is_held
from roxxel_dist.sweep.samplers.pairs import outcome
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.folder import EXTRAS, Study, StudyDir
from roxxel_dist.sweep.study.journal import History, Trial
from roxxel_dist.view.tail import Tail, objects


@dataclass(frozen=True, kw_only=True)
class StudyState:
    """The state of a study at one moment."""

    study: Study
    state: str
    """"searching", "finished" (nothing is left to do), or "stopped"."""
    workers: int
    """The number of running trials."""
    began: float | None
    """The start of its first trial, in seconds since 1970."""
    left_s: float | None
    """Seconds until `run_cap` trials have ended, at the mean duration so far; None if unknown."""
    steps_left: int | None
    """Remaining steps of the running trials, if they train as long as the longest so far."""


class StudyReader:
    """Reads one study; call `read` for each update. Raises ValueError if its definition cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._journal = Tail(path / JOURNAL)
        self._study = Study(
            path=path, sweep=_sweep(path, *map(_stamp, (path / DEFINITION, path / EXTRAS))), history=History()
        )

    def read(self) -> StudyState:
        """The current state of the study."""
        events = objects(self._journal.lines())
        if self._journal.restarted:
            self._study = replace(self._study, history=History())
        history = self._study.history
        for event in events:
            history.apply(event)
        self._study = replace(self._study, is_searched=is_held(self.path / LOCK, unknown=False))
        return state_of(self._study)


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes when a file is written; empty if there is none."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _sweep(path: Path, *_stamps: tuple[int, ...]) -> Sweep:
    """The definition of a study: a list of studies is searched again every few seconds."""
    return StudyDir(path).sweep()


def state_of(study: Study) -> StudyState:
    """The state of a study from its journal."""
    trials, held = list(study.history.trials.values()), study.is_searched
    running = list(study.history.running.values()) if held else []
    longest = max((_steps(trial) for trial in trials if trial.state == "done"), default=None)
    return StudyState(
        study=study,
        state="searching" if held else "finished" if _is_finished(study) else "stopped",
        workers=len(running),
        began=min((trial.began for trial in trials if trial.began), default=None),
        left_s=_seconds_left(study, running) if held else None,
        steps_left=None if longest is None or not held else sum(max(0, longest - _steps(trial)) for trial in running),
    )


def _is_finished(study: Study) -> bool:
    """Whether every trial that was asked for has ended, one with a value, and no more trials are known to come."""
    history, sweep = study.history, study.sweep
    if sweep.versus is not None:
        return outcome(history, sweep.versus).ending is not None
    grid = sweep.space.size if (history.method or sweep.method) == "grid" else None
    count = min((n for n in (sweep.run_cap, grid) if n is not None), default=0)
    return history.best is not None and not (history.running or history.paused) and len(history.trials) >= count


def _seconds_left(study: Study, running: list[Trial]) -> float | None:
    history, cap = study.history, study.sweep.run_cap
    if history.mean_seconds is None or cap is None:
        return None
    mean, now = history.mean_seconds, time.time()
    rest = sum(max(0.0, mean - (now - (trial.began or now))) for trial in running)
    return (rest + max(0, cap - len(history.trials)) * mean) / max(1, len(running))


def _steps(trial: Trial) -> int:
    return trial.reports[-1][0] if trial.reports else 0
