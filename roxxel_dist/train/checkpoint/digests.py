"""Digests of arrays and files, which prove a checkpoint or an export intact. No jax.

`digests.json`, the table of a checkpoint, has the digest of every file in it and of every block of an array as it was
on the device; the rank that wrote each; its step; and, at its end, its own digest.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.train.checkpoint.metadata import DAMAGED, META, TABLE, MetaFile

VERSION = 1
LENGTH = 32
"""Hexadecimal digits of a digest."""
CHUNK = 1 << 20
"""Bytes of a file that are read at once: they stay in the processor's cache until they are hashed."""
THREADS = 4
SEALED, SEAL = b"\x84", b"\xa6digest\xd9\x20"
"""The first byte of a sealed file of msgpack, a map of four, and the bytes before its digest: a key, a text of 32."""
Progress = Callable[[int], None]
"""Takes how many bytes more have been read."""
Bounds = tuple[tuple[int, int], ...]
"""Where a block of an array begins and ends, in each dimension."""


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """The index of a shard as numbers."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def digest(data: Any) -> str:
    """The xxh3-128 of a buffer, or of an array's elements in C order, as 32 hexadecimal digits.

    Raises BufferError for any other object.
    """
    if isinstance(data, np.ndarray):  # bfloat16 offers no buffer of its own
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(data)


class BlockDigest(NamedTuple):
    """A block of an array as it left the device, and where its bytes are."""

    bounds: Bounds
    digest: str
    rank: int
    """The rank that wrote it."""
    file: str = ""
    """The path of the file that its bytes are in, as they were in memory; empty where they are in none, or not so."""
    offset: int = 0
    size: int = 0

    def lies_within(self, bounds: Bounds) -> bool:
        """Whether all of it is between these."""
        return all(low <= a and b <= high for (a, b), (low, high) in zip(self.bounds, bounds, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"


class FileDigest(NamedTuple):
    """A file as it was written."""

    size: int
    digest: str
    """Of what lies outside of blocks."""
    rank: int = 0

    @classmethod
    def of(cls, path: Path, rank: int = 0, blocks: Iterable[BlockDigest] = ()) -> Self:
        """The blocks in it are not read: their digests stand for their bytes. Raises OSError."""
        blocks = list(blocks)
        outside, _ = _hash_file(path, blocks, frozenset(blocks))
        return cls(path.stat().st_size, outside, rank)


def _hash_file(
    path: Path, blocks: Iterable[BlockDigest], skipped: Set[BlockDigest], progress: Progress | None = None
) -> tuple[str, dict[BlockDigest, str]]:
    """(digest of the bytes outside of blocks, of each block but those `skipped`). Raises OSError.

    Read, not mapped: a file that is cut meanwhile would end the process.
    """
    outside, inside, buffer = xxhash.xxh3_128(), {}, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:

        def read(state: Any, until: int | None) -> None:
            while until is None or file.tell() < until:
                count = file.readinto(buffer if until is None else buffer[: until - file.tell()])
                if not count:
                    return
                state.update(buffer[:count])
                if progress is not None:
                    progress(count)

        for block in sorted(blocks, key=lambda block: block.offset):
            read(outside, block.offset)
            if block in skipped:
                file.seek(block.offset + block.size)
                continue
            state = xxhash.xxh3_128()
            read(state, block.offset + block.size)
            inside[block] = state.hexdigest()
        read(outside, None)
    return outside.hexdigest(), inside


@dataclass(frozen=True, kw_only=True)
class DigestTable:
    """The contents of a checkpoint, file by file and block by block; of an export, only its files.

    Each rank writes a table of its part, and rank 0 the one of all parts.
    """

    step: int
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """By path below the folder; `meta.json` and the table are not among them."""
    blocks: Mapping[str, tuple[BlockDigest, ...]] = field(default_factory=dict)
    """By the name of the array."""
    meta: tuple[str, ...] = ()
    """Digests that `meta.json` may have: two while a run goes back to the checkpoint and rewrites the file."""

    def write(self, path: Path) -> None:
        """In one instant. Raises OSError."""
        write_file(path, self.to_json())

    def to_json(self) -> str:
        """As it is written."""
        blocks = {name: [[*block] for block in blocks] for name, blocks in self.blocks.items()}
        text = json.dumps(
            {"version": VERSION, "step": self.step, "meta": self.meta, "files": self.files, "blocks": blocks}
        )
        return f'{text[:-1]}, "digest": "{digest(text.encode())}"}}'

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises OSError where there is none, and ValueError where it is damaged or of a later version."""
        data, ending = path.read_bytes(), b', "digest": "%s"}'
        begin = len(data) - len(ending) + 2 - LENGTH
        body = data[:begin] + b"}"
        if data[begin:] != ending % digest(body).encode():
            raise UserError(f"{path.name} does not agree with its own digest")
        saved = json.loads(body)
        if saved["version"] != VERSION:
            raise UserError(f"{path.name} is of version {saved['version']}, which this program cannot read")
        blocks = {
            name: tuple(BlockDigest(tuple((a, b) for a, b in bounds), *rest) for bounds, *rest in blocks)
            for name, blocks in saved["blocks"].items()
        }
        files = {name: FileDigest(*entry) for name, entry in saved["files"].items()}
        return cls(step=saved["step"], files=files, blocks=blocks, meta=tuple(saved["meta"]))

    def fingerprint(self, prefix: str) -> str:
        """The digest of the blocks whose arrays' names begin with `prefix`: by it weights are known again."""
        mine = {name: blocks for name, blocks in sorted(self.blocks.items()) if name.startswith(prefix)}
        content = [[name, sorted((block.bounds, block.digest) for block in blocks)] for name, blocks in mine.items()]
        return digest(json.dumps(content).encode())

    def check_files(
        self,
        folder: Path,
        part: int = 0,
        parts: int = 1,
        *,
        compared: Set[tuple[str, Bounds]] = frozenset(),
        progress: Progress | None = None,
    ) -> list[str]:
        """What is wrong with the `part`-th of `parts` shares of the files, all of about one size; raises nothing.

        Blocks that are `compared`, by name and bounds, when they are read from the files are not hashed here too.
        """
        inside = self._blocks_by_file()

        def work(file: str) -> int:
            skipped = (b.size for b, name in inside.get(file, {}).items() if (name, b.bounds) in compared)
            return self.files[file].size - sum(skipped)

        mine = _shares({file: work(file) for file in self.files}, parts)[part]
        wrong = self.wrong_files(folder, mine, compared=compared, progress=progress)
        return [problem for problems in wrong.values() for problem in problems]

    def wrong_files(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        compared: Set[tuple[str, Bounds]] = frozenset(),
        progress: Progress | None = None,
    ) -> dict[str, list[str]]:
        """What is wrong with some of the files, by name, without those that agree. See `check_files`."""
        inside = self._blocks_by_file()

        def check(file: str) -> list[str]:
            saved, blocks = self.files[file], inside.get(file, {})
            by = f", written by rank {saved.rank}"
            skipped = frozenset(block for block, name in blocks.items() if (name, block.bounds) in compared)
            try:
                size = (folder / file).stat().st_size
                if size != saved.size:
                    return [f"{file} has {size:,} bytes instead of {saved.size:,}{by}"]
                outside, hashed = _hash_file(folder / file, blocks, skipped, progress)
            except OSError as error:
                return [f"{file} {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}{by}"]
            wrong = [f"{blocks[block]}{block} in {file}" for block, text in hashed.items() if text != block.digest]
            wrong += [file] if outside != saved.digest else []
            return [f"{what} does not agree with its digest{by}" for what in wrong]

        names = list(names)
        with ThreadPoolExecutor(THREADS) as threads:
            return {file: problem for file, problem in zip(names, threads.map(check, names), strict=True) if problem}

    def blocks_in(self, file: str) -> list[tuple[str, BlockDigest]]:
        """The blocks that lie in a file, and the names of their arrays."""
        return [(name, block) for name, blocks in self.blocks.items() for block in blocks if block.file == file]

    def _blocks_by_file(self) -> dict[str, dict[BlockDigest, str]]:
        """The name of the array of each block that lies in a file."""
        inside: dict[str, dict[BlockDigest, str]] = {}
        for name, blocks in self.blocks.items():
            for block in blocks:
                if block.file:
                    inside.setdefault(block.file, {})[block] = name
        return inside

    def check_array(self, name: str, bounds: Bounds, data: Callable[[], np.ndarray]) -> list[str]:
        """What is wrong with the elements of an array within `bounds`, as far as whole blocks lie within them."""
        problems, here = [], None
        for block in self.blocks.get(name, ()):
            if not block.lies_within(bounds):
                continue
            here = data() if here is None else here
            inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(block.bounds, bounds, strict=True))
            if digest(np.asarray(here[inner])) != block.digest:
                where = f"{name}{block}" + (f" in {block.file}" if block.file else "")
                problems.append(f"{where} does not agree with its digest, written by rank {block.rank}")
        return problems


