"""Open the shards at the address of a data set in an object store, without reading tokens."""

import fnmatch
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from roxxel_dist.data.files.discovery import BUILD_FILE, DataPath, NoShardsError, names_objects
from roxxel_dist.data.files.reader import WindowReader
from roxxel_dist.data.remote.cache import ChunkCache
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.fetch import Fetcher
from roxxel_dist.data.remote.index import INDEX, ShardEntry, check_build, is_shard, read_ends, unpack
from roxxel_dist.data.remote.shard import RemoteShard
from roxxel_dist.objects.errors import StoreDeniedError, StoreNotFoundError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.durable import cache_folder
from roxxel_dist.process.exit_codes import UserError

MAGIC_CHARACTERS = re.compile(r"[*?\[]")


def open_shards(path: DataPath, config: RemoteConfig) -> list[RemoteShard]:
    """The shards at an address: all of a prefix, one `.rox`, a pattern or a prefix of names in the last part.

    With an index beside the shards, which is cached, this takes one or two requests; otherwise one for each shard.
    Raises ValueError: the address names several places, a shard or the index is damaged, or the cache cannot be used.
    NoShardsError: there are no shards. StoreError: the store fails.
    """
    if not isinstance(path, (str, os.PathLike)) or not names_objects(path):
        raise UserError(f"{path}: data in an object store is one address, not a list: name a prefix or a pattern")
    url = ObjectUrl.parse(path)
    folder = Path(os.path.abspath(os.path.expanduser(config.cache_dir))) if config.cache_dir else cache_folder()
    cache = ChunkCache(folder, int(config.cache_gb * 1e9))
    store, entries = find_shards(url, config.store_timeout, cache)
    if not entries:
        raise NoShardsError(
            f"{url}: no .rox object there. Check the address, or build a data set there: `roxxel-dist data build TEXT "
            f"--out {url}`"
        )
    return _opened(store, entries, Fetcher(store, cache))


def _opened(store: ObjectStore, entries: Sequence[ShardEntry], fetcher: Fetcher) -> list[RemoteShard]:
    layouts = [entry.layout(store.url.join(entry.name)) for entry in entries]
    # By index in the data set, which may differ from the order of names.
    order = sorted(range(len(entries)), key=lambda number: layouts[number].metadata.index)
    entries = [entries[number] for number in order]
    shards = [
        RemoteShard.of_entry(store.url.join(entry.name), entry, layouts[order[number]], number, fetcher)
        for number, entry in enumerate(entries)
    ]
    fetcher.serve(shards)
    return shards


def find_shards(
    url: ObjectUrl, timeout_s: float, cache: ChunkCache | None = None
) -> tuple[ObjectStore, list[ShardEntry]]:
    """(the store of their folder, the entries of the shards) for an address. Without a `cache` the index is not
    read."""
    is_one = url.key.endswith(".rox") or MAGIC_CHARACTERS.search(url.name) is not None
    if not is_one:
        store = ObjectStore.open(url, timeout_s=timeout_s)
        if entries := _entries(store, cache):
            return store, entries
    if not url.key:
        return ObjectStore.open(url, timeout_s=timeout_s), []
    store = ObjectStore.open(url.parent, timeout_s=timeout_s)
    known, name = {entry.name: entry for entry in _entries(store, cache, url.name)}, url.name
    exact = re.compile(re.escape(name) + r"_\d{5,}\.rox")
    pattern = name if is_one else f"{name}*.rox"
    chosen = [file for file in known if not is_one and exact.fullmatch(file)]
    chosen = chosen or [file for file in known if file == name] or fnmatch.filter(known, pattern)
    return store, [known[file] for file in chosen]


def _entries(store: ObjectStore, cache: ChunkCache | None, pattern: str | None = None) -> list[ShardEntry]:
    """The shards directly below a prefix, from its index or else a listing; only those that may match `pattern`."""
    if cache is not None:
        with suppress(StoreNotFoundError):
            return _read_index(store, cache)
    begin = MAGIC_CHARACTERS.split(pattern)[0] if pattern else ""
    objects = store.list()
    entries = read_ends(store, [info for info in objects if is_shard(info.key) and info.key.startswith(begin)])
    if pattern is None:
        check_build(store, objects, entries)
    return entries


def _read_index(store: ObjectStore, cache: ChunkCache) -> list[ShardEntry]:
    """The index of a data set. It is cached under its ETag once it was checked, for the other processes of the host.
    Raises StoreNotFoundError if there is none, UserError if it was written before all shards were there."""
    where, info = store.url.join(INDEX), store.head(INDEX)
    kept = cache.index_file(f"whole {where} {info.etag} {info.size}")
    with suppress(OSError, ValueError):
        entries = unpack(where, kept.read_bytes())
        os.utime(kept)
        return entries
    data = store.read(INDEX, etag=info.etag)
    try:
        entries = unpack(where, data)
    except ValueError:  # read damaged data a second time
        data = store.read(INDEX, etag=info.etag)
        entries = unpack(where, data)
    with suppress(StoreNotFoundError, StoreDeniedError):
        # One that is newer than the index is of shards that are on their way, and of which no index tells yet.
        if (build := store.head(BUILD_FILE)).modified <= info.modified:
            try:
                check_build(store, [build], entries)
            except UserError as error:
                raise UserError(f"{error}, and write its index again: `roxxel-dist data index {store.url}`") from error
    cache.write_index(kept, data)
    return entries


def read_beside(shard: RemoteShard, name: str) -> bytes | None:
    """A small object beside a shard, such as the tokenizer; None if there is none."""
    try:
        return shard.fetcher.store.read(name)
    except StoreNotFoundError:
        return None


class RemoteReader(WindowReader):
    """Copies windows out of chunks, which are fetched when they are read or before. `first_tokens` are the numbers of
    the shards' first tokens in the data set, int64 [shards]."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        dtype: np.dtype,
        name: object,
        fetcher: Fetcher,
        first_tokens: np.ndarray,
    ) -> None:
        super().__init__([first for first, _ in ranges], [length for _, length in ranges], dtype, name)
        self._fetcher, self._first_tokens = fetcher, first_tokens

    def read(self, offsets: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
        """The windows of `length` tokens from `offsets` on, int64 [R]: a fresh array [R, length] of `dtype`."""
        numbers = self.locate(offsets, length)
        rows = np.empty((len(offsets), length), self.dtype)
        starts = (offsets - self._first_tokens[numbers]) * self.dtype.itemsize
        self._fetcher.copy(numbers, starts, rows.view(np.uint8))
        return rows.astype(dtype, copy=False)

    def fetch(self, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Fetch the chunks of some windows into the cache, with `documents` also their document ends."""
        numbers = self.locate(offsets, length)
        starts, width = offsets - self._first_tokens[numbers], self.dtype.itemsize
        places = self._fetcher.places(numbers, starts * width, length * width)
        for number in np.unique(numbers).tolist() if documents else ():
            inside = starts[numbers == number]
            ends = self._fetcher.shards[number].end_chunks(inside, inside + length)
            places += [(number, chunk) for chunk in ends.tolist()]
        self._fetcher.fetch(places)
