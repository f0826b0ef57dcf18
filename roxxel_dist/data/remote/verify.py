"""Verification of shards in an object store: all bytes are read from the store, none from the cache."""

from collections.abc import Iterator, Sequence

import numpy as np

from roxxel_dist.data.files.discovery import NoShardsError
from roxxel_dist.data.files.format import HEADER_BYTES, ShardLayout, block_count, chain_of, checksum, npy_header
from roxxel_dist.data.files.shard import check_ends, describe_damage
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, ShardEntry, digests, unpack
from roxxel_dist.data.remote.open import find_shards
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars

PIECE_BYTES = 1 << 24
REQUEST_BYTES = 1 << 20


def verify_objects(url: str, progress: ProgressBars, config: RemoteConfig | None = None) -> tuple[list[str], str]:
    """(a line for each damaged shard, a summary line) for the shards at an address.

    Raises:
        NoShardsError: there are none.
        StoreError: the store fails.
    """
    timeout_s = (config or RemoteConfig()).store_timeout
    try:
        store, entries = find_shards(ObjectUrl.parse(url), timeout_s)
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
    if store.read_range(entry.name, 0, HEADER_BYTES, etag=entry.etag) != npy_header(
        layout.dtype, layout.metadata.tokens
    ):
        raise UserError(f"{where}: the .npy header is damaged: it does not agree with the footer. {cure}")
    tables = b"".join(_read(store, entry, layout.ends_offset, layout.meta_offset))
    sums = np.frombuffer(tables, "<u8", blocks, layout.sums_offset - layout.ends_offset)
    ends = np.frombuffer(tables, "<i8", layout.metadata.documents)
    if checksum(sums.data) != layout.sums_checksum:
        raise UserError(f"{where}: the table of checksums is damaged. {cure}")
    if checksum(ends.data) != layout.ends_checksum:
        raise UserError(f"{where}: the document ends are damaged. {cure}")
    check_ends(where, ends, layout.metadata.tokens)
    yield HEADER_BYTES + len(tables)
    damaged: list[int] = []
    step = max(1, PIECE_BYTES // layout.block_size)
    for first in range(0, blocks, step):
        stop = min(first + step, blocks)
        low, high = first * layout.block_size, min(stop * layout.block_size, size)
        data = b"".join(_read(store, entry, HEADER_BYTES + low, HEADER_BYTES + high))
        damaged += (first + np.flatnonzero(digests(data, layout.block_size) != sums[first:stop])).tolist()
        yield len(data)
    if damaged:
        what = describe_damage(where, layout, ends, damaged)
        raise UserError(f"{what}; {len(damaged)} of {blocks} blocks are. {cure}")
    between = HEADER_BYTES + size
    if between < layout.ends_offset and any(store.read_range(entry.name, between, layout.ends_offset)):
        raise UserError(f"{where}: the bytes between tokens and document ends are not zero. {cure}")


def _read(store: ObjectStore, entry: ShardEntry, start: int, stop: int) -> list[bytes]:
    spans = [(at, min(at + REQUEST_BYTES, stop)) for at in range(start, stop, REQUEST_BYTES)]
    return store.read_ranges(entry.name, spans, etag=entry.etag)


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
