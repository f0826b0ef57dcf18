"""The folder of a study: made, taken up again, and read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.place.directory import DEFINITION, JOURNAL, is_study
from roxxel_dist.process.durable import make_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK, hold_folder, is_held
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.sweep.space.sweep_file import Sweep, read_sweep
from roxxel_dist.sweep.space.values import as_text
from roxxel_dist.sweep.study.journal import SEARCHING, STATES, WAIT_S, History, Trial, TrialState, read_history

EXTRAS, BASE = "extras.yaml", "config.yaml"
TRIALS, LOGS, CORPUS, REPORT = "trials", "logs", "data", "report"
DATA_PATH, DIRECTORY, SERVER, IDENTITY = "data_path", "directory", "wandb_sweep", "study_id"
"""Keys recorded in BASE: the data, the working directory of the trials, the W&B sweep that leads the study and, for one
in a bucket, an id for the names of its trials' folders on hosts: its address may have had another study before."""


LONGEST = 60
"""Characters of a value in a table."""
OF_A_HOST = {"cache_dir", "cache_gb", "store_timeout"}
"""Fields that may differ between starts: the training does not depend on them."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep, and its history so far."""

    path: Path
    sweep: Sweep
    history: History
    url: ObjectUrl | None = None
    """The address of the study, if `path` is a copy."""
    is_searched: bool = True
    """Whether a driver searches in it; if not, trials without an end were interrupted."""

    @property
    def name(self) -> str:
        """The name that people call it by."""
        return self.sweep.name or (self.url.name if self.url else self.path.absolute().name)

    @property
    def place(self) -> str:
        """The folder or the address of the study, for people."""
        return str(self.url or self.path)

    @property
    def done(self) -> list[Trial]:
        """The trials with a value (for paused ones, the best so far); the best first."""
        valued = [trial for trial in self.history.trials.values() if trial.value is not None]
        return sorted(valued, key=lambda trial: (self.sweep.sign * float(trial.value or 0.0), trial.number))

    def state_of(self, trial: Trial) -> TrialState:
        """The state of a trial at this moment."""
        return "interrupted" if trial.state == "running" and not self.is_searched else trial.state

    def counts(self) -> dict[TrialState, int]:
        """The number of trials of each state, those without a trial left out."""
        found: dict[TrialState, int] = {}
        for state in STATES:
            if count := self.history.count(state):
                found["interrupted" if state == "running" and not self.is_searched else state] = count
        return found

    def run_dir(self, trial: Trial) -> Path:
        """The run directory of a trial."""
        return self.path / TRIALS / str(trial.number)


def read_study(folder: str | Path, url: ObjectUrl | None = None, *, is_searched: bool | None = None) -> Study:
    """The study of a folder, also while it is searched; `url` is where it is, if that is a copy of it. `is_searched`:
    whether a driver searches in it; by default, whether a process holds the folder. Raises ValueError where it is
    none."""
    path = Path(folder)
    if not is_study(path):
        raise UserError(
            f"{url or path} is not a study: it has no {DEFINITION} and {JOURNAL}; name the folder of a `sweep`"
        )
    if is_searched is None:
        is_searched = is_held(path / LOCK, unknown=False)
    return Study(path=path, sweep=StudyDir(path).sweep(), history=read_history(path), url=url, is_searched=is_searched)


