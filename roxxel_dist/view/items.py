"""The items of `roxxel-dist top`: studies and jobs as they grow; and runs, studies and jobs, by name or the newest."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.control import index
from roxxel_dist.launcher.control.record import JobRecord
from roxxel_dist.place.directory import DEFINITION, JOURNAL, METRICS, is_run, is_study, no_run
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK, is_held
from roxxel_dist.sweep.report.text import as_json
from roxxel_dist.sweep.samplers.pairs import outcome
from roxxel_dist.sweep.space.sweep_file import Sweep
from roxxel_dist.sweep.study.folder import EXTRAS, Study, StudyDir
from roxxel_dist.sweep.study.journal import History
from roxxel_dist.train.log.csv_jsonl import Tail
from roxxel_dist.utils.display import plain
from roxxel_dist.view.bucket import BucketRunReader
from roxxel_dist.view.run import RankRates, RankState, RunReader, RunState, modified_time

RUNS, STUDIES = Path("runs"), Path("studies")
NOTHING = f"there is no run in {RUNS} and no study in {STUDIES}: name a run, a study, a job or a folder"
LOOK_S = 2.0
"""Seconds between searches for new items, while `top` is open."""
TAIL_BYTES, TAIL_LINES = 16 << 10, 12
"""Bytes and lines of the end of a log that are shown."""


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
        events = self._journal.objects()
        if self._journal.restarted:
            self._study = replace(self._study, history=History())
        history = self._study.history
        for event in events:
            with suppress(KeyError, TypeError, ValueError):  # a damaged line, which `report` names
                history.apply(event)
        self._study = replace(self._study, is_searched=is_held(self.path / LOCK, unknown=False))
        return state_of(self._study)


def _stamp(file: Path) -> tuple[int, ...]:
    """The facts that change when a file is written; empty if there is none."""
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
    longest = max((trial.step for trial in trials if trial.state == "done"), default=None)
    left_s = study.history.seconds_left(study.sweep.run_cap, len(running), time.time()) if held else None
    return StudyState(
        study=study,
        state="searching" if held else "finished" if _is_finished(study) else "stopped",
        workers=len(running),
        began=min((trial.began for trial in trials if trial.began), default=None),
        left_s=left_s,
        steps_left=None if longest is None or not held else sum(max(0, longest - trial.step) for trial in running),
    )


def _is_finished(study: Study) -> bool:
    """Whether every trial that was asked for has ended, one with a value, and no more trials are known to come."""
    history, sweep = study.history, study.sweep
    if sweep.versus is not None:
        return outcome(history, sweep.versus).ending is not None
    grid = sweep.space.size if (history.method or sweep.method) == "grid" else None
    count = min((n for n in (sweep.run_cap, grid) if n is not None), default=0)
    return history.best is not None and not (history.running or history.paused) and len(history.trials) >= count


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job at one moment."""

    record: JobRecord
    ranks: tuple[RankState, ...]
    lines: tuple[str, ...]
    """The last lines of rank 0, or of the launcher if rank 0 has none."""


class JobReader:
    """Reads one job; call `read` for each update."""

    def __init__(self, record: JobRecord) -> None:
        self.record: JobRecord = record
        self._rates = RankRates()

    def read(self) -> JobState:
        """The current state of the job."""
        self.record = self.record.now()
        logs = (Path(self.record.log_dir, "rank-0.log"), self.record.launcher_log)
        lines = next((lines for log in logs if (lines := last_lines(log))), ())
        return JobState(record=self.record, ranks=self._rates.read(self.record), lines=lines)


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb", buffering=0) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return tuple(file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:])
    except OSError:
        return ()


State = RunState | StudyState | JobState


@dataclass(frozen=True, kw_only=True)
class Item:
    """One displayed run, study or job."""

    name: str
    reader: RunReader | StudyReader | JobReader

    @property
    def key(self) -> tuple[str, str]:
        """The key that tells items apart: the kind of reader, and the name."""
        return type(self.reader).__name__, self.name


def keep_readers(before: Iterable[Item], found: Iterable[Item]) -> list[Item]:
    """The items that were found now; one that was there before keeps its reader, with what that has read."""
    known = {item.key: item for item in before}
    return [known.get(item.key, item) for item in found]


def known_jobs() -> list[JobRecord]:
    """The jobs of this user, the oldest first; none if there is no home directory."""
    with suppress(FileNotFoundError):
        return index.entries()
    return []


def read(item: Item, *, brief: bool = False, deadline: float | None = None) -> State:
    """The current state of an item; see `RunReader.read`."""
    if isinstance(item.reader, RunReader):
        return item.reader.read(index.of_directory(item.reader.path), brief=brief, deadline=deadline)
    return item.reader.read()


def is_behind(state: State) -> bool:
    """Whether logs of it are not read to their ends yet."""
    return isinstance(state, RunState) and state.read_share < 1.0


def items_of(names: Sequence[str]) -> list[Item]:
    """The items for names of runs, studies, folders of them, and jobs; without names the newest active one, else all.
    Raises ValueError for an unknown name."""
    if not names:
        return _newest()
    items = [item for name in names for item in _named(name)]
    return list({item.key: item for item in items}.values())


