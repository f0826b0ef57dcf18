"""What `roxxel-dist verify` finds out: whether checkpoints and exports are what was written. No jax."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roxxel_dist.checkpoint.digests import TABLE, CountBytes, DigestTable, damaged_ones, digest, files_below, is_sealed
from roxxel_dist.checkpoint.stored_blocks import check_checkpoint


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a checkpoint, or an export, is complete."""

    name: str
    """Such as "step 300", or a file's name."""
    state: Literal["complete", "unverified", "damaged", "renamed"]
    """Unverified: an export of another program, without digests. Renamed: a damaged checkpoint, renamed by a run that
    has gone on from another one."""
    problems: tuple[str, ...] = ()
    """The files and arrays that differ, and the ranks that wrote them."""
    files: int = 0
    bytes: int = 0
    """Of all files together."""

    def __str__(self) -> str:
        size = f"{self.files:,} files, {self.bytes / 1e6:,.1f} MB"
        why = {"unverified": f"{size}, no digests", "renamed": f"{size}, damaged"}.get(self.state, size)
        return f"{self.name}: {self.state} ({'; '.join(self.problems) or why})"


def verify_checkpoints(folder: Path, steps: list[int], progress: CountBytes) -> Iterator[Verdict]:
    """Of each step: its files and the arrays in them."""
    for step in steps:
        checkpoint = folder / str(step)
        problems = check_checkpoint(checkpoint, step, progress)
        yield _verdict(f"step {step}", "damaged" if problems else "complete", problems, checkpoint)


def set_aside(folder: Path) -> Iterator[Verdict]:
    """The checkpoints in a folder that were set aside."""
    for name in damaged_ones(folder):
        yield _verdict(name, "renamed", [], folder / name)


def size_of(paths: list[Path]) -> int:
    """The bytes of some files, and of those in some folders."""
    return sum(size for path in paths for _, size in _sizes(path))


def _sizes(path: Path) -> list[tuple[Path, int]]:
    paths = files_below(path) if path.is_dir() else [path]
    return [(file, file.stat().st_size) for file in paths if file.is_file()]


def _verdict(name: str, state: Any, problems: list[str], path: Path) -> Verdict:
    sizes = [size for _, size in _sizes(path)]
    return Verdict(name=name, state=state, problems=tuple(problems), files=len(sizes), bytes=sum(sizes))


def is_export(path: Path) -> bool:
    """Whether a folder, or a file, holds weights for other programs."""
    return bool(_weights_in(path)) or (path / TABLE).is_file()


def _weights_in(path: Path) -> list[Path]:
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return [path for path in paths if path.suffix in (".msgpack", ".safetensors") and path.is_file()]


def verify_export(path: Path, progress: CountBytes) -> Iterator[Verdict]:
    """Of what `export` has made: one for all with its table, or where there is none, one for each file of weights."""
    if (path / TABLE).is_file():
        try:
            problems = DigestTable.read(path / TABLE).check_files(path, progress=progress)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems = [str(error)]
        yield _verdict(path.name, "damaged" if problems else "complete", problems, path)
        return
    for weights in _weights_in(path):
        state, problems = _check_msgpack(weights) if weights.suffix == ".msgpack" else _check_safetensors(weights)
        progress(weights.stat().st_size)
        yield _verdict(weights.name, state, problems, weights)


def _check_msgpack(path: Path) -> tuple[str, list[str]]:
    try:
        sealed = is_sealed(path.read_bytes())
    except OSError as error:
        return "damaged", [str(error)]
    if sealed is None:
        return "unverified", []
    return ("complete", []) if sealed else ("damaged", [f"{path.name} does not agree with its digest"])


def _check_safetensors(path: Path) -> tuple[str, list[str]]:
    import ml_dtypes  # noqa: F401  (numpy has no bfloat16 of its own)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            text = (file.metadata() or {}).get("digests")
            if text is None:
                return "unverified", []
            digests, names = json.loads(text), file.keys()
            problems = [f"{name} has no digest" for name in names if name not in digests]
            problems += [f"{name} is missing" for name in digests if name not in names]
            for name in names:
                if name in digests and digest(np.asarray(file.get_tensor(name))) != digests[name]:
                    problems.append(f"{name} does not agree with its digest")
    except (OSError, ValueError, SafetensorError) as error:
        return "damaged", [f"{path.name} cannot be read ({error})"]
    return "damaged" if problems else "complete", problems