def flat(params: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Parameters without nesting: points between the names."""
    values: dict[str, Any] = {}
    for name, value in params.items():
        values |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return values


class _LeftOut:
    """Instead of the value of a parameter that a trial does not have, because `when` left it out; null is a value."""

    def __str__(self) -> str:
        return "-"


LEFT_OUT = _LeftOut()


def short(value: Any) -> str:
    """A value for people. A long list, such as phases, is cut off; a long text may be a path, whose end says most."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if isinstance(value, str) or len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


class StudyDir:
    """The files of a study that say what it searches, and from what. The definition is last: where it is, all is."""

    def __init__(self, path: Path, url: ObjectUrl | None = None) -> None:
        self.path: Path = path
        self.url: ObjectUrl | None = url
        self.place: str = str(url or path)  # where it is, for people
        self._definition, self._extras = path / DEFINITION, path / EXTRAS

    @property
    def is_there(self) -> bool:
        """Whether it was begun."""
        return self._definition.is_file()

    @property
    def base_file(self) -> str | None:
        """The config that the trials begin from; None where there is no study yet."""
        return str(self.path / BASE) if self.is_there and (self.path / BASE).is_file() else None

    def settings(self) -> dict[str, Any]:
        """The fields of the config that all trials share; empty if there is no study yet."""
        return {} if self.base_file is None else load_yaml(self.base_file)

    def metadata(self, key: str) -> str | None:
        """A value that the study was begun with: DATA_PATH, DIRECTORY, SERVER or IDENTITY."""
        return (self.settings().get(RECORD) or {}).get(key)

    def wandb_sweep_id(self, requested: str | None) -> str | None:
        """The sweep of a W&B server that leads the study, or shall lead a new one; None: the search is made here.

        `requested` is ENTITY/PROJECT/ID, "" for a new one, None for that of the study. Raises ValueError if the study
        has another: one journal cannot hold the trials of two searches.
        """
        if self.base_file is None:
            return requested
        known = self.metadata(SERVER)
        if requested is not None and known is None:
            server = f"the W&B sweep {requested}" if requested else "a W&B server (--wandb online)"
            raise UserError(
                f"{self.place} chooses its own trials, so {server} cannot choose them: name another --study"
            )
        if requested and requested != known:
            raise UserError(
                f"{self.place} was started with the W&B sweep {known}, not with {requested}: name another --study"
            )
        return known

    def sweep(self) -> Sweep:
        """The sweep. Keys that only W&B's server reads may be there, for it may lead the study."""
        return read_sweep(self._definition, self._extras if self._extras.exists() else None, strict=False)

    def open(
        self, sweep_config: str | None, extras: str | None, config: Any, data_path: str | None, *, strict: bool = True
    ) -> tuple[Sweep, str | None]:
        """(the sweep, the data) of a study that is there, or begins. Nothing is written.

        A study that is there has its own `sweep_config`, `extras` and `data_path`: they may be left out, and are else
        compared. `strict` is that of `read_sweep`, for a study that begins. Raises UserError for a file that cannot be
        used, and where the study is that of another sweep.
        """
        if not self.is_there:
            if sweep_config is None:
                raise UserError(f"{self.place} is not a study yet: name a file with --sweep_config")
            self.check_free()
            return read_sweep(sweep_config, extras, strict=strict), None if data_path is None else absolute(data_path)
        for flag, file, own in (("--sweep_config", sweep_config, self._definition), ("--extras", extras, self._extras)):
            if file is not None:
                self._compare(flag, file, own)
        if settings := self.settings():
            # The trials of a study are compared with each other: nothing but the parameters may differ.
            # Read as a config: fields that a newer version has besides have their defaults in both.
            before, now = type(config).from_dict(settings, str(self.path / BASE)).to_dict(), config.to_dict()
            changes = [
                f"{name} {before[name]} -> {value}"
                for name, value in now.items()
                if before[name] != value and name not in OF_A_HOST
            ]
            if changes:
                raise UserError(
                    f"{self.place} was started with other settings ({', '.join(changes)}): name another --study"
                )
        known = self.metadata(DATA_PATH)
        if data_path is not None and known is not None and absolute(data_path) != absolute(known):
            raise UserError(f"--data_path {data_path}: {self.place} was started with {known}; name another --study")
        return self.sweep(), known

    @contextmanager
    def hold(self, log: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of the folder: taken before the first look at it, released after the last change. At the end, a
        folder that this start has made and in which no study was begun is removed again.

        Raises FolderIsHeld where another process still searches there after 30 s, UserError where the folder holds
        something else or cannot be written.
        """
        self.check_free()
        folder = self.path.absolute()
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        was_locked = (folder / LOCK).exists()
        release = hold_folder(folder, SEARCHING, wait_s=WAIT_S, log=log)
        try:
            yield
        finally:
            if not self.is_there and not was_locked:
                with suppress(OSError):  # a folder with other files stays
                    (folder / LOCK).unlink()
                    for path in made:
                        path.rmdir()
            release()

    def check_free(self) -> None:
        """Raises UserError where no study is there, and something else is."""
        if not self.is_there and self._holds_other_files():
            raise UserError(f"--study {self.place} exists and is not a study: name another folder")

    def _holds_other_files(self) -> bool:
        """Whether there is more than a start may have left that was killed before the study was there."""
        try:
            names = {path.name for path in self.path.iterdir() if not path.match(".*.tmp")}
        except FileNotFoundError:  # also where another start has just taken it away
            return False
        except NotADirectoryError:
            return True
        if DEFINITION in names:  # another start has begun it since `is_there`
            return False
        return bool(names - {BASE, EXTRAS, LOCK})

    def _compare(self, flag: str, file: str, own: Path) -> None:
        """Raises ValueError where a file says something else than that of the study, with the first key."""
        before, now = flat(load_yaml(own)) if own.exists() else {}, flat(load_yaml(file))
        texts = [{key: as_text(value) for key, value in values.items()} for values in (before, now)]
        if texts[0] == texts[1]:  # 1, 1.0 and true are three values
            return
        if not now:
            raise UserError(f"{flag} {file} is empty, and {self.place} has its own: leave {flag} out")
        key = next(key for key in {**before, **now} if texts[0].get(key) != texts[1].get(key))
        values = [str(values.get(key, "nothing")) for values in (before, now)]
        raise UserError(
            f"{flag} {file} differs from the file that {self.place} started with ({key} is {values[1]}, and "
            f"{values[0]} in {own.name}): name another --study, or leave {flag} out"
        )

    def create(self, sweep_config: str, extras: str | None, config: Any, metadata: Mapping[str, str | None]) -> None:
        """Write a study that begins; `metadata` is what the method of this name returns. Raises OSError."""
        make_folder(self.path)
        config.save_yaml(self.path / BASE, metadata)
        if extras is not None:
            write_file(self._extras, Path(extras).read_bytes())
        write_file(self._definition, Path(sweep_config).read_bytes())

    def rollback(self) -> None:
        """Undo `create` after a refused first start, since the error may be in these files. Only for who holds the
        study since before it was there."""
        for name in (JOURNAL, DEFINITION, EXTRAS, BASE):
            (self.path / name).unlink(missing_ok=True)
