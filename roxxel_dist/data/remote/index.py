"""The index object of a data set in an object store: the data to open every shard, in one object.

`shards.index` lies beside the shards: 8 bytes "ROXXELI1", the xxh3-64 of the rest (little-endian), and a map in
MessagePack, compressed by zlib. For each shard it has the name, the size, the ETag, the metadata and the footer, and a
digest for each 64 KiB of its checksum table and of its document ends, so that a part of a table can be verified alone.
For the document ends it also has the first number of each 64 KiB, and the cuts of `split` for usual shares.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import xxhash

from roxxel_dist.data.files.discovery import BUILD_FILE
from roxxel_dist.data.files.format import FOOTER, HEADER_BYTES, ShardLayout, checksum, npy_header, parse_end
from roxxel_dist.data.files.shard import check_ends
from roxxel_dist.data.files.slices import check_copied
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from roxxel_dist.objects.store import ObjectInfo, ObjectStore
from roxxel_dist.process.exit_codes import UserError

INDEX = "shards.index"
MAGIC = b"ROXXELI1"
HEAD = struct.Struct("<8sQ")
TABLE_BYTES = 1 << 16
"""Bytes of a table per digest."""
TABLE_NUMBERS = TABLE_BYTES // 8
END_BYTES = 1 << 13
"""Bytes of the first read at a shard's end: enough for the footer and the metadata."""
SHARES = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)
"""Values of `val_fraction` whose cut of every shard is in the index."""
REQUEST_BYTES = 1 << 20
REQUESTS = 32
"""Shards that are read in parallel."""


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """The data of a shard that is known without reading it."""

    name: str
    size: int
    etag: str
    end: bytes
    """The metadata and the footer: the last bytes of the file."""
    sums: np.ndarray | None = None
    """uint64: the xxh3-64 of each 64 KiB of the table of checksums; None without an index."""
    ends: np.ndarray | None = None
    """uint64: the same for the document ends."""
    firsts: np.ndarray | None = None
    """int64: the first number in each 64 KiB of the document ends."""
    cuts: tuple[tuple[int, int, int], ...] = ()
    """(token, document ends at or before it, the last of them or 0) for the cuts of usual shares."""

    def layout(self, where: object) -> ShardLayout:
        """The offsets of its parts. Raises ValueError, naming `where`, if the end is damaged."""
        return parse_end(where, self.size, self.end)


def write_index(store: ObjectStore) -> str:
    """Write the index of all shards (`*.rox`) directly below a store's prefix, and return its ETag.

    Tables are read and compared with the footers; tokens are not read. If the store has conditional puts, an index that
    another process has written meanwhile is not replaced. Raises ValueError: there is no shard, or one is damaged or
    incomplete. The message names the object. StoreError: the store fails; StorePreconditionError if another process has
    written an index meanwhile.
    """
    objects = store.list()
    before = next((info.etag for info in objects if info.key == INDEX), None)
    shards = [info for info in objects if is_shard(info.key)]
    if not shards:
        raise UserError(f"{store.url} has no shards (*.rox): nothing to write an index of. Check the address")
    with ThreadPoolExecutor(min(REQUESTS, len(shards), 8)) as pool:
        entries = list(pool.map(partial(_read_entry, store), shards))
    check_build(store, objects, entries)
    data = pack(entries)
    if not store.supports_conditions():
        return store.write(INDEX, data)
    return store.write(INDEX, data, if_match=before, if_absent=before is None)


def check_build(store: ObjectStore, objects: Iterable[ObjectInfo], entries: Sequence[ShardEntry]) -> None:
    """Raises ValueError where the `entries` of all shards below a prefix are not all that were built there."""
    if entries and any(info.key == BUILD_FILE for info in objects):
        shards = sorted((entry.layout(entry.name).metadata for entry in entries), key=lambda shard: shard.index)
        check_copied(store.url, store.read(BUILD_FILE), shards)


def is_shard(key: str) -> bool:
    """Whether a key, relative to the prefix of a data set, is that of a shard."""
    return key.endswith(".rox") and "/" not in key and not key.startswith(".")


def not_in_index(keys: Iterable[str]) -> list[str]:
    """The keys, relative to the prefix of a data set, that its index leaves out; not those that belong beside it."""
    beside = {INDEX, TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE}
    return sorted(key for key in keys if not is_shard(key) and key not in beside)


def read_ends(store: ObjectStore, shards: Sequence[ObjectInfo]) -> list[ShardEntry]:
    """The entries of some shards without an index: the end of each is read, in parallel."""
    with ThreadPoolExecutor(min(REQUESTS, max(1, len(shards)))) as pool:
        return list(pool.map(partial(_read_end, store), shards))


