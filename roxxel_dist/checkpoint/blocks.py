"""Blocks of a state, and the files in shared memory that hold them.

A block is what one or several devices hold of an array. Of a host's blocks each is kept once, by one of its ranks, in
a file: a preamble, the blocks, a header. The preamble is void while the file is written, and says last where the header
is; so a process that is killed at any moment leaves a whole file, or one that says that it is none.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from roxxel_dist.checkpoint.digests import Bounds, bounds_of, digest
from roxxel_dist.process.exit_codes import UserError

PREAMBLE = struct.Struct("<8sQQ32s")
"""`MAGIC`, where the header begins, its bytes, its digest."""
MAGIC = b"RXMEM001"
PAGE, ALIGNMENT = 4096, 64
HEADER_BYTES = 1 << 18
"""Room for a header beside what it says of each block."""


class ArrayBlock(NamedTuple):
    """A part of an array, equal on all devices that hold it."""

    leaf: int
    bounds: Bounds
    """First and end of each dimension."""
    nbytes: int
    ranks: frozenset[int]
    """Those that have it on a device."""


class BlockTable:
    """The blocks of a state, numbered alike on every rank.

    Args:
        state: a tree of arrays, or of their shapes with shardings; no random keys.
        hosts: by rank, the number of its host.
    """

    def __init__(self, state: Any, hosts: Sequence[int]) -> None:
        paths, _ = jax.tree_util.tree_flatten_with_path(state)
        self.blocks: list[ArrayBlock] = []
        self._number: dict[tuple[int, Bounds], int] = {}
        self._hosts = hosts
        names: list[Any] = []
        for leaf, (path, array) in enumerate(paths):
            ranks: dict[Bounds, set[int]] = {}
            for device, index in array.sharding.devices_indices_map(array.shape).items():
                ranks.setdefault(bounds_of(index, array.shape), set()).add(device.process_index)
            for part in sorted(ranks):
                self._number[leaf, part] = len(self.blocks)
                size = np.dtype(array.dtype).itemsize * int(np.prod([end - first for first, end in part]))
                self.blocks.append(ArrayBlock(leaf, part, size, frozenset(ranks[part])))
            names.append([jax.tree_util.keystr(path), array.shape, str(array.dtype), sorted(ranks)])
        self.identity: str = digest(json.dumps(names).encode())

    def number(self, leaf: int, part: Bounds) -> int:
        """The number of the block of a leaf, by its bounds."""
        return self._number[leaf, part]

    def kept_by(self, rank: int) -> list[int]:
        """The blocks that a rank keeps: dealt among those of its host that have them, the largest first."""
        load = {other: 0 for other, host in enumerate(self._hosts) if host == self._hosts[rank]}
        mine: list[int] = []
        for number, block in sorted(enumerate(self.blocks), key=lambda pair: -pair[1].nbytes):
            if holders := block.ranks & load.keys():
                owner = min(holders, key=lambda other: (load[other], other))
                load[owner] += block.nbytes
                if owner == rank:
                    mine.append(number)
        return mine

    def only_on(self, host: int) -> bool:
        """Whether a block is on this host alone: without it the state would be lost."""
        return any({self._hosts[rank] for rank in block.ranks} == {host} for block in self.blocks)

    def pieces(self, state: Any, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(leaf, which of this process's shards of it) of some blocks, in their order."""
        place: dict[int, tuple[int, int]] = {}
        for leaf, array in enumerate(jax.tree.leaves(state)):
            for piece, shard in enumerate(array.addressable_shards):
                place.setdefault(self.number(leaf, bounds_of(shard.index, array.shape)), (leaf, piece))
        return [place[number] for number in numbers]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a file of blocks: their places, and the generation that they belong to."""

    generation: str
    """Names the generation; of all files of a job, those with the same name are parts of one."""
    step: int
    run: str
    """Which run on which devices; see `generations.run_identity`."""
    table: str
    """`BlockTable.identity`."""
    total: int
    """Blocks of the whole state."""
    pending: int | None
    """The step whose checkpoint was being written to disk, if it must not be missing; else None."""
    rank: int
    """Whose blocks these are."""
    needs: Sequence[int]
    """The blocks on the devices of that rank; those not in this file are in those of other ranks of the host."""
    metadata: Mapping[str, Any]
    """`CheckpointMetadata.to_dict`."""
    blocks: Mapping[int, tuple[int, int, str]] = field(default_factory=dict)
    """By number: offset, bytes, digest."""

    def to_json(self) -> bytes:
        """The header as it is written."""
        return json.dumps({**vars(self), "blocks": [[n, *block] for n, block in self.blocks.items()]}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Header":
        """Raises ValueError, KeyError or TypeError for anything else."""
        values = json.loads(data)
        return cls(**values | {"blocks": {n: (offset, size, text) for n, offset, size, text in values["blocks"]}})


class DamagedFile(UserError):
    """A file of blocks does not agree with its digests."""


def read_header(path: Path) -> Header | None:
    """The header of a file; None where it is being written, or was when its writer was killed. Raises DamagedFile: the
    header does not agree with its digest. OSError: it cannot be read."""
    with path.open("rb") as file:
        data = file.read(PREAMBLE.size)
        if not any(data):
            return None
        try:
            magic, offset, length, text = PREAMBLE.unpack(data)
            if offset + length > os.fstat(file.fileno()).st_size:  # else there may be no memory to read so much
                raise DamagedFile("its header")
            file.seek(offset)
            header = file.read(length)
            if magic != MAGIC or digest(header).encode() != text:
                raise DamagedFile("its header")
            return Header.from_json(header)
        except (struct.error, ValueError, KeyError, TypeError, OverflowError, OSError) as error:
            raise DamagedFile("its header") from error


def read_blocks(path: Path, header: Header, numbers: Sequence[int] | None = None) -> dict[int, memoryview]:
    """Read some blocks of a file, or all, each compared with its digest; they are views of the file. Raises
    DamagedFile: one does not agree. OSError: the file cannot be read."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    blocks: dict[int, memoryview] = {}
    for number in header.blocks if numbers is None else numbers:
        offset, size, text = header.blocks[number]
        blocks[number] = data[offset : offset + size]
        if len(blocks[number]) != size or digest(blocks[number]) != text:
            raise DamagedFile(f"block {number}")
    return blocks


