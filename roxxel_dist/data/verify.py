"""Verification of data against its checksums: all at once, also in an object store, or block by block on first read."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import NoShardsError
from roxxel_dist.data.files.foreign import GIVE_THE_DTYPE, ForeignFile, sample_starts
from roxxel_dist.data.files.format import (
    HEADER_BYTES,
    MOST_WORKERS,
    ShardLayout,
    block_count,
    chain_of,
    check_range,
)
from roxxel_dist.data.files.shard import DEFAULT_BLOCK_SIZE, DamagedData, Shard, describe_damage
from roxxel_dist.data.files.slices import TokenFile
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, ShardEntry, digests, read_bytes, read_tables, unpack
from roxxel_dist.data.remote.open import find_shards
from roxxel_dist.data.remote.shard import RemoteShard
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars

WORTH_A_PROCESS = 1 << 32
"""Bytes of tokens that justify another process: half a second of work, about the start-up time of a process."""
BLOCKS_AT_ONCE = 256
"""Blocks that are hashed without a pause: 0.2 ms, during which other Python threads wait."""
PAUSE_S = 50e-6


def find_damage(shards: Sequence[TokenFile], progress: ProgressBars, workers: int | None = None) -> Iterator[str]:
    """The damage in shards: one message for each damaged shard, which names the block and the document. `workers` are
    processes; None: one per core, or only this process for little data."""
    size = sum(shard.tokens.nbytes for shard in shards)
    if workers is not None:
        check_range("workers", workers, MOST_WORKERS, "processes")
    workers = workers or max(1, min(len(os.sched_getaffinity(0)), size // WORTH_A_PROCESS))
    damaged: dict[Shard, list[int]] = {}
    for shard in shards:
        try:
            if isinstance(shard, Shard):
                shard.verify_tables()
                damaged[shard] = []
            else:
                shard.verify()  # a file of another system has no checksums
        except ValueError as error:
            yield str(error)
    pieces = [(shard, blocks) for shard in damaged for blocks in shard.pieces()]
    # Spawn: a fork of a process with threads may hang. With one worker, this process reads its existing maps.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) if workers > 1 else nullcontext()
    with progress.bar("verify", max(1, len(pieces))) as advance, pool as processes:
        if processes is None:
            checked = (shard.damaged_blocks(blocks) for shard, blocks in pieces)
        else:
            checked = processes.map(_check, [shard.path for shard, _ in pieces], [blocks for _, blocks in pieces])
        for (shard, _), blocks in zip(pieces, checked, strict=True):
            damaged[shard] += blocks
            advance(1)
    for shard, blocks in damaged.items():
        try:
            shard.refuse(blocks)
        except ValueError as error:
            yield str(error)


def _check(path: Path, blocks: np.ndarray) -> list[int]:
    return _open(path).damaged_blocks(blocks)


@lru_cache(maxsize=1)
def _open(path: Path) -> Shard:
    return Shard.open(path)


def check_sampled_ids(data: Roxxel, vocab_size: int) -> None:
    """Compare ids of files without a vocabulary size with `vocab_size`: 18 blocks of 4 KiB of each local file.

    The other blocks are compared when they are read (`VerifiedBlocks`). Raises ValueError: an id is not below
    `vocab_size`, or the vocabulary cannot be in the dtype that was guessed.
    """
    guessed = data.guessed_dtype
    if guessed is not None and vocab_size > np.iinfo(guessed).max + 1:
        raise UserError(
            f"{data.shards[0].path}: without a header its tokens are read as {guessed}, which has no ids of a "
            f"vocabulary of {vocab_size}: give another: {GIVE_THE_DTYPE.format('uint32')}; or {guessed} itself"
        )
    for file in data.shards:
        if file.metadata.vocab_size is not None or file.dtype.kind not in "iu" or isinstance(file, RemoteShard):
            continue
        length = DEFAULT_BLOCK_SIZE // file.dtype.itemsize
        for start in sample_starts(len(file.tokens), length):
            ids = file.read(start, min(start + length, len(file.tokens)))
            if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
                wrong = int(np.argmax((ids >= vocab_size) | (ids < 0)))
                cure = "use a larger vocab_size, or the tokenizer of the model"
                if ids[wrong] < 0:
                    cure = "no id is negative, so they were saved in too small a type: save them in uint16 or uint32"
                if isinstance(file, ForeignFile) and file.is_headerless:
                    other = "uint16" if file.dtype.itemsize > 2 else "uint32"
                    cure += f"; or give another dtype than {file.dtype}: {GIVE_THE_DTYPE.format(other)}"
                raise UserError(
                    f"{file.path}: token {start + wrong} is the id {ids[wrong]}, and the vocabulary has the ids 0 to "
                    f"{vocab_size - 1}: {cure}"
                )


@dataclass(eq=False)
class _File:
    """The state of one file."""

    file: TokenFile
    block_size: int
    verified: np.ndarray
    """bool [blocks]"""
    table_verified: bool = False
    ends_verified: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class VerifiedBlocks:
    """The verified blocks of the open files: each block is checked once, on first use. Files of other systems have no
    checksums; only their ids are checked: they are below `vocab_size`, by default that of the data. Thread-safe."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._files: dict[object, _File] = {}

    def verify(self, data: Roxxel, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Verify the blocks of some windows, given as in `Roxxel.read`, and with `documents` the document ends too.

        Raises DamagedData: a checksum or an id is wrong. The message names the file, the block and its documents.
        """
        data.fetch(offsets, length, documents=documents)
        firsts, shards = data.first_tokens, data.shards
        numbers = np.searchsorted(firsts, offsets, side="right") - 1
        for number in np.unique(numbers).tolist():
            known = self._of(shards[number])
            with known.lock:
                self._verify(known, offsets[numbers == number] - firsts[number], length, documents)

    def _of(self, file: TokenFile) -> _File:
        known = self._files.get(file.path)
        if known is None or known.file.metadata.chain != file.metadata.chain:
            size = file.layout.block_size if isinstance(file, Shard) else DEFAULT_BLOCK_SIZE
            known = _File(file, size, np.zeros(-(-file.tokens.nbytes // size), bool))
            self._files[file.path] = known
        return known

    def _verify(self, known: _File, starts: np.ndarray, length: int, documents: bool) -> None:
        """The same for one file; `starts` are counted from its first token."""
        file = known.file
        if isinstance(file, Shard):
            if not known.table_verified:
                file.verify_checksums()
                known.table_verified = True
            if documents and not known.ends_verified:
                file.verify_document_ends()
                known.ends_verified = True
        low = starts * file.dtype.itemsize // known.block_size
        high = ((starts + length) * file.dtype.itemsize - 1) // known.block_size
        touched = low[:, None] + np.arange(int((high - low).max()) + 1)
        touched = np.unique(np.minimum(touched, high[:, None]))
        new = touched[~known.verified[touched]]
        for first in range(0, len(new), BLOCKS_AT_ONCE):
            part = new[first : first + BLOCKS_AT_ONCE]
            if isinstance(file, Shard) and (damaged := file.damaged_blocks(part)):
                raise DamagedData(
                    f"{file.damage(damaged)}: it does not agree with its checksum. `roxxel-dist data verify "
                    f"{file.path.parent}` lists the damaged blocks. Put the file back or build the data again, and "
                    "resume. With verify_data off the run trains on the damaged data"
                )
            self._compare_ids(known, part)
            known.verified[part] = True
            if first + BLOCKS_AT_ONCE < len(new):
                time.sleep(PAUSE_S)

    def _compare_ids(self, known: _File, blocks: np.ndarray) -> None:
        file, declared = known.file, known.file.metadata.vocab_size
        size = min((size for size in (self._vocab_size, declared) if size is not None), default=None)
        if size is None or file.dtype.kind not in "iu":
            return
        if file.dtype.kind == "u" and np.iinfo(file.dtype).max < size:
            return
        width, block = file.dtype.itemsize, known.block_size
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
            low = int(run[0]) * block // width
            ids = file.read(low, min(-(-(int(run[-1]) + 1) * block // width), len(file.tokens)))
            if ids.max() >= size or ids.min() < 0:
                wrong = low + int(np.argmax((ids >= size) | (ids < 0)))
                document = int(file.document_ends.searchsorted(wrong, side="right"))
                raise DamagedData(
                    f"{file.path}: token {wrong} (document {document}) is the id {ids[wrong - low]}, and the "
                    f"vocabulary has the ids 0 to {size - 1}. Use the tokenizer that the model was made with and build "
                    "the data again, or a larger vocab_size"
                )


PIECE_BYTES = 1 << 24


def verify_objects(url: str, progress: ProgressBars) -> tuple[list[str], str]:
    """(a line for each damaged shard, a summary line) for the shards at an address. Raises NoShardsError: there are
    none. StoreError: the store fails."""
    try:
        store, entries = find_shards(ObjectUrl.parse(url), RemoteConfig().store_timeout)
    except NoShardsError:
        raise
    except ValueError as error:  # a damaged footer
        return [str(error)], ""
    if not entries:
        raise NoShardsError(f"{url}: no .rox object there. Check the address")
    lines, chains = [], ""
    layouts = {entry.name: entry.layout(store.url.join(entry.name)) for entry in entries}
    entries = sorted(entries, key=lambda entry: layouts[entry.name].metadata.index)
    with progress.bar("verify", sum(entry.size for entry in entries)) as advance:
        for number, entry in enumerate(entries):
            layout, where = layouts[entry.name], store.url.join(entry.name)
            chain = chain_of(chains, layout.metadata, layout.dtype, layout.ends_checksum, layout.sums_checksum)
            if layout.metadata.index == number and chain != layout.metadata.chain:
                lines.append(f"{where} was not written after the shard before it: two data sets are mixed there")
            chains = layout.metadata.chain
            try:
                for done in _verify(store, entry, layout, where):
                    advance(done)
            except (ValueError, StorePreconditionError) as error:
                lines.append(str(error))
    lines += _compare_index(store, entries)
    tokens = sum(layout.metadata.tokens for layout in layouts.values())
    return lines, f"{len(entries)} shards, {tokens:,} tokens: complete"


def _verify(store: ObjectStore, entry: ShardEntry, layout: ShardLayout, where: ObjectUrl) -> Iterator[int]:
    """Verify one shard; yields the number of bytes read. Raises ValueError for damage."""
    cure, size = "Copy the object again from its source", layout.metadata.tokens * layout.dtype.itemsize
    blocks = block_count(size, layout.block_size)
    ends, sums = read_tables(store, entry, layout)
    yield HEADER_BYTES + ends.nbytes + sums.nbytes
    damaged: list[int] = []
    step = max(1, PIECE_BYTES // layout.block_size)
    for first in range(0, blocks, step):
        stop = min(first + step, blocks)
        low, high = first * layout.block_size, min(stop * layout.block_size, size)
        data = read_bytes(store, entry, HEADER_BYTES + low, HEADER_BYTES + high)
        damaged += (first + np.flatnonzero(digests(data, layout.block_size) != sums[first:stop])).tolist()
        yield len(data)
    if damaged:
        what = describe_damage(where, layout, ends, damaged)
        raise UserError(f"{what}; {len(damaged)} of {blocks} blocks are. {cure}")
    between = HEADER_BYTES + size
    if between < layout.ends_offset and any(store.read_range(entry.name, between, layout.ends_offset)):
        raise UserError(f"{where}: the bytes between tokens and document ends are not zero. {cure}")


def _compare_index(store: ObjectStore, entries: Sequence[ShardEntry]) -> list[str]:
    """The errors in the index beside some shards, if there is one."""
    where = store.url.join(INDEX)
    try:
        known = {entry.name: entry for entry in unpack(where, store.read(INDEX))}
    except StoreNotFoundError:
        return []
    except ValueError as error:
        return [str(error)]
    cure = "write it again: `roxxel-dist data index` with the address of its data set"
    return [
        f"{where} does not agree with {entry.name}: {cure}"
        for entry in entries
        if (other := known.get(entry.name)) is None
        or (other.etag, other.size, other.end) != (entry.etag, entry.size, entry.end)
    ]
