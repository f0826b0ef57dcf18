"""The run directory: its files, its lock, and the cleanup after a run that cannot begin."""

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path, PosixPath
from typing import Any, Self

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CURSOR
from roxxel_dist.data.files.atomic_dir import COMMIT, SUFFIX
from roxxel_dist.data.files.discovery import ENDINGS, is_tokens
from roxxel_dist.objects.url import is_url
from roxxel_dist.process.durable import save_mailbox
from roxxel_dist.process.exit_codes import REACHED_ENV, STATUS_ENV, MissingFileError, UserError
from roxxel_dist.process.file_lock import LOCK, FolderIsHeld, hold_folder
from roxxel_dist.process.file_lock import is_held as lock_is_held
from roxxel_dist.utils.voice import argument

RUN_FILES = (
    "config.yaml", "tokenizer.json", "model_summary.json", CURSOR, "training_log.csv", "metrics.jsonl",
    "timeline.jsonl", "model_weights.msgpack", "best_model_weights.msgpack", "wandb.json", "plots/loss.png",
)  # fmt: skip
"""Files that a run replaces, or drops rows from."""
IN_FOLDERS = (
    "checkpoints/[0-9]*", "checkpoints/*.orbax-checkpoint-tmp*", "data/*.rox", "data/tokenizer.json", "data/build.json",
)  # fmt: skip
"""What a run takes for its own in its folders, and deletes; it only adds to others, such as `logs`."""


def check_run_folder(run: Path, name: str = "") -> None:
    """Raises UserError where a run in the folder would damage files that no run made. Messages call the folder `name`.
    A folder that does not exist, an empty one, one with other files, such as notes, and that of a run are fine."""
    name = name or str(run)
    others = chain(["runs/first"], map("runs/run_{}".format, count(2)))
    other = next(place for place in others if not os.path.exists(place))
    if not run.is_dir() or has_begun(run):
        return
    if (place := os.path.realpath(run)) in ("/", os.path.realpath(Path.home())):
        what = "the root folder" if place == "/" else "your home folder"
        raise UserError(f"run_dir is {name}, {what}: name a folder for this run alone, such as {other}")
    names = sorted(path.name for path in run.iterdir() if path.suffix in ENDINGS and path.is_file())
    names += [f"{part}/{file.name}" for part in ("train", "val") for file in (run / part).glob("*.rox")]
    what = "a data set" if names else "a study" if (run / DEFINITION).exists() else ""
    if not names and not what and not (run / LOCK).exists():  # with it, they may be of a run that ended at its start
        names = [name for name in RUN_FILES if os.path.lexists(run / name)]
        inside = dict.fromkeys(path for pattern in IN_FOLDERS for path in sorted(run.glob(pattern)))
        names += [str(path.relative_to(run)) for path in inside]
    elif (run / RUN_FILES[0]).exists():  # a run writes its cursor before its config
        names = [RUN_FILES[0], *names]
    if what or names:
        found = ", ".join(names[:3]) or DEFINITION
        text = f"holds {what} ({found})" if what else f"has {found}, which no run made and a run would replace"
        config, cure = run / RUN_FILES[0], ""
        if not what and config.is_file() and (not (data := config.read_bytes()) or b"\nrecord:\n" in data):
            text = f"has {found} of a run and no step of it" if data else f"has an empty {config.name}"
            cure = "copy the whole run again, or "
        raise UserError(f"run_dir is {name}, which {text}: {cure}name another folder, such as {other}")


def has_begun(folder: Path) -> bool:
    """Whether a run has begun in the folder: it has a cursor, which is its first file, or a checkpoint."""
    return (folder / CURSOR).is_file() or any(folder.glob("checkpoints/[0-9]*/meta.json"))


def leftovers_of(path: Path) -> Iterator[Path]:
    """The temporary files that killed writers of `path` left beside it; see `durable.write_file`."""
    pattern = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}.tmp")
    return (file for file in path.parent.glob(".*.tmp") if pattern.fullmatch(file.name))


CONFIG, TOKENIZER, DATA = "config.yaml", "tokenizer.json", "data"
PREFLIGHT_STORE_S = 20.0
"""Seconds for which preflight tries to reach an object store."""
METRICS, LOGS = "metrics.jsonl", "logs"
DEFINITION, JOURNAL = "study.yaml", "journal.jsonl"
"""Files of a study, not of a run."""
SUMMARY, LOG, CURVE = "model_summary.json", "training_log.csv", "plots/loss.png"