def _shares(work: Mapping[str, int], parts: int) -> list[list[str]]:
    """The largest first, each to the share that has the least."""
    sizes, shares = [0] * parts, [[] for _ in range(parts)]
    for name in sorted(work, key=lambda name: (-work[name], name)):
        least = sizes.index(min(sizes))
        sizes[least] += work[name]
        shares[least].append(name)
    return shares


def merge(parts: Iterable[DigestTable], **own: Any) -> DigestTable:
    """The table of all ranks' parts; `own` replaces fields of it."""
    files: dict[str, FileDigest] = {}
    blocks: dict[str, tuple[BlockDigest, ...]] = {}
    for part in parts:
        files |= part.files
        for name, theirs in part.blocks.items():
            blocks[name] = blocks.get(name, ()) + theirs
    return DigestTable(files=files, blocks=blocks, **own)


def in_words(problems: Sequence[str], limit: int = 3) -> str:
    """The first problems of many, in a line."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "; ".join([*problems[:limit], *more])


def check_checkpoint(checkpoint: Path, step: int, progress: Progress | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint."""
    try:
        _, table = read_verified(checkpoint, step)
    except ValueError as error:
        return [str(error)]
    return table.check_files(checkpoint, progress=progress)


def seal(data: bytes) -> bytes:
    """A file of msgpack whose last value is a digest, with the digest of all before that."""
    return b"".join([memoryview(data)[:-LENGTH], digest(memoryview(data)[:-LENGTH]).encode()])


def is_sealed(data: bytes) -> bool | None:
    """Whether a file that was sealed is as it was; None of one that was not."""
    if data[:1] != SEALED and data[-len(SEAL) - LENGTH : -LENGTH] != SEAL:
        return None
    return data[-len(SEAL) - LENGTH :] == SEAL + digest(memoryview(data)[:-LENGTH]).encode()


def damaged_ones(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder that were set aside."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if DAMAGED in name and name.partition(DAMAGED)[0].isdecimal())


def files_below(folder: Path) -> list[Path]:
    """Every file in a folder and in those in it."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def read_verified(checkpoint: Path, step: int) -> tuple[MetaFile, DigestTable]:
    """`meta.json` and the table of a checkpoint, once they agree.

    Raises ValueError where one of them is missing, damaged or of another step.
    """
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
        return MetaFile.from_json(text), table
    except FileNotFoundError:
        raise UserError(f"{name} is missing, written by rank 0") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)
        raise UserError(f"{name} cannot be read ({why}), written by rank 0") from error
    except ValueError as error:
        raise UserError(f"{error}, written by rank 0") from error
