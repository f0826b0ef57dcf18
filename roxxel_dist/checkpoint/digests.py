"""Digests of arrays and files, which prove a checkpoint or an export intact. No jax.

`digests.json`, the table of a checkpoint, has the digest of every block of an array as it was on the device, and of
every file but those that hold the blocks, of which it has the size; the rank that wrote each; its step; and, at its
end, its own digest. A block is compared after it is read: bytes of its file that no block uses prove nothing.
Decision 17.
"""

import contextlib
import functools
import gc
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heapreplace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from roxxel_dist.checkpoint.metadata import DAMAGED, META, TABLE, MetaFile
from roxxel_dist.process.durable import FORMAT, FormatError, check_format, write_file
from roxxel_dist.process.exit_codes import UserError

STATE = "state"
"""The folder of the arrays in a checkpoint."""
LENGTH = 32
"""Hexadecimal digits of a digest."""
CHUNK = 1 << 20
"""Bytes of a file that are read at once: they stay in the processor's cache until they are hashed."""
THREADS = 4
SEALED, SEAL = b"\x84", b"\xa6digest\xd9\x20"
"""The first byte of a sealed file of msgpack, a map of four, and the bytes before its digest: a key, a text of 32."""
Item = TypeVar("Item", str, tuple)
CountBytes = Callable[[int], None]
"""Takes how many bytes more have been read."""
Bounds = tuple[tuple[int, int], ...]
"""Where a block of an array begins and ends, in each dimension."""


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """The index of a shard as numbers."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def digest(data: Any) -> str:
    """The xxh3-128 of a buffer, or of an array's elements in C order, as 32 hexadecimal digits. Raises BufferError for
    any other object."""
    if isinstance(data, np.ndarray):  # bfloat16 offers no buffer of its own
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(data)


def containment(places: Iterable[Bounds]) -> Callable[[Bounds], bool]:
    """Whether bounds lie within one of these places; places that make a grid, as shards do, are looked up."""
    exact = {*places}
    starts = [sorted({low for low, _ in edges}) for edges in zip(*exact, strict=True)]
    by_start = {tuple(low for low, _ in place): place for place in exact}
    is_grid = len(by_start) == len(exact) == math.prod(map(len, starts))

    def is_inside(bounds: Bounds) -> bool:
        if bounds in exact:
            return True
        near = exact
        if is_grid:
            pairs = zip(starts, bounds, strict=True)
            near = [by_start[tuple(lows[max(bisect_right(lows, a) - 1, 0)] for lows, (a, _) in pairs)]]
        return any(_lies_within(bounds, place) for place in near)

    return is_inside


def _lies_within(bounds: Bounds, place: Bounds) -> bool:
    return all(low <= a and b <= high for (a, b), (low, high) in zip(bounds, place, strict=True))


class BlockDigest(NamedTuple):
    """A block of an array as it left the device."""

    bounds: Bounds
    digest: str
    rank: int
    """The rank that wrote it."""

    def lies_within(self, bounds: Bounds) -> bool:
        """Whether all of it is between these."""
        return _lies_within(self.bounds, bounds)

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"


class FileDigest(NamedTuple):
    """A file as it was written."""

    size: int
    digest: str
    """Empty for a file of arrays: the digests of their blocks prove what is read from it."""
    rank: int = 0

    @classmethod
    def of_file(cls, path: Path, rank: int = 0, *, hashed: bool = True) -> Self:
        """A file as it is; if not `hashed`, its size alone. Raises OSError."""
        return cls(path.stat().st_size, _hash_file(path) if hashed else "", rank)


def _hash_file(path: Path, progress: CountBytes | None = None) -> str:
    """The digest of a file. Raises OSError. Read, not mapped: a file that is cut meanwhile would end the process."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            if progress is not None:
                progress(count)
    return state.hexdigest()


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector would look at a million new tuples again and again: it takes three quarters of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class DigestTable:
    """The contents of a checkpoint, file by file and block by block; of an export, only its files. Each rank writes a
    table of its part, and rank 0 the one of all parts."""

    step: int
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """By path below the folder; `meta.json` and the table are not among them."""
    blocks: Mapping[str, tuple[BlockDigest, ...]] = field(default_factory=dict)
    """By the name of the array."""
    meta: tuple[str, ...] = ()
    """Digests that `meta.json` may have: two while a run goes back to the checkpoint and rewrites the file."""

    def write(self, path: Path) -> None:
        """Write the table in one instant. Raises OSError."""
        write_file(path, self.to_json())

    def to_json(self) -> str:
        """The table as it is written."""
        blocks = {name: [[*block] for block in blocks] for name, blocks in self.blocks.items()}
        text = json.dumps(
            {"format": FORMAT, "step": self.step, "meta": self.meta, "files": self.files, "blocks": blocks}
        )
        return f'{text[:-1]}, "digest": "{digest(text.encode())}"}}'

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError where there is none, ValueError where it is damaged, and FormatError for another format."""
        data, ending = path.read_bytes(), b', "digest": "%s"}'
        begin = len(data) - len(ending) + 2 - LENGTH
        body = data[:begin] + b"}"
        if data[begin:] != ending % digest(body).encode():
            raise UserError(f"{path.name} does not agree with its own digest")
        with _without_collections():
            saved = json.loads(body)
            check_format(saved, path)
            known: dict[Bounds, Bounds] = {}  # arrays of one shape have the same ones
            blocks: dict[str, tuple[BlockDigest, ...]] = {}
            for name, entries in saved["blocks"].items():
                mine = [(tuple(map(tuple, bounds)), text, rank) for bounds, text, rank in entries]
                blocks[name] = tuple(BlockDigest(known.setdefault(at, at), text, rank) for at, text, rank in mine)
        files = {name: FileDigest(*entry) for name, entry in saved["files"].items()}
        return cls(step=saved["step"], files=files, blocks=blocks, meta=tuple(saved["meta"]))

    def fingerprint(self, prefix: str) -> str:
        """The digest of the blocks whose arrays' names begin with `prefix`: by it weights are known again."""
        mine = {name: blocks for name, blocks in sorted(self.blocks.items()) if name.startswith(prefix)}
        content = [[name, sorted((block.bounds, block.digest) for block in blocks)] for name, blocks in mine.items()]
        return digest(json.dumps(content).encode())

    def all_blocks(self) -> list[tuple[str, BlockDigest]]:
        """The blocks of all arrays, each with the name of its array."""
        return [(name, block) for name, blocks in self.blocks.items() for block in blocks]

    def check_files(
        self, folder: Path, part: int = 0, parts: int = 1, *, progress: CountBytes | None = None
    ) -> list[str]:
        """The problems of the `part`-th of `parts` shares of the files, all of about one size; raises nothing."""
        mine = shares({file: saved.size if saved.digest else 0 for file, saved in self.files.items()}, parts)[part]
        return list(self.wrong_files(folder, mine, progress).values())

    def wrong_files(self, folder: Path, names: Iterable[str], progress: CountBytes | None = None) -> dict[str, str]:
        """The problems of some of the files, by name, without those that agree. See `check_files`."""

        def check(file: str) -> str:
            saved = self.files[file]
            by = f", written by rank {saved.rank}"
            try:
                size = (folder / file).stat().st_size
                if size != saved.size:
                    return f"{file} has {size:,} bytes instead of {saved.size:,}{by}"
                if saved.digest and _hash_file(folder / file, progress) != saved.digest:
                    return f"{file} does not agree with its digest{by}"
            except OSError as error:
                return f"{file} {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}{by}"
            return ""

        names = list(names)
        with ThreadPoolExecutor(THREADS) as threads:
            return {file: problem for file, problem in zip(names, threads.map(check, names), strict=True) if problem}

    def check_array(self, name: str, parts: Mapping[Bounds, Callable[[], np.ndarray]]) -> list[str]:
        """The problems of parts of an array, by their bounds, as far as whole blocks lie within them."""
        blocks, problems = self.blocks.get(name, ()), list[str]()
        whole = parts.keys() & {block.bounds for block in blocks}
        others = dict.fromkeys(bounds for bounds in parts if bounds not in whole)
        is_inside, read = containment(others), functools.cache(lambda bounds: parts[bounds]())
        for block in blocks:
            around = [block.bounds] if block.bounds in whole else []
            if not around and is_inside(block.bounds):
                around = [bounds for bounds in others if block.lies_within(bounds)]
            for bounds in around:
                data = parts[bounds]() if bounds in whole else read(bounds)
                inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(block.bounds, bounds, strict=True))
                if digest(np.asarray(data[inner])) != block.digest:
                    problems.append(f"{name}{block} does not agree with its digest, written by rank {block.rank}")
        return problems