class RunResult(PosixPath):
    """The directory of a run, a path like any other, and how its training ended."""

    stopped: bool = False
    """Whether it was asked to stop before its end (Ctrl-C, SIGTERM); the step is saved, and `resume=True` continues."""
    step: int | None = None
    """The last finished step."""

    @classmethod
    def of_step(cls, run: Path, step: int | None, *, stopped: bool) -> Self:
        """The result of a training run."""
        result = cls(run)
        result.stopped, result.step = stopped, step
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and pickles, keep how the training ended."""
        return partial(RunResult.of_step, stopped=self.stopped), (Path(*self.parts), self.step)

    def with_segments(self, *segments: Any) -> Path:
        """A path below or beside it, as a plain path."""
        return Path(*segments)

    def __repr__(self) -> str:
        """The path, and how the training ended."""
        if self.step is None:
            return repr(Path(self))
        return f"<run {self}: {'stopped' if self.stopped else 'ended'} after step {self.step}>"


class RunDirectory:
    """A run's folder, which need not exist; one training holds it at a time. Messages call the run `name`."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path: Path = path
        self._name = name or str(path)
        logs = () if os.environ.get(STATUS_ENV) == "1" else (LOGS,)  # logs of a launcher stay: they have the error
        inside = (DATA, CHECKPOINTS, *logs, LOG, METRICS, LOCK)
        files = (*(path / name for name in inside), path, *path.parents)
        self._new = [file for file in files if not os.path.exists(file)]  # Path.exists raises if a name is too long
        self._release_folder: Callable[[], None] = lambda: None

    def claim(self, resume: bool) -> None:
        """Make the folder and hold it until `release`. Raises ValueError if it is not a folder, cannot be written, is
        held, has files that no run made and a run would replace, or has a run and `resume` is off."""
        if os.path.exists(self.path) and not self.path.is_dir():
            raise UserError(f"run_dir is {self.path}, a file: name a folder")
        self.check_new(resume)
        try:
            self._release_folder = hold_folder(self.path, "training in", nested=False)
        except FolderIsHeld:
            self._new = []
            raise
        self.check_new(resume)  # again, under the lock
        save_mailbox(self.path).clear()
        for name in RUN_FILES:
            for temporary in leftovers_of(self.path / name):
                temporary.unlink(missing_ok=True)

    def check_new(self, resume: bool) -> None:
        """Raises ValueError if the folder is no place for a run, or has one and `resume` is off."""
        check_run_folder(self.path, self._name)
        if not resume and (os.path.exists(self.path / CONFIG) or has_begun(self.path)):
            raise UserError(
                f"{self._name} holds a run already: continue it with {argument('resume')}, or name another run_dir"
            )

    def release(self) -> None:
        """Release the folder to others."""
        self._release_folder()

    def discard(self) -> None:
        """Remove the files that were made since this object was created; older files stay."""
        for path in self._new:
            if path.name in (DATA, CHECKPOINTS, LOGS) and path.parent == self.path:
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # a folder that is not empty has files of others
                    path.rmdir() if path.is_dir() else path.unlink()
        self._new = []


def is_held(run: Path, *, unknown: bool = True) -> bool:
    """Whether a process trains in a run directory now; `unknown` if the file system has no locks."""
    return lock_is_held(run / LOCK, unknown=unknown)


def default_run_dir() -> Path:
    """`runs/run_<id>`: the launcher's id, or the time, made unique."""
    if run_id := os.environ.get("ROXXEL_RUN_ID"):
        return Path("runs") / f"run_{run_id}"
    name = Path("runs") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    candidates = (name if i == 0 else name.with_name(f"{name.name}_{i + 1}") for i in range(1_000_000))
    return next(path for path in candidates if not path.exists())


