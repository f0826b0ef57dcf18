"""The files that a run writes into its folder, and the folders that are no place for a run. No jax."""

import os
import re
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from roxxel_dist.checkpoint.metadata import CURSOR
from roxxel_dist.data.files.discovery import ENDINGS
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK

RUN_FILES = (
    "config.yaml",
    "tokenizer.json",
    "model_summary.json",
    CURSOR,
    "training_log.csv",
    "metrics.jsonl",
    "timeline.jsonl",
    "model_weights.msgpack",
    "best_model_weights.msgpack",
    "wandb.json",
    "plots/loss.png",
)
"""Files that a run replaces, or drops rows from."""
IN_FOLDERS = (
    "checkpoints/[0-9]*",
    "checkpoints/*.orbax-checkpoint-tmp*",
    "data/*.rox",
    "data/tokenizer.json",
    "data/build.json",
)
"""What a run takes for its own in its folders, and deletes; it only adds to others, such as `logs`."""
STUDY = "study.yaml"


def check_run_folder(run: Path, name: str = "") -> None:
    """Raises UserError where a run in the folder would damage files that no run made. Messages call the folder `name`.

    A folder that does not exist, an empty one, one with other files, such as notes, and that of a run are fine.
    """
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
    what = "a data set" if names else "a study" if (run / STUDY).exists() else ""
    if not names and not what and not (run / LOCK).exists():  # with it, they may be of a run that ended at its start
        names = [name for name in RUN_FILES if os.path.lexists(run / name)]
        inside = dict.fromkeys(path for pattern in IN_FOLDERS for path in sorted(run.glob(pattern)))
        names += [str(path.relative_to(run)) for path in inside]
    elif (run / RUN_FILES[0]).exists():  # a run writes its cursor before its config
        names = [RUN_FILES[0], *names]
    if what or names:
        found = ", ".join(names[:3]) or STUDY
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