def _read_end(store: ObjectStore, info: ObjectInfo) -> ShardEntry:
    where = store.url.join(info.key)
    if info.size < HEADER_BYTES + FOOTER.size:
        parse_end(where, info.size, b"")  # raises
    end = store.read_range(info.key, max(0, info.size - END_BYTES), info.size, etag=info.etag)
    try:
        layout = parse_end(where, info.size, end)
    except ValueError:  # read damaged data a second time
        end = store.read_range(info.key, max(0, info.size - END_BYTES), info.size, etag=info.etag)
        layout = parse_end(where, info.size, end)
    return ShardEntry(name=info.key, size=info.size, etag=info.etag, end=end[layout.meta_offset - info.size :])


def _read_entry(store: ObjectStore, info: ObjectInfo) -> ShardEntry:
    """The entry of a shard, with digests."""
    where, entry = store.url.join(info.key), _read_end(store, info)
    layout = entry.layout(where)
    ends, sums = read_tables(store, entry, layout)
    return replace(
        entry,
        sums=digests(sums.data.cast("B")),
        ends=digests(ends.data.cast("B")),
        firsts=ends[::TABLE_NUMBERS].copy(),
        cuts=tuple(dict.fromkeys(cut_of(ends, layout.metadata.tokens, share) for share in SHARES)),
    )


def read_tables(store: ObjectStore, entry: ShardEntry, layout: ShardLayout) -> tuple[np.ndarray, np.ndarray]:
    """The document ends (int64) and the checksums (uint64) of a shard, compared with its footer, and so its header.
    Raises ValueError, naming the object, for damage."""
    where, cure = store.url.join(entry.name), "Copy the object again from its source"
    header = store.read_range(entry.name, 0, HEADER_BYTES, etag=entry.etag)
    if header != npy_header(layout.dtype, layout.metadata.tokens):
        raise UserError(f"{where}: the .npy header is damaged: it does not agree with the footer. {cure}")
    tables = read_bytes(store, entry, layout.ends_offset, layout.meta_offset)
    ends = np.frombuffer(tables, "<i8", layout.metadata.documents)
    sums = np.frombuffer(tables, "<u8", offset=8 * len(ends)) if tables[8 * len(ends) :] else np.empty(0, "<u8")
    if checksum(sums.data) != layout.sums_checksum:
        raise UserError(f"{where}: the table of checksums is damaged. {cure}")
    if checksum(ends.data) != layout.ends_checksum:
        raise UserError(f"{where}: the document ends are damaged. {cure}")
    check_ends(where, ends, layout.metadata.tokens)
    return ends, sums


def read_bytes(store: ObjectStore, entry: ShardEntry, start: int, stop: int) -> bytes:
    """The bytes `start` to `stop` of a shard, in parallel requests of `REQUEST_BYTES`."""
    spans = [(at, min(at + REQUEST_BYTES, stop)) for at in range(start, stop, REQUEST_BYTES)]
    return b"".join(store.read_ranges(entry.name, spans, etag=entry.etag))


def cut_of(ends: np.ndarray, tokens: int, share: float) -> tuple[int, int, int]:
    """(token, document ends at or before it, the last of them or 0) of the cut that holds out `share` of a shard."""
    target = tokens - int(tokens * share)
    number = int(ends.searchsorted(target, side="right"))
    return target, number, int(ends[number - 1]) if number else 0


def digests(data: bytes | memoryview, size: int = TABLE_BYTES) -> np.ndarray:
    """uint64: the xxh3-64 of each `size` bytes."""
    view: Any = memoryview(data)
    return np.array([xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, len(data), size)], np.uint64)


COLUMNS = {"sums": "<u8", "ends": "<u8", "firsts": "<i8"}


def pack(entries: Sequence[ShardEntry]) -> bytes:
    """The bytes of the index object of these shards, which all have digests."""
    shards = [vars(entry) | {name: getattr(entry, name).tobytes() for name in COLUMNS} for entry in entries]
    body = zlib.compress(msgpack.packb({"shards": shards}) or b"", 1)
    return HEAD.pack(MAGIC, checksum(body)) + body


def unpack(where: object, data: bytes) -> list[ShardEntry]:
    """The shards in the bytes of an index object. Raises ValueError, naming `where`, if it is damaged."""
    cure = "write it again: `roxxel-dist data index` with the address of its data set"
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise UserError(f"{where} is no index of shards: {cure}")
    if checksum(data[HEAD.size :]) != HEAD.unpack_from(data)[1]:
        raise UserError(f"{where} is damaged (its checksum is wrong): {cure}")
    shards: list[dict[str, Any]] = msgpack.unpackb(zlib.decompress(data[HEAD.size :]))["shards"]
    for shard in shards:
        shard |= {name: np.frombuffer(shard[name], kind) for name, kind in COLUMNS.items()}
        shard["cuts"] = tuple(map(tuple, shard["cuts"]))
    return [ShardEntry(**shard) for shard in shards]
