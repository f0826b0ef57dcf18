"""Digests of arrays and files: what a checkpoint, or an export, proves itself by. No jax.

`digests.json`, the table of a checkpoint, has the digest of every file in it and of every block of an array as it was
on the device; who wrote each; its step; and, at its end, its own digest.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.train.checkpoint.metadata import META, MetaFile

TABLE = "digests.json"
VERSION = 1
LENGTH = 32
"""Hexadecimal digits of a digest."""
CHUNK = 1 << 20
"""Bytes of a file that are read at once: they stay in the processor's cache until they are hashed."""
THREADS = 4
Bounds = tuple[tuple[int, int], ...]
"""Where a block of an array begins and ends, in each dimension."""


def digest(data: Any) -> str:
    """The xxh3-128 of a buffer, or of an array's elements in C order, as 32 hexadecimal digits.

    Raises BufferError for what is neither.
    """
    if isinstance(data, np.ndarray):  # bfloat16 offers no buffer of its own
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return xxhash.xxh3_128_hexdigest(data)


class FileDigest(NamedTuple):
    """A file as it was written."""

    size: int
    digest: str
    rank: int = 0

    @classmethod
    def of(cls, path: Path, rank: int = 0, progress: Callable[[int], None] | None = None) -> Self:
        """Read, not mapped: a file that is cut meanwhile would end the process. Raises OSError."""
        size, state, buffer = 0, xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])
                size += count
                if progress is not None:
                    progress(count)
        return cls(size, state.hexdigest(), rank)


class BlockDigest(NamedTuple):
    """A block of an array as it left the device."""

    bounds: Bounds
    digest: str
    rank: int

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"


@dataclass(frozen=True, kw_only=True)
class DigestTable:
    """What a checkpoint is, file by file and block by block; of an export, the files alone.

    Each rank writes a table of its part, and rank 0 the one of all parts.
    """

    step: int
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    """By path below the folder; `meta.json` and the table are not among them."""
    blocks: Mapping[str, tuple[BlockDigest, ...]] = field(default_factory=dict)
    """By the name of the array."""
    meta: tuple[str, ...] = ()
    """Digests that `meta.json` may have: two while a run goes back to the checkpoint, and writes it anew."""

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
            raise ValueError(f"{path.name} does not agree with its own digest")
        saved = json.loads(body)
        if saved["version"] != VERSION:
            raise ValueError(f"{path.name} is of version {saved['version']}, which this program cannot read")
        blocks = {
            name: tuple(BlockDigest(tuple((a, b) for a, b in bounds), text, rank) for bounds, text, rank in blocks)
            for name, blocks in saved["blocks"].items()
        }
        files = {name: FileDigest(*entry) for name, entry in saved["files"].items()}
        return cls(step=saved["step"], files=files, blocks=blocks, meta=tuple(saved["meta"]))

    def fingerprint(self, prefix: str) -> str:
        """The digest of the blocks whose arrays' names begin with `prefix`: by it weights are known again."""
        mine = {name: blocks for name, blocks in sorted(self.blocks.items()) if name.startswith(prefix)}
        content = [[name, sorted((bounds, text) for bounds, text, _ in blocks)] for name, blocks in mine.items()]
        return digest(json.dumps(content).encode())

    def check_files(
        self, folder: Path, part: int = 0, parts: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[str]:
        """What is wrong with the `part`-th of `parts` shares of the files, all of about one size; raises nothing."""

        def check(name: str) -> str:
            saved = self.files[name]
            try:
                now = FileDigest.of(folder / name, saved.rank, progress)
            except OSError as error:
                return f"{name} {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}"
            if now.size != saved.size:
                return f"{name} has {now.size:,} bytes instead of {saved.size:,}"
            return "" if now == saved else f"{name} does not agree with its digest"

        with ThreadPoolExecutor(THREADS) as threads:
            mine = self._share(part, parts)
            return [
                f"{problem}, written by rank {self.files[name].rank}"
                for name, problem in zip(mine, threads.map(check, mine), strict=True)
                if problem
            ]

    def _share(self, part: int, parts: int) -> list[str]:
        """The largest files first, each to the share that has the least."""
        sizes, shares = [0] * parts, [[] for _ in range(parts)]
        for name in sorted(self.files, key=lambda name: (-self.files[name].size, name)):
            least = sizes.index(min(sizes))
            sizes[least] += self.files[name].size
            shares[least].append(name)
        return shares[part]

    def check_array(self, name: str, bounds: Bounds, data: Callable[[], np.ndarray]) -> list[str]:
        """What is wrong with the elements of an array within `bounds`, as far as whole blocks lie within them."""
        problems, here = [], None
        for block in self.blocks.get(name, ()):
            if not all(low <= a and b <= high for (a, b), (low, high) in zip(block.bounds, bounds, strict=True)):
                continue
            here = data() if here is None else here
            inner = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(block.bounds, bounds, strict=True))
            if digest(np.asarray(here[inner])) != block.digest:
                problems.append(f"{name}{block} does not agree with its digest, written by rank {block.rank}")
        return problems


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


def check_checkpoint(checkpoint: Path, step: int, progress: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint; nothing of one without digests that can be read."""
    try:
        _, table = read_verified(checkpoint, step)
    except ValueError as error:
        return [str(error)]
    return [] if table is None else table.check_files(checkpoint, progress=progress)


def files_below(folder: Path) -> list[Path]:
    """Every file in a folder and in those in it."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def read_verified(checkpoint: Path, step: int) -> tuple[MetaFile, DigestTable | None]:
    """`meta.json` and the table of a checkpoint, once they agree; no table of one that an earlier version has saved.

    Raises ValueError where one of them is missing, damaged or of another step.
    """
    name = META
    try:
        text = (checkpoint / META).read_bytes()
        name = TABLE
        table = DigestTable.read(checkpoint / TABLE) if (checkpoint / TABLE).exists() else None
        name = META
        if table is None:
            saved = MetaFile.from_json(text)
            if not saved.has_digests:
                return saved, None
            name = TABLE
            raise FileNotFoundError
        if table.step != step:
            raise ValueError(f"{TABLE} is of step {table.step}")
        if digest(text) not in table.meta:
            raise ValueError(f"{META} does not agree with its digest")
        return MetaFile.from_json(text), table
    except FileNotFoundError:
        raise ValueError(f"{name} is missing, written by rank 0") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} cannot be read ({error!r}), written by rank 0") from error
    except ValueError as error:
        raise ValueError(f"{error}, written by rank 0") from error
