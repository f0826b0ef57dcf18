"""Blocks of arrays in the files of a checkpoint, by tensorstore: read and compared with their digests, and, for a
checkpoint in a bucket, where they lie. No jax.

Orbax stores zarr arrays, each block a value of an OCDBT database: files of values, and a tree of nodes that says where.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import tensorstore as ts

from roxxel_dist.checkpoint.digests import (
    STATE,
    TABLE,
    THREADS,
    BlockDigest,
    Bounds,
    CountBytes,
    DigestTable,
    digest,
    files_below,
    is_sealed,
    list_damaged,
    read_verified,
)


def check_checkpoint(checkpoint: Path, step: int, progress: CountBytes | None = None) -> list[str]:
    """The problems of a checkpoint: its files, and the arrays in them."""
    try:
        _, table = read_verified(checkpoint, step)
    except ValueError as error:
        return [str(error)]
    if problems := table.check_files(checkpoint, progress=progress):
        return problems  # what names a file says more than the arrays that cannot be read
    return list(wrong_blocks(checkpoint, table.all_blocks(), progress).values())


def wrong_blocks(
    checkpoint: Path, blocks: Iterable[tuple[str, BlockDigest]], progress: CountBytes | None = None
) -> dict[tuple[str, BlockDigest], str]:
    """The problems of blocks of arrays, given by name, without those that agree; each is read from the files."""

    opened = functools.cache(partial(_open, checkpoint / STATE))  # an array has many blocks

    def check(name: str, block: BlockDigest) -> str:
        try:
            data = opened(name)[tuple(slice(*part) for part in block.bounds)].read().result()
        except Exception as error:  # tensorstore raises various types for a file that it cannot read
            problem = f"cannot be read ({str(error).splitlines()[0][:300]})"
        else:
            if progress is not None:
                progress(data.nbytes)
            if digest(data) == block.digest:
                return ""
            problem = "does not agree with its digest"
        return f"{name}{block} {problem}, written by rank {block.rank}"

    blocks = list(blocks)
    with ThreadPoolExecutor(THREADS) as threads:
        problems = threads.map(lambda named: check(*named), blocks)
        return {named: problem for named, problem in zip(blocks, problems, strict=True) if problem}


def _open(state: Path, name: str) -> ts.TensorStore:
    place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}, "path": f"{_key(name)}/"}
    return ts.open({"driver": "zarr", "kvstore": place}, open=True, read=True, context=ts.Context()).result()


def _key(name: str) -> str:
    """The name of an array in the database."""
    return name.replace("/", ".")


class ByteRange(NamedTuple):
    """Bytes of a file, by its path below the database."""

    file: str
    start: int
    stop: int

    @classmethod
    def parse(cls, location: str) -> Self:
        """Parse "value:FOLDER:FILE:OFFSET:BYTES", FOLDER that of a rank's own database."""
        _, folder, file, offset, size = location.split(":")
        return cls(folder + file, int(offset), int(offset) + int(size))


class Index:
    """The places of the values of a database. Small ones are in its nodes. The manifest of its folder `state` must be
    there; `fetch` is called with the place of each node before it is read."""

    def __init__(self, state: Path, fetch: Callable[[ByteRange], None]) -> None:
        self._places: dict[str, ByteRange] = {}
        self._inline: dict[str, bytes] = {}
        base = ts.KvStore.open({"driver": "file", "path": f"{state}/"}).result()

        def visit(location: str, prefix: str) -> None:
            fetch(ByteRange.parse(location))
            node: Any = ts.ocdbt.dump(base, location).result()
            for entry in node["entries"]:
                if "location" in entry:
                    visit(entry["location"], prefix + bytes(entry.get("subtree_common_prefix", b"")).decode())
                elif "indirect_value" in entry:
                    self._places[prefix + bytes(entry["key"]).decode()] = ByteRange.parse(entry["indirect_value"])
                else:
                    self._inline[prefix + bytes(entry["key"]).decode()] = bytes(entry["inline_value"])

        manifest: Any = ts.ocdbt.dump(base).result()
        if root := manifest["versions"][-1]["root"].get("location"):
            visit(root, "")

    def places(self, name: str, bounds: Bounds) -> list[ByteRange]:
        """The values of an array that a block of it needs; Orbax cuts blocks above 2 GiB."""
        chunk = json.loads(self._inline[f"{_key(name)}/.zarray"])["chunks"]
        spans = [range(low // size, -(-high // size)) for (low, high), size in zip(bounds, chunk, strict=True)]
        keys = (f"{_key(name)}/{'.'.join(map(str, index)) or 0}" for index in itertools.product(*spans))
        return [self._places[key] for key in keys if key in self._places]


METRICS_OF_STORES = "/tensorstore/kvstore/"
"""What Orbax asks for, twice in a save, to log how many bytes were written."""


@cache
def avoid_leaks() -> None:
    """Let tensorstore answer this process, from now on, without JSON what Orbax asks in every save.

    The specification of a plain folder is made from its path. The metrics of stores are empty, for all who ask.
    A tensorstore that has these functions no more is left as it is.
    """
    with suppress(AttributeError, TypeError):
        specification: Any = ts.KvStore.Spec
        to_json = specification.to_json

        def of_path(spec: Any, *args: Any, **options: Any) -> Any:
            with suppress(Exception):  # another kind of store has no path, or one that is no path of files
                plain = {"driver": "file", "path": spec.path}
                if not (args or options) and specification(plain) == spec:
                    return plain
            return to_json(spec, *args, **options)

        specification.to_json = of_path
    with suppress(AttributeError):
        metrics = ts.experimental_collect_matching_metrics

        def of_others(metric_prefix: str = "", *args: Any, **options: Any) -> Any:
            return [] if metric_prefix == METRICS_OF_STORES else metrics(metric_prefix, *args, **options)

        ts.experimental_collect_matching_metrics = of_others


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
    """Verdicts on each step: its files and the arrays in them. One that its run deletes meanwhile has none."""
    for step in steps:
        checkpoint = folder / str(step)
        problems = check_checkpoint(checkpoint, step, progress)
        if problems and not checkpoint.exists():
            continue
        yield _verdict(f"step {step}", "damaged" if problems else "complete", problems, checkpoint)


def set_aside(folder: Path) -> Iterator[Verdict]:
    """The checkpoints in a folder that were set aside."""
    for name in list_damaged(folder):
        yield _verdict(name, "renamed", [], folder / name)


def size_of(paths: list[Path]) -> int:
    """The bytes of some files, and of those in some folders."""
    return sum(size for path in paths for size in _sizes(path))


def _sizes(path: Path) -> list[int]:
    """The bytes of a file, or of those in a folder, from which others may be deleted meanwhile."""
    sizes: list[int] = []
    for file in files_below(path) if path.is_dir() else [path]:
        with suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return sizes


def _verdict(name: str, state: Any, problems: list[str], path: Path) -> Verdict:
    sizes = _sizes(path)
    return Verdict(name=name, state=state, problems=tuple(problems), files=len(sizes), bytes=sum(sizes))


def is_export(path: Path) -> bool:
    """Whether a folder, or a file, holds weights for other programs."""
    return bool(_weights_in(path)) or (path / TABLE).is_file()


def _weights_in(path: Path) -> list[Path]:
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    return [path for path in paths if path.suffix in (".msgpack", ".safetensors") and path.is_file()]


def verify_export(path: Path, progress: CountBytes) -> Iterator[Verdict]:
    """Verdicts on an export: one for all with its table, or where there is none, one for each file of weights."""
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
