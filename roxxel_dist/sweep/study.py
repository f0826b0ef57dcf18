"""The folder of a study as it is made, and taken up again.

The folder of a study: what is in it, and how its parts are read.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.durable import make_folder, write_file
from roxxel_dist.config import RECORD, load_yaml
from roxxel_dist.data.discovery import check_local
from roxxel_dist.data.file_lock import take_lock
from roxxel_dist.sweep.journal import JOURNAL, LOCK, History, Trial, read_history
from roxxel_dist.sweep.space.sweep_file import Sweep, read_sweep

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


DATA_PATH, DIRECTORY, SERVER = "data_path", "directory", "wandb_sweep"
MINE = {BASE, EXTRAS, LOCK}
"""What a start may have left that was killed before the study was there."""


def base_file(study: Path) -> str | None:
    """The config that the trials of a study begin from; None where there is no study yet."""
    return str(study / BASE) if (study / DEFINITION).is_file() and (study / BASE).is_file() else None


def settings(study: Path) -> dict[str, Any]:
    """What the trials of a study begin from, by field; empty where there is no study yet."""
    file = base_file(study)
    return {} if file is None else load_yaml(file)


def recorded(study: Path, what: str) -> str | None:
    """What a study was begun with: DATA_PATH, the DIRECTORY of its trials, SERVER (the W&B sweep that leads it)."""
    return (settings(study).get(RECORD) or {}).get(what)


def leader(study: Path, asked: str | None) -> str | None:
    """The sweep of a W&B server that leads a study, or shall lead one that begins; None where the search is made here.

    Args:
        study: the folder.
        asked: ENTITY/PROJECT/ID, "" for a new one, None for what the study has.

    Raises:
        ValueError: the study was begun with another: one journal cannot hold the trials of two searches.
    """
    if base_file(study) is None or asked is None:
        return asked if base_file(study) is None else recorded(study, SERVER)
    known = recorded(study, SERVER)
    if known is None:
        wanted = f"the W&B sweep {asked}" if asked else "a W&B server (--wandb online)"
        raise ValueError(
            f"{study} was begun with a search of its own, which {wanted} cannot lead: name another --study"
        )
    if asked not in ("", known):
        raise ValueError(f"{study} was begun with the W&B sweep {known}, not with {asked}: name another --study")
    return known


def look(
    study: Path, sweep_config: str | None, extras: str | None, config: Any, data_path: str | None
) -> tuple[Sweep, str | None]:
    """(the sweep, the data) of a study, that is there or begins. Nothing is written.

    Args:
        study: the folder.
        sweep_config: W&B's YAML; a study that is there has its own.
        extras: the second file.
        config: what trials begin from.
        data_path: the data; a study that is there remembers its own.

    Raises:
        ValueError: a file cannot be used, or the study is that of another sweep.
    """
    check_local("--study", study)
    check_local("data_path", data_path)
    if not (study / DEFINITION).is_file():
        if sweep_config is None:
            raise ValueError(f"{study} is no study yet: name a file with --sweep_config")
        if study.is_file() or (
            study.is_dir() and any(path.name not in MINE and not path.match(".*.tmp") for path in study.iterdir())
        ):
            raise ValueError(f"--study {study} is there, and no study: name another folder")
        return read_sweep(sweep_config, extras), None if data_path is None else str(Path(data_path).absolute())
    if sweep_config is not None:
        _compare(study / DEFINITION, Path(sweep_config), "--sweep_config")
    if extras is not None:
        _compare(study / EXTRAS, Path(extras), "--extras")
    if saved := settings(study):
        # The trials of a study are compared with each other: nothing but the parameters may differ.
        # Read as a config: fields that a newer version has besides have their defaults in both.
        before, now = type(config).from_dict(saved, str(study / BASE)).to_dict(), config.to_dict()
        changed = [f"{name} {before[name]} -> {value}" for name, value in now.items() if before[name] != value]
        if changed:
            raise ValueError(f"{study} was begun with other settings ({', '.join(changed)}): name another --study")
    known = recorded(study, DATA_PATH)
    if data_path is not None and known is not None and Path(data_path).absolute() != Path(known):
        raise ValueError(f"--data_path {data_path}: {study} was begun with {known}; name another --study")
    return read_sweep(study / DEFINITION, study / EXTRAS if (study / EXTRAS).exists() else None), known


def write_down(
    study: Path, sweep_config: str | None, extras: str | None, config: Any, told: Mapping[str, str | None]
) -> bool:
    """Make the folder of a study, if `look` found that it begins; whether it did. Raises OSError where it cannot.

    Args:
        told: what `recorded` will tell; the others as for `look`.
    """
    if (study / DEFINITION).is_file() or sweep_config is None:
        return False
    make_folder(study)
    config.save_yaml(study / BASE, told)
    if extras is not None:
        write_file(study / EXTRAS, Path(extras).read_bytes())
    write_file(study / DEFINITION, Path(sweep_config).read_bytes())  # the last: where it is, all is
    return True


def take_back(study: Path, made: Sequence[Path]) -> None:
    """Undo `write_down` for a study whose first start was refused: what was wrong may stand in these files.

    Args:
        study: the folder.
        made: the folders that there were not before, the innermost first.
    """
    for name in (DEFINITION, EXTRAS, BASE, JOURNAL):
        (study / name).unlink(missing_ok=True)
    with suppress(OSError):  # a folder that holds something of somebody else stays
        lock = take_lock(study / LOCK)
        if lock is None:
            return  # somebody waited for it, and begins
        try:
            (study / LOCK).unlink()
        finally:
            os.close(lock)
        for folder in made:
            folder.rmdir()


def _compare(mine: Path, theirs: Path, flag: str) -> None:
    """Raises ValueError where two YAML files do not say the same; names a line that differs."""
    before = load_yaml(mine) if mine.exists() else {}
    if load_yaml(theirs) == before:
        return
    lines = (mine.read_text().splitlines() if mine.exists() else [], theirs.read_text().splitlines())
    changes = [line for line in difflib.ndiff(*lines) if line[:1] in "+-" and line[1:].strip()]
    raise ValueError(
        f"{flag} {theirs} is not what {mine.parent} was begun with ({'; '.join(changes[:4])}): name another --study, "
        f"or leave {flag} out"
    )