def shares(work: Mapping[Item, int], parts: int) -> list[list[Item]]:
    """Items by their work, in so many shares: the largest first, each to the share that has the least."""
    lists: list[list[Item]] = [[] for _ in range(parts)]
    sizes = [(0, part) for part in range(parts)]  # a heap
    for item in sorted(work, key=lambda item: (-work[item], item)):
        size, least = sizes[0]
        heapreplace(sizes, (size + work[item], least))
        lists[least].append(item)
    return lists


def merge(parts: Iterable[DigestTable], **own: Any) -> DigestTable:
    """The table of all ranks' parts; `own` replaces fields of it."""
    files: dict[str, FileDigest] = {}
    blocks: dict[str, tuple[BlockDigest, ...]] = {}
    for part in parts:
        files |= part.files
        for name, theirs in part.blocks.items():
            blocks[name] = blocks.get(name, ()) + theirs
    return DigestTable(files=files, blocks=blocks, **own)


def problems_text(problems: Sequence[str]) -> str:
    """The first three problems of many, in a line."""
    return "; ".join([*problems[:3], *([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])])


def seal(data: bytes) -> bytes:
    """A file of msgpack whose last value is a digest, with the digest of all before that."""
    return b"".join([memoryview(data)[:-LENGTH], digest(memoryview(data)[:-LENGTH]).encode()])


