"""Fetching missing cells of shards into the cache, in ranges, in parallel, each verified with its digest.

Separate threads fetch the cells that a reader waits for: they are free if those that fetch ahead wait for the store.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import TypeVar

import numpy as np

from roxxel_dist.data.format import checksum
from roxxel_dist.data.reader import view_memory
from roxxel_dist.data.remote.cache import BlockCache, CacheError
from roxxel_dist.data.remote.index import TABLE_NUMBERS, digests
from roxxel_dist.data.remote.shard import RemoteShard
from roxxel_dist.data.shard import DamagedData
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError
from roxxel_dist.objects.store import ObjectStore

T = TypeVar("T")
THREADS = 16
GAP_BYTES = 1 << 16
"""Ranges with at most this gap are joined: it costs as much as a request, at 50 ms and 20 MB/s among 16."""
REQUEST_BYTES = 1 << 20
ROUNDS = 100
"""Attempts to fetch and read cells that are evicted before the read."""


class _Run:
    """Cells of a shard that are being fetched, or are queued."""

    def __init__(self, number: int, first: int, stop: int) -> None:
        self.number, self.first, self.stop = number, first, stop
        self.begun = False
        self.done: Future[None] = Future()


class _Pool:
    """Daemon threads, for which the end of the process does not wait."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name, self._threads = name, 0
        weakref.finalize(self, _end, self._jobs).atexit = False

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._threads < THREADS:
            self._threads += 1
            threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True).start()


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise the thread would keep it and its objects alive until the next job


