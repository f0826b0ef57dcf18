"""The folder of a study: what is in it, and how its parts are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.sweep.history import JOURNAL, History, Trial, read_history
from roxxel_dist.sweep.space import Sweep, read_sweep

DEFINITION, EXTRAS, BASE = "study.yaml", "extras.yaml", "config.yaml"
TRIALS, LOGS, CORPUS, REPORT = "trials", "logs", "data", "report"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep, and what became of it so far."""

    path: Path
    sweep: Sweep
    history: History

    @property
    def name(self) -> str:
        """What people call it."""
        return self.sweep.name or self.path.absolute().name

    @property
    def done(self) -> list[Trial]:
        """The trials that gave a value, the best first."""
        found = [one for one in self.history.trials.values() if one.value is not None]
        return sorted(found, key=lambda one: (self.sweep.sign * float(one.value or 0.0), one.number))

    def run_dir(self, trial: Trial) -> Path:
        """Where a trial was trained."""
        return self.path / TRIALS / str(trial.number)


def is_study(folder: str | Path) -> bool:
    """Whether a folder is that of a study."""
    return (Path(folder) / JOURNAL).is_file() and (Path(folder) / DEFINITION).is_file()


def read_study(folder: str | Path) -> Study:
    """The study of a folder, also while it is searched.

    Raises:
        ValueError: it is none.
    """
    path = Path(folder)
    if not is_study(path):
        raise ValueError(f"{path} is no study: it has no {DEFINITION} and {JOURNAL}; name the folder of a `sweep`")
    extras = path / EXTRAS
    sweep = read_sweep(path / DEFINITION, extras if extras.exists() else None)
    return Study(path=path, sweep=sweep, history=read_history(path))


def flat(params: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Parameters without nesting: points between the names."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def short(value: Any) -> str:
    """A value for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
