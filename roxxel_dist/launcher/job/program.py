"""What the launcher knows of the program of a job: nothing of most, and of `train` what its words say.

No other file of the launcher knows the trainer. Its modules are here by their names, and are imported where they are
used: in a rank, or on a host that is asked whether it is fit.
"""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


def flag(words: Sequence[str], name: str) -> str | None:
    """The value of a flag, however it is spelled; the last one counts."""
    return {other: value for other, value, _ in split_flags(words)}.get(name)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The value of each flag, guessed without knowing which flags take one; "" if none follows."""
    return {name: value or "" for name, value, _ in split_flags(words) if name}


def split_flags(words: Sequence[str], switches: Container[str] = ()) -> Iterator[tuple[str, str | None, list[str]]]:
    """(name, value, its words) of every flag, and ("", None, [word]) of a word that belongs to none.

    A flag's name has _ where - was written. Its value is what follows `=`, or the next word, unless that is a flag too;
    of `switches` only `True` and `False` are values.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            yield "", None, [word]
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        is_switch = name.removeprefix("no_") in switches
        if equals:
            yield name, value, [word]
        elif rest and not rest[0].startswith("--") and (not is_switch or rest[0].lower() in ("true", "false")):
            yield name, rest[0], [word, rest.popleft()]
        else:
            yield name, None, [word]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts about the program of a job. The defaults are those of one that the launcher knows nothing of."""

    reports_steps: bool = False
    """Its ranks name the step that they are in, so a restart knows how far the job has come."""
    resume: str = ""
    """The flag with which the same command goes on where it was."""
    imports: tuple[str, ...] = ()
    """Modules that a rank imports before it begins, and a warm spare ahead of time. None of them touches a device."""
    needs_folder: bool = False
    """Whether all hosts must share the folder of its run."""
    folder: Path | None = None
    """That folder; None where the words do not name it, or it needs none."""
    bucket: str | None = None
    """The address where it keeps its run instead."""
    data_path: str | None = None
    """What it reads, the same on all hosts."""
    resumes: bool = False
    """Whether it goes on with what its folder has."""
    config: str | None = None
    """A file that must be the same for all ranks."""


def program_of(command: Sequence[str]) -> Program:
    """The facts that are known of a command."""
    if not command or command[0] != "train":
        return Program()
    words = command[1:]
    run_dir = flag(words, "run_dir") or ""
    resume = [(value or "").lower() != "false" for name, value, _ in split_flags(words) if name == "resume"]
    return Program(
        reports_steps=True,
        resume="--resume",
        imports=("roxxel_dist.cli.train", "roxxel_dist.run.experiment"),
        needs_folder=not is_bucket(run_dir),
        folder=Path(run_dir) if run_dir and not is_bucket(run_dir) else None,
        bucket=run_dir.rstrip("/") if is_bucket(run_dir) else None,
        data_path=flag(words, "data_path"),
        resumes=any(resume),
        config=flag(words, "config"),
    )


def is_bucket(run_dir: str) -> bool:
    """Whether a run directory is an address in a bucket."""
    return import_module("roxxel_dist.objects.url").is_url(run_dir)


def log_dir_for(command: Sequence[str], run_id: str) -> Path:
    """`X/logs` for `train … --run_dir X` (the last one counts); otherwise, and where X is in a bucket,
    `runs/run_<run_id>/logs`."""
    return (program_of(command).folder or Path("runs", f"run_{run_id}")) / "logs"


def host_checks() -> Any:
    """The trainer's own module with `data_to_read` and `why_no_run`, which a host is asked before a start."""
    return import_module("roxxel_dist.place.directory")