class BlockFile:
    """A file of blocks that this process writes, mapped. The memory is taken when it is made, and kept.

    It is made where it is missing, or has another size than blocks of these `sizes` in bytes take. Raises OSError:
    there is no room for it.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self.path = path
        offsets, self._header_at = layout(sizes)
        self.offsets: list[int] = offsets
        self._sizes = sizes
        size = self._header_at + header_room(len(sizes))
        if path.exists() and path.stat().st_size != size:
            path.unlink()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._file, 0, size)  # a mapped page that cannot be had would be a SIGBUS later
            self._map = mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        np.frombuffer(self._map, np.uint8)[::PAGE].max()  # maps the pages now, not in the training thread

    def invalidate(self) -> None:
        """Void the file: from here on it is no part of a generation."""
        self._map[: PREAMBLE.size] = bytes(PREAMBLE.size)

    def write(self, place: int, array: np.ndarray) -> None:
        """Copy the block at a place; the array has its bytes."""
        np.ndarray(array.shape, array.dtype, buffer=self._map, offset=self.offsets[place])[...] = array

    def finish(self, header: Header, numbers: Sequence[int]) -> int:
        """Make the file valid, with the digests of its blocks; returns how many of its bytes are in use. Raises OSError
        if there is no room for the header."""
        view = memoryview(self._map)
        places = zip(numbers, self.offsets, self._sizes, strict=True)
        blocks = {n: (offset, size, digest(view[offset : offset + size])) for n, offset, size in places}
        view.release()
        data = Header(**{**vars(header), "blocks": blocks}).to_json()
        if self._header_at + len(data) > len(self._map):
            os.posix_fallocate(self._file, self._header_at, len(data))
        os.pwrite(self._file, data, self._header_at)
        # Last, as one store of a few bytes: a process that reads the preamble also sees all earlier writes.
        self._map[: PREAMBLE.size] = PREAMBLE.pack(MAGIC, self._header_at, len(data), digest(data).encode())
        return self._header_at + len(data)

    def close(self) -> None:
        """Let go of it; the file stays."""
        os.close(self._file)
        self._map.close()


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """(where each block begins, where the header does)."""
    offsets, end = [], PAGE
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def header_room(blocks: int) -> int:
    """Bytes that are kept for a header of so many blocks."""
    return HEADER_BYTES + 80 * blocks