class Watched:
    """The items that `top` shows while it is open. They are searched again, and readers keep what they have read.
    Without names it shows one living run and changes to a newer one only after that has ended."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names: Sequence[str] = names
        self._find = finder(names)
        self.items: list[Item] = self._find() if names else _newest()
        self._looked = time.monotonic()

    def look(self, states: Sequence[State] = ()) -> None:
        """Search for new items every `LOOK_S` seconds; `states` are the last ones of the items."""
        if time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        with suppress(OSError, ValueError):  # a folder that is deleted or created now: the items stay
            found = self._find() if self._names or len(self.items) > 1 else self._successor(states)
            self.items = keep_readers(self.items, found)

    def _successor(self, states: Sequence[State]) -> list[Item]:
        """The items that follow on one: the run of a job, once it has a folder, and a living run on one that has
        ended."""
        (item,) = self.items
        if isinstance(item.reader, JobReader) and (found := _of_job(item.reader.record)) and found[0].key != item.key:
            return found
        ended = bool(states) and not is_active(states[0])
        found = _newest() if ended else []
        return found if len(found) == 1 and is_active(read(found[0], brief=True, deadline=0.0)) else [item]


def is_active(state: State) -> bool:
    """Whether a run trains, a study searches, or a job is not over."""
    if isinstance(state, JobState):
        return not state.record.is_over
    return state.state not in ("finished", "stopped", "done")


def all_items() -> list[Item]:
    """The runs in `runs` and the studies in `studies`, then the runs of active jobs elsewhere. Raises ValueError if
    there are none."""
    items = _in_folders((RUNS, STUDIES))
    living = [item for job in known_jobs() if not job.is_over and job.is_known for item in _of_job(job)]
    items = list({(type(item.reader), os.path.realpath(item.name)): item for item in [*items, *living]}.values())
    if not items:
        raise UserError(NOTHING)
    return items


def finder(names: Sequence[str]) -> Callable[[], list[Item]]:
    """A function that returns `items_of` names, or `all_items`: each call reads folders again, but buckets only once.
    Raises ValueError for an unknown name."""
    local = [name for name in names if bucket_url(name) is None]
    distant = [item for name in names if name not in local for item in _named(name)]
    return lambda: [*distant, *(items_of(local) if local else [] if names else all_items())]


def _of_job(job: JobRecord) -> list[Item]:
    """The runs of a job, by relative name, or else the job itself."""
    run, working_dir = Path(os.path.realpath(job.run_dir)), os.path.realpath(".")
    return _in_folder(run.relative_to(working_dir) if run.is_relative_to(working_dir) else Path(job.run_dir)) or [
        Item(name=job.run_id, reader=JobReader(job))
    ]


def _named(name: str) -> list[Item]:
    if bucket_url(name) is not None:
        reader = BucketRunReader(name)
        return [Item(name=reader.name, reader=reader)]
    if items := _in_folder(Path(name)):
        return items
    try:
        job = index.find(name)
    except (ValueError, FileNotFoundError) as error:
        if os.path.exists(name) or os.sep in name or not known_jobs():
            raise UserError(no_run(Path(name))) from error
        raise
    return _of_job(job)


def _in_folder(folder: Path) -> list[Item]:
    """The study or the run in a folder, else those in its subfolders, the last written first."""
    if is_study(folder):
        return [Item(name=str(folder), reader=StudyReader(folder))]
    if is_run(folder):
        return [Item(name=str(folder), reader=RunReader(folder))]
    if not folder.is_dir():
        return []
    inside = [path for path in folder.iterdir() if path.is_dir() and (is_run(path) or is_study(path))]
    return _in_folders(sorted(inside, key=_written, reverse=True))


def _in_folders(folders: Iterable[Path]) -> list[Item]:
    """The items in folders. A study that cannot be read does not hide the others: where there are none it is named."""
    items, damage = list[Item](), None
    for folder in folders:
        try:
            items += _in_folder(folder)
        except UserError as error:
            damage = error
    if damage is not None and not items:
        raise damage
    return items


def _newest() -> list[Item]:
    """The runs of the newest active job, else the last written active run or study, else all here."""
    living = [job for job in known_jobs() if not job.is_over and job.is_known]
    if living := [job for job in living if job.ran] or living:
        return _of_job(living[-1])
    items = _in_folders((RUNS, STUDIES))
    for item in items:
        if is_active(read(item, brief=True, deadline=0.0)):
            return [item]
    if not items:
        raise UserError(NOTHING)
    return items


def _written(path: Path) -> float:
    return max(modified_time(path / name) for name in (METRICS, JOURNAL))


def values(state: State) -> dict[str, Any]:
    """The numbers of a frame; values that are not finite become None."""
    if isinstance(state, RunState):
        more: dict[str, Any] = {name: getattr(state, name) for name in ("left_s", "goodput", "curves")}
        more |= {"phase": state.phase + 1 if state.phases else None}
        values = dataclasses.asdict(dataclasses.replace(state, buckets={})) | more
        del values["buckets"]  # the curves say what they are
        return {"kind": "run", **plain(values)}
    if isinstance(state, JobState):
        return {"kind": "job", **plain(dataclasses.asdict(state))}
    more = {name: getattr(state, name) for name in ("state", "workers", "began", "left_s", "steps_left")}
    return {"kind": "study", **plain({"path": state.study.place, **as_json(state.study), **more})}