def is_sealed(data: bytes) -> bool | None:
    """Whether a file that was sealed is as it was; None of one that was not."""
    if data[:1] != SEALED and data[-len(SEAL) - LENGTH : -LENGTH] != SEAL:
        return None
    return data[-len(SEAL) - LENGTH :] == SEAL + digest(memoryview(data)[:-LENGTH]).encode()


def list_damaged(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder that were set aside."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if DAMAGED in name and name.partition(DAMAGED)[0].isdecimal())


def files_below(folder: Path) -> list[Path]:
    """The files in a folder and in those in it."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def read_verified(checkpoint: Path, step: int) -> tuple[MetaFile, DigestTable]:
    """`meta.json` and the table of a checkpoint, once they agree. Raises ValueError where one of them is missing,
    damaged or of another step, FormatError for another format."""
    name = META
    try:
        text = (checkpoint / META).read_bytes()
        name = TABLE
        table = DigestTable.read(checkpoint / TABLE)
        name = META
        if table.step != step:
            raise UserError(f"{TABLE} is of step {table.step}")
        if digest(text) not in table.meta:
            raise UserError(f"{META} does not agree with its digest")
        return MetaFile.from_json(text, checkpoint / META), table
    except FormatError:
        raise
    except FileNotFoundError:
        raise UserError(f"{name} is missing, written by rank 0") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)
        raise UserError(f"{name} cannot be read ({why}), written by rank 0") from error
    except ValueError as error:
        raise UserError(f"{error}, written by rank 0") from error
