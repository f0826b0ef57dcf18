"""Reading chunks of shards: from memory, from the cache of the host, or from the store, in ranges, in parallel.

A chunk is verified whenever it enters memory, from the store as from the cache: tokens with the checksums of the shard,
a part of a table with its digest in the index. What a batch is copied from is memory, so it is verified too.

Separate threads fetch the chunks that a reader waits for: they are free if those that fetch ahead wait for the store.
"""

import logging
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import xxhash

from roxxel_dist.data.files.format import checksum
from roxxel_dist.data.files.shard import DamagedData
from roxxel_dist.data.remote.cache import ChunkCache
from roxxel_dist.data.remote.index import TABLE_BYTES, digests
from roxxel_dist.data.remote.shard import Chunk, Place, RemoteShard, damage_of
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError
from roxxel_dist.objects.store import ObjectStore

THREADS = 32
REQUEST_BYTES = 1 << 19
"""Bytes that are fetched by one request, at most."""
GAP_BYTES = 1 << 15
"""Chunks with at most so much between them are fetched together: it costs as much as a request, at 50 ms and 20 MB/s
among 32."""
MEMORY_BYTES = 1 << 28
"""Bytes of chunks of a data set that a process keeps in memory: twice what `ahead` fetches, so that a step seldom reads
files. Each of them would let other threads take the interpreter's lock several times."""
COPY_BYTES = 1 << 26
"""Bytes of windows that are copied at a time."""
POLL_S = 0.01
INDEX_BITS = 40
CACHE_SHARE = 8
"""Fetch ahead at most 1 / this part of the cache."""

T = TypeVar("T")

log: logging.Logger = logging.getLogger(__name__)


class _Pool:
    """Daemon threads, for which the end of the process does not wait."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name, self._threads = name, 0
        weakref.finalize(self, _end, self._jobs).atexit = False

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # the waiting reader must get any error
                done.set_exception(error)

        self._jobs.put(job)
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()
        return done


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise the thread would keep it and its objects alive until the next job


def _end(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    for _ in range(THREADS):
        jobs.put(None)


class _Memory:
    """The chunks that were used last. Thread-safe."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[Place, Chunk] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, place: Place) -> Chunk | None:
        with self._lock:
            if (chunk := self._chunks.get(place)) is not None:
                self._chunks.move_to_end(place)
            return chunk

    def put(self, place: Place, chunk: Chunk) -> None:
        with self._lock:
            if (before := self._chunks.pop(place, None)) is not None:
                self._size -= before.data.nbytes
            self._chunks[place] = chunk
            self._size += chunk.data.nbytes
            while self._size > MEMORY_BYTES and len(self._chunks) > 1:
                self._size -= self._chunks.popitem(last=False)[1].data.nbytes