def _end(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    for _ in range(THREADS):
        jobs.put(None)


class Fetcher:
    """Fetches the cells of the shards of one data set. Thread-safe.

    Attributes:
        waits: how often a reader has waited for missing cells.
    """

    def __init__(self, store: ObjectStore, cache: BlockCache) -> None:
        self.store: ObjectStore = store
        self.cache: BlockCache = cache
        self.shards: Sequence[RemoteShard] = ()
        self.waits: int = 0
        self._lock = threading.Lock()
        self._pending: dict[int, list[_Run]] = {}
        self._urgent, self._ahead = _Pool("roxxel-fetch"), _Pool("roxxel-fetch-ahead")

    def serve(self, shards: Sequence[RemoteShard]) -> None:
        """Fetch for these shards from now on; their files are mapped in one range of addresses, in this order."""
        self.shards = shards
        addresses = [shard.present.__array_interface__["data"][0] for shard in shards]
        low, high = min(addresses), max(addresses[-1] + shards[-1].cells.count, max(addresses) + 1)
        self._present = view_memory(low, high - low, "|b1", shards)
        self._base = np.array(addresses, np.int64) - low
        self._is_mapped = np.zeros(len(shards), bool)
        self._blocks = np.array([shard.cells.blocks for shard in shards], np.int64)
        self._first_sum = np.array([shard.cells.first_sum for shard in shards], np.int64)
        self._block_size = np.array([shard.layout.block_size for shard in shards], np.int64)

    def fetch(self, numbers: np.ndarray, first: np.ndarray, stop: np.ndarray, *, urgent: bool) -> int:
        """Fetch the missing cells from `first` to `stop`, int64 [N] each, of the shards with these numbers.

        Returns the eviction count at which all of them were present. If not `urgent`, cells that are evicted meanwhile
        are not fetched again.

        Raises:
            DamagedData: the cells are damaged in a second try too, or the object has been replaced.
            StoreError: the store fails after all retries.
            CacheError: the cache is full, or too small.
        """
        self._map(numbers)
        counts = stop - first
        starts = np.cumsum(counts) - counts
        cells = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
        places = np.repeat(self._base[numbers], counts) + cells
        for _ in range(ROUNDS):
            evictions = self.cache.evictions
            missing = np.unique(places[~self._present[places]])
            if not len(missing):
                return evictions
            if urgent:
                self.waits += 1
                self._check_capacity(numbers, counts)
            damage: DamagedData | None = None
            for run in [self._begin(*run, urgent=urgent) for run in self._runs(missing)]:
                try:
                    run.done.result()
                except DamagedData as error:
                    damage = damage or error
            if damage is not None and not self._present[places].all():  # else the damage is in a gap
                raise damage
            if not urgent:
                return evictions
        raise self._too_small()

    def _map(self, numbers: np.ndarray) -> None:
        """Map the files of shards on their first read, because creating all of them at the start takes seconds."""
        if self._is_mapped[numbers].all():
            return
        with self._lock:
            for number in np.unique(numbers[~self._is_mapped[numbers]]).tolist():
                self.cache.map(self.shards[number].file, self.shards[number].memory)
                self._is_mapped[number] = True

    def read(self, numbers: np.ndarray, first: np.ndarray, stop: np.ndarray, copy: Callable[[], T]) -> T:
        """The result of `copy`, during which all these cells are present; raises as `fetch`."""
        for _ in range(ROUNDS):
            evictions = self.fetch(numbers, first, stop, urgent=True)
            result = copy()
            if self.cache.evictions == evictions:
                return result
        raise self._too_small()

    def forget(self, shard: RemoteShard, cells: Sequence[int]) -> None:
        """Remove cells that have changed in the cache."""
        for cell in cells:
            with self.cache.claim(shard.file, cell, 1) as claim:
                claim.forget(cell, 1)

    def cell_bytes(self, numbers: np.ndarray) -> np.ndarray:
        """Bytes of a block in the shards with these numbers."""
        return self._block_size[numbers]

    def _check_capacity(self, numbers: np.ndarray, counts: np.ndarray) -> None:
        if int((self._block_size[numbers] * counts).sum()) > self.cache.capacity:
            raise self._too_small()

    def _too_small(self) -> CacheError:
        return CacheError(
            f"cache_gb is {self.cache.capacity / 1e9:g}: blocks are evicted before they are read, a batch of each "
            f"process of the host, and what is fetched ahead for it, must have room. Use a larger cache_gb"
        )

    def _runs(self, missing: np.ndarray) -> list[tuple[int, int, int]]:
        """(shard, first cell, end) of the ranges to fetch, from the sorted places of missing cells."""
        numbers = self._base.searchsorted(missing, side="right") - 1
        cells = missing - self._base[numbers]
        kinds = (cells >= self._blocks[numbers]).astype(np.int64) + (cells >= self._first_sum[numbers])
        gap = np.where(kinds == 0, np.maximum(1, GAP_BYTES // self._block_size[numbers] + 1), 1)
        cuts = (np.diff(numbers) != 0) | (np.diff(kinds) != 0) | (np.diff(cells) > gap[1:])
        bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(cells)]
        runs: list[tuple[int, int, int]] = []
        for low, high in pairwise(bounds):
            number, kind = int(numbers[low]), int(kinds[low])
            first, stop, own = int(cells[low]), int(cells[high - 1]) + 1, self.shards[number].cells
            size = int(self._block_size[number])
            step = max(1, REQUEST_BYTES // size)
            if kind:
                step = max(1, own.count)
                if self.shards[number].entry.sums is None:  # it can only be verified as a whole
                    first, stop = (own.blocks, own.first_sum) if kind == 1 else (own.first_sum, own.count)
            runs += [(number, begin, min(begin + step, stop)) for begin in range(first, stop, step)]
        return runs

    def _begin(self, number: int, first: int, stop: int, *, urgent: bool) -> _Run:
        """Queue a range: a new run, or a pending run that includes it."""
        with self._lock:
            for run in self._pending.get(number, ()):
                if run.first <= first and stop <= run.stop and (run.begun or not urgent):
                    return run
            run = _Run(number, first, stop)
            self._pending.setdefault(number, []).append(run)
        (self._urgent if urgent else self._ahead).submit(lambda: self._do(run))
        return run

    def _do(self, run: _Run) -> None:
        run.begun = True
        problem: BaseException | None = None
        try:
            self._fetch(self.shards[run.number], run.first, run.stop)
        except BaseException as error:  # the waiting reader must get any error
            problem = error
        with self._lock:
            self._pending[run.number].remove(run)
        if problem is None:
            run.done.set_result(None)
        else:
            run.done.set_exception(problem)

    def _fetch(self, shard: RemoteShard, first: int, stop: int) -> None:
        """Fetch the missing cells of a range, once no other process fetches any of it."""
        with self.cache.claim(shard.file, first, stop - first) as claim:
            missing = np.flatnonzero(~shard.present[first:stop])
            if not len(missing):
                return
            if shard.entry.sums is not None or first < shard.cells.blocks:
                first, stop = first + int(missing[0]), first + int(missing[-1]) + 1
            low, data, damaged = shard.cells.span(first, stop)[0], *self._read(shard, first, stop)
            view, begin = memoryview(data), first
            for end in [*damaged, stop]:  # the intact cells between the damaged ones
                if begin < end:
                    start, finish = shard.cells.span(begin, end)
                    claim.put(begin, end - begin, start, view[start - low : finish - low])
                begin = end + 1
            if damaged:
                raise self._damage(shard, damaged)

    def _read(self, shard: RemoteShard, first: int, stop: int) -> tuple[bytes, list[int]]:
        """(The bytes of some cells, the cells that do not match their digests); these are read a second time first."""
        low, high = shard.cells.span(first, stop)
        is_table = first >= shard.cells.blocks
        expected = self._table_digests(shard, first, stop) if is_table else self._checksums(shard, first, stop)
        data, damaged = b"", list[int]()
        for _ in range(2):
            try:
                data = self.store.read_range(shard.entry.name, low, high, etag=shard.entry.etag)
            except (StorePreconditionError, StoreNotFoundError) as error:
                what = "is gone from" if isinstance(error, StoreNotFoundError) else "was replaced in"
                raise DamagedData(
                    f"{shard.path} {what} the bucket after its data set was opened or its index was written: put it "
                    f"back, or write the index again (`roxxel-dist data index`) and start again"
                ) from error
            if expected is None:
                sums = first >= shard.cells.first_sum
                whole = shard.layout.sums_checksum if sums else shard.layout.ends_checksum
                damaged = [] if checksum(data) == whole else list(range(first, stop))
            else:
                size = shard.cells.span(first, first + 1)[1] - low if stop - first > 1 else high - low
                damaged = (first + np.flatnonzero(digests(data, size) != expected)).tolist()
            if not damaged:
                break
        return data, damaged

    def _damage(self, shard: RemoteShard, damaged: list[int]) -> DamagedData:
        first = damaged[0]
        cure = (
            f"does not agree with its checksum, fetched twice. `roxxel-dist data verify {shard.path.parent}` names all "
            f"that is damaged; copy the object again from its source and go on"
        )
        if first >= shard.cells.blocks:
            name = "checksums" if first >= shard.cells.first_sum else "document ends"
            return DamagedData(f"{shard.path}: the table of {name} {cure}")
        return DamagedData(f"{shard.damage(damaged)}: it {cure}")

    def _table_digests(self, shard: RemoteShard, first: int, stop: int) -> np.ndarray | None:
        """uint64 digests of some cells of a table; None if the table has a single digest."""
        begin, known = shard.cells.blocks, shard.entry.ends
        if first >= shard.cells.first_sum:
            begin, known = shard.cells.first_sum, shard.entry.sums
        return None if known is None else known[first - begin : stop - begin]

    def _checksums(self, shard: RemoteShard, first: int, stop: int) -> np.ndarray:
        """uint64 checksums of some blocks, from the table in the cache, which is fetched if missing."""
        low = shard.cells.first_sum + first // TABLE_NUMBERS
        high = shard.cells.first_sum + (stop - 1) // TABLE_NUMBERS + 1
        for _ in range(ROUNDS):
            evictions = self.cache.evictions
            if shard.present[low:high].all():
                sums = shard.checksums[first:stop].copy()
                if self.cache.evictions == evictions:
                    return sums
            else:
                runs = self._runs(self._base[shard.number] + low + np.flatnonzero(~shard.present[low:high]))
                for _, begin, end in runs:
                    self._fetch(shard, begin, end)
        raise self._too_small()