def data_to_read(data_path: str | None, run_dir: str | None, *, resume: bool) -> dict[str, Any] | None:
    """The data that `train` would read with these flags on this host, for preflight; None without a path.

    Returns `path`, and the `fingerprint` of tokens, `text` (True), or `why` it cannot be read; only the path if an
    interrupted write must be finished first. Imports numpy if there are tokens, and never jax.
    """
    path = data_path
    try:
        if resume and run_dir is not None:  # a resumed run has recorded its own
            run = Path(run_dir)
            if _must_be_finished(run / DATA) or is_tokens(run / DATA):
                path = str(run / DATA)
            elif path is None and (run / CONFIG).exists():
                from roxxel_dist.settings.config import RECORD, load_yaml

                path = load_yaml(run / CONFIG).get(RECORD, {}).get("data_path")
        if path is None:
            return None
        if _must_be_finished(Path(path)):
            return {"path": path}
        if not is_tokens(path):
            return {"path": path} | ({"text": True} if os.path.exists(path) else {"why": "there is no such file"})
        from roxxel_dist.data.dataset import Roxxel
        from roxxel_dist.data.remote.config import RemoteConfig

        remote = RemoteConfig(store_timeout=PREFLIGHT_STORE_S)
        try:
            data = Roxxel(path, remote=remote)
        except ValueError:
            # Only the same fingerprint on all hosts counts here: the dtype of headerless files is for the run to check.
            with contextlib.suppress(ValueError):
                return {"path": path, "fingerprint": Roxxel(path, dtype="uint8").fingerprint}
            raise
        with data:
            return {"path": path, "fingerprint": data.fingerprint}
    except (OSError, ValueError) as error:
        return {"path": data_path, "why": str(error)}


def why_no_run(run_dir: str) -> str | None:
    """Why no run can begin, or go on, in a folder of this host, for preflight; None where it can."""
    try:
        check_run_folder(Path(run_dir))
    except (OSError, UserError) as error:
        return str(error)
    return None


def _must_be_finished(path: Path) -> bool:
    """Whether opening the path would finish an interrupted write, which preflight must not do."""
    return any((path if path.is_dir() else path.parent).glob(f".*{SUFFIX}/{COMMIT}"))


def check_still_there(run: Path) -> None:
    """Raises FileNotFoundError for a run without a config.yaml, if this job has done steps in it. Otherwise a new run
    would begin in the folder of a file system that is not mounted."""
    step = int(os.environ.get(REACHED_ENV) or 0)
    if step and not (run / CONFIG).is_file():
        raise MissingFileError(f"{run / CONFIG} is not there, and this job has reached step {step} in {run}")


def is_run(folder: Path) -> bool:
    """Whether a folder has a run, or one that is starting; not with the empty config of an unfinished copy."""
    return has_config(folder) or ((folder / METRICS).is_file() and not (folder / CONFIG).exists())


def has_config(folder: Path) -> bool:
    """Whether a folder has the config of a run, and not only the beginning of a copy."""
    return (folder / CONFIG).is_file() and (folder / CONFIG).stat().st_size > 0


def is_of_program(folder: Path) -> bool:
    """Whether a folder has steps of a run whose model a program of the user's made: such a run has no config.yaml."""
    rows = folder / METRICS
    return not (folder / CONFIG).exists() and (
        (rows.is_file() and rows.stat().st_size > 0) or any(folder.glob("checkpoints/[0-9]*/meta.json"))
    )


def no_run(folder: Path, name: str = "") -> str:
    """The message for a folder that is not a usable run: it suggests the closest run, or lists those beside it. `name`
    is the user's text, if that is not a folder."""
    if is_url(name):
        return f"{name} is not a run: there is no {name}/{CONFIG}; check the address"
    if is_study(folder):
        return f"{folder} is a study: name the run of a trial, such as {folder / 'trials' / '0'}"
    if (folder / CONFIG).is_file():
        return f"{folder / CONFIG} is empty: copy it again"
    if is_run(folder):
        return (
            f"{folder} has no {CONFIG}: a program of yours made its model and trained it with a Trainer, and no "
            f"command can make that model. Use the model in that program, or train it with "
            f"{argument('model', 'MODULE:FUNCTION')}. "
            f"`report`, `top` and `verify` read this run"
        )
    inside, beside = _runs_in(folder), _runs_in(folder.parent)
    if inside:
        runs = f"runs: name runs in it, such as {' and '.join(map(str, inside[:2]))}"
        studies = f"studies: name one of them, such as {inside[0]}"
        return f"{folder} is a folder of {studies if all(map(is_study, inside)) else runs}"
    what = f"{folder} is not a run directory: it has no {CONFIG}" if folder.exists() else f"there is no {folder}"
    near = difflib.get_close_matches(folder.name, [run.name for run in beside if run != folder], n=1, cutoff=0.5)
    hint = f"{folder.parent} has {', '.join(run.name for run in beside)}" if beside else "name the folder of a run"
    return f"{what}: did you mean {folder.parent / near[0]}?" if near else f"{what}: {hint}"


def is_study(folder: str | Path) -> bool:
    """Whether a folder is a study; it contains the runs of its trials."""
    return (Path(folder) / JOURNAL).is_file() and (Path(folder) / DEFINITION).is_file()


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_run(path)) if folder.is_dir() else []