class Fetcher:
    """Reads the chunks of the shards of one data set. Thread-safe."""

    def __init__(self, store: ObjectStore, cache: ChunkCache) -> None:
        self.store: ObjectStore = store
        self.cache: ChunkCache = cache
        self.shards: Sequence[RemoteShard] = ()
        self.waits: int = 0
        """How often a reader has waited for chunks that were neither in memory nor in the cache."""
        self._memory = _Memory()
        self._urgent, self._ahead = _Pool("roxxel-fetch"), _Pool("roxxel-fetch-ahead")
        self._has_warned = False

    def serve(self, shards: Sequence[RemoteShard]) -> None:
        """Read these shards from now on; their places are in this order."""
        self.shards = shards
        # A name for an object and its chunks: those of another version of it are other chunks.
        of = [(s.path, s.entry.etag, s.entry.size, s.chunks.size, s.chunks.numbers) for s in shards]
        self._keys = [xxhash.xxh3_64_hexdigest(" ".join(map(str, parts)).encode()) for parts in of]
        self._sizes = np.array([shard.chunks.size for shard in shards], np.int64)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that may be fetched ahead: without a cache what is fetched stays in memory."""
        return MEMORY_BYTES // 2 if self.cache.is_paused else self.cache.capacity // CACHE_SHARE

    # -- reading

    def copy(self, numbers: np.ndarray, starts: np.ndarray, rows: np.ndarray) -> None:
        """Copy bytes of the tokens of shards into `rows`, uint8 [R, bytes].

        `numbers` are the shards of the rows, `starts` their first bytes from the shard's first token, int64 [R] each.
        Raises DamagedData: a block that is read is damaged in the bucket, or the object was replaced. StoreError: the
        store fails after all retries.
        """
        count, length = rows.shape
        at_once = max(1, COPY_BYTES // max(1, length))
        for low in range(0, count, at_once):
            part = slice(low, low + at_once)
            self._copy(numbers[part], starts[part], rows[part])

    def _copy(self, numbers: np.ndarray, starts: np.ndarray, rows: np.ndarray) -> None:
        length = rows.shape[1]
        chunks = self.take(self.places(numbers, starts, length))
        is_damaged = any(chunk.damaged for chunk in chunks.values())
        for row, number, start in zip(rows, numbers.tolist(), starts.tolist(), strict=True):
            size, stop, done = self.shards[number].chunks.size, start + length, 0
            for index in range(start // size, (stop - 1) // size + 1):
                chunk = chunks[number, index]
                low, high = max(start - index * size, 0), min(stop - index * size, size)
                if is_damaged:
                    self._refuse(number, index, chunk, low, high)
                row[done : done + high - low] = chunk.data[low:high]
                done += high - low

    def _refuse(self, number: int, index: int, chunk: Chunk, low: int, high: int) -> None:
        """Raise for a damaged block in the bytes `low` to `high` of a chunk of tokens."""
        shard = self.shards[number]
        size, first = shard.layout.block_size, shard.chunks.blocks(index)[0]
        for block in chunk.damaged:
            at = (block - first) * size
            if at < high and low < at + size:
                raise damage_of(shard, index, [block])

    def places(self, numbers: np.ndarray, starts: np.ndarray, length: int) -> list[Place]:
        """The chunks of tokens that have the `length` bytes from `starts` on of shards, int64 [R] each."""
        sizes = self._sizes[numbers]
        low, high = starts // sizes, (starts + length - 1) // sizes
        counts = high - low + 1
        before = np.cumsum(counts) - counts
        index = np.arange(int(counts.sum())) + np.repeat(low - before, counts)
        keys = np.unique((np.repeat(numbers, counts) << INDEX_BITS) | index)
        return list(zip((keys >> INDEX_BITS).tolist(), (keys & ((1 << INDEX_BITS) - 1)).tolist(), strict=True))

    def take(self, places: Iterable[Place], *, urgent: bool = True) -> dict[Place, Chunk]:
        """Chunks by their places, damaged ones too; raises as `copy` if a damaged table leaves them unverified."""
        found: dict[Place, Chunk] = {}
        missing: list[Place] = []
        for place in places:
            if (chunk := self._memory.get(place)) is not None:
                found[place] = chunk
            else:
                missing.append(place)
        if not missing:
            return found
        tables, absent = self._tables(missing, urgent=urgent), list[Place]()
        for place in missing:
            if (chunk := self._from_cache(place, tables)) is not None:
                found[place] = chunk
            else:
                absent.append(place)
        self.waits += bool(absent) and urgent
        return found | self._fetch(absent, tables, urgent=urgent, wait=True)

    def fetch(self, places: Iterable[Place]) -> None:
        """Bring chunks into the cache; those that another process of the host fetches are left to it.

        Raises as `copy`, but not for damage in the chunks themselves.
        """
        absent = [p for p in places if self._memory.get(p) is None and not self.cache.touch(self._name(p))]
        self._fetch(absent, self._tables(absent, urgent=False), urgent=False, wait=False)

    def _tables(self, places: Sequence[Place], *, urgent: bool) -> dict[Place, Chunk]:
        """The parts of the tables of checksums for some chunks of tokens."""
        wanted: dict[Place, None] = {}
        for number, index in places:
            chunks = self.shards[number].chunks
            if index < chunks.tokens:
                wanted |= dict.fromkeys((number, part) for part in chunks.sums_of(index))
        tables = self.take(wanted, urgent=urgent) if wanted else {}
        for (number, index), chunk in tables.items():
            if chunk.damaged:
                raise damage_of(self.shards[number], index, chunk.damaged)
        return tables

    def _from_cache(self, place: Place, tables: Mapping[Place, Chunk]) -> Chunk | None:
        """A chunk in the cache of the host, if it is there and undamaged."""
        shard, (low, high) = self.shards[place[0]], self.shards[place[0]].chunks.span(place[1])
        data = self.cache.read(self._name(place), high - low)
        if data is None:
            return None
        chunk = self._verified(place, np.frombuffer(data, np.uint8), tables)
        if chunk.damaged:
            self.cache.drop(self._name(place))
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s: bytes %d to %d were damaged in the cache of this host, after a power failure or by its disk: "
                    "they are fetched again, as all others that are (not logged). Where it comes again, replace the "
                    "disk of cache_dir %s",
                    shard.path,
                    low,
                    high,
                    self.cache.folder,
                )
            return None
        self._memory.put(place, chunk)
        return chunk

    def _name(self, place: Place) -> str:
        return f"{self._keys[place[0]]}-{place[1]}"

    # -- verifying

    def _expected(self, place: Place, tables: Mapping[Place, Chunk]) -> np.ndarray:
        """uint64: the checksums of the blocks of a chunk, or the digest of a chunk of a table."""
        number, index = place
        shard = self.shards[number]
        if table := shard.chunks.table(index):
            is_sums = table[0] == shard.chunks.first_sum
            known = shard.entry.sums if is_sums else shard.entry.ends
            if known is None:  # without an index the table is one chunk
                return np.array([shard.layout.sums_checksum if is_sums else shard.layout.ends_checksum], np.uint64)
            return known[index - table[0] : index - table[0] + 1]
        first, stop = shard.chunks.blocks(index)
        parts = [tables[number, part].data for part in shard.chunks.sums_of(index)]
        sums = (parts[0] if len(parts) == 1 else np.concatenate(parts)).view("<u8")
        begin = first // shard.chunks.numbers * shard.chunks.numbers
        return sums[first - begin : stop - begin]

    def _verified(self, place: Place, data: np.ndarray, tables: Mapping[Place, Chunk]) -> Chunk:
        """A chunk with these bytes, and its damaged blocks."""
        chunks, expected = self.shards[place[0]].chunks, self._expected(place, tables)
        if chunks.table(place[1]):
            return Chunk(data, () if checksum(data.data) == int(expected[0]) else (place[1],))
        wrong = np.flatnonzero(digests(data.data, chunks.layout.block_size) != expected)
        return Chunk(data, (wrong + chunks.blocks(place[1])[0]).tolist())

    # -- fetching

    def _fetch(
        self, places: Sequence[Place], tables: Mapping[Place, Chunk], *, urgent: bool, wait: bool
    ) -> dict[Place, Chunk]:
        """Fetch chunks in parallel; `wait` for those that others are fetching, or leave them out."""
        pool, result = self._urgent if urgent else self._ahead, dict[Place, Chunk]()
        jobs = [pool.submit(partial(self._fetch_run, run, tables, wait=wait)) for run in self._runs(places)]
        for job in jobs:
            result |= job.result()
        return result

    def _runs(self, places: Sequence[Place]) -> list[list[Place]]:
        """Chunks that are fetched by one request each: near ones, with those between."""
        runs: list[list[Place]] = []
        for number, index in sorted(places):
            chunks, last = self.shards[number].chunks, runs[-1][-1] if runs else (-1, -1)
            size = TABLE_BYTES if chunks.table(index) else chunks.size
            is_near = last[0] == number and chunks.table(last[1]) == chunks.table(index)
            is_near = is_near and (index - last[1] - 1) * size <= GAP_BYTES
            if is_near and not chunks.table(index):  # the checksums of those between must be known too
                is_near = chunks.sums_of(index)[0] - chunks.sums_of(last[1])[-1] <= 1
            if is_near and (index - runs[-1][0][1]) * size < REQUEST_BYTES:
                runs[-1] += [(number, between) for between in range(last[1] + 1, index + 1)]
            else:
                runs.append([(number, index)])
        return runs

    def _fetch_run(self, places: Sequence[Place], tables: Mapping[Place, Chunk], *, wait: bool) -> dict[Place, Chunk]:
        """The chunks of a run, fetched or found in the cache, where others may have brought them meanwhile."""
        result: dict[Place, Chunk] = {}
        while True:
            claimed = {place for place in places if place not in result and self.cache.claim(self._name(place))}
            try:
                for place in claimed:
                    if (chunk := self._from_cache(place, tables)) is not None:
                        result[place] = chunk
                for run in _neighbours(claimed - result.keys()):
                    for place, chunk in self._read(run, tables).items():
                        result[place] = chunk
                        self._memory.put(place, chunk)
                        if not chunk.damaged and self.cache.write(self._name(place), chunk.data.data):
                            claimed.discard(place)
            finally:
                for place in claimed:
                    self.cache.release(self._name(place))
            if not wait or len(result) >= len(places):
                return result
            time.sleep(POLL_S)

    def _read(self, places: Sequence[Place], tables: Mapping[Place, Chunk]) -> dict[Place, Chunk]:
        """Neighbouring chunks from the store; damaged ones are read a second time first."""
        shard = self.shards[places[0][0]]
        spans = [shard.chunks.span(index) for _, index in places]
        low, high = spans[0][0], spans[-1][1]
        result: dict[Place, Chunk] = {}
        for _ in range(2):
            try:
                data = self.store.read_range(shard.entry.name, low, high, etag=shard.entry.etag)
            except (StorePreconditionError, StoreNotFoundError) as error:
                what = "is gone from" if isinstance(error, StoreNotFoundError) else "was replaced in"
                raise DamagedData(
                    f"{shard.path} {what} the bucket after its data set was opened or its index was written: put it "
                    f"back, or write the index again (`roxxel-dist data index`) and start again"
                ) from error
            for place, (start, stop) in zip(places, spans, strict=True):
                piece = np.frombuffer(data[start - low : stop - low], np.uint8)
                result[place] = self._verified(place, piece, tables)
            if not any(chunk.damaged for chunk in result.values()):
                break
        return result


def _neighbours(places: Iterable[Place]) -> list[list[Place]]:
    """Chunks without any between them, which are in the cache or which others fetch: none is fetched twice."""
    runs: list[list[Place]] = []
    for number, index in sorted(places):
        if runs and runs[-1][-1] == (number, index - 1):
            runs[-1].append((number, index))
        else:
            runs.append([(number, index)])
    return runs
