"""A process's view of the plan: the rows for its own devices, fetched ahead, read and placed on the mesh.

jax is imported only to place batches: a process that reads numpy arrays starts without it.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import ENDLESS, Plan, Rows
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.packing import Packed
from roxxel_dist.data.remote.fetch import Fetcher
from roxxel_dist.data.verify import DamagedData, VerifiedBlocks
from roxxel_dist.objects.errors import StoreError
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.process.exit_codes import UserError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

RowPlan = Plan | EvenRows
"""Which rows each step reads."""
STEPS_AHEAD = 4
ALL_ROWS = slice(None)
SPAN_BYTES = 32 << 20
"""Bytes of windows that are fetched in one span."""
SPANS = 4
"""Spans to fetch ahead, at most."""
AGAIN_S = 1.0


class Windows(NamedTuple):
    """Windows of one length in a data set, read by some steps."""

    name: str
    """The name of the data set in the plan."""
    data: Any
    """The `Roxxel`."""
    offset: np.ndarray
    """int64 [N]: first tokens."""
    length: int
    packed: bool
    """Whether segments are read too."""

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return len(self.offset) * self.length * self.data.dtype.itemsize


class FetchAhead:
    """A thread that fetches the windows of the steps from `first` up to `stop`, as far ahead as the cache of the
    `fetchers` allows; `windows` gives those of the steps [first, stop).

    The windows of one step are rarely adjacent, but those of many steps fill whole units, which are fetched in joined
    ranges. So the first step is fetched alone, and the others in long spans of steps. It ends with this object. Errors
    are not reported: the step that reads the window tries again, and raises.
    """

    def __init__(
        self, windows: Callable[[int, int], Iterable[Windows]], first: int, stop: int, fetchers: Sequence[Fetcher]
    ) -> None:
        self._position = _Position(first)
        weakref.finalize(self, self._position.close).atexit = False
        threading.Thread(
            target=_run, args=(self._position, windows, stop, fetchers), name="roxxel-ahead", daemon=True
        ).start()

    def reach(self, step: int) -> None:
        """The reader is about to read `step`."""
        self._position.reach(step)


class _Position:
    """The reader's current step, shared with the thread."""

    def __init__(self, step: int) -> None:
        self.step, self.closed = step, False
        self._change = threading.Condition()

    def reach(self, step: int) -> None:
        with self._change:
            self.step = step
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self.closed = True
            self._change.notify_all()

    def wait_for(self, step: int) -> bool:
        """Wait until the reader reaches a step; False if the reader has gone."""
        with self._change:
            self._change.wait_for(lambda: self.closed or self.step >= step)
        return not self.closed


def _run(
    position: _Position, windows: Callable[[int, int], Iterable[Windows]], stop: int, fetchers: Sequence[Fetcher]
) -> None:
    """Fetch span after span."""
    step = position.step
    _fetch(list(windows(step, min(step + 1, stop))))
    step += 1
    while step < stop and not position.closed:
        step = max(step, position.step)
        most = min(SPANS * SPAN_BYTES, *(fetcher.ahead_bytes for fetcher in fetchers))
        size = max(1, sum(span.nbytes for span in windows(step, step + 1)))
        count = max(1, min(SPAN_BYTES, most // 2) // size)
        ahead = max(count + 1, most // size)
        if not position.wait_for(step + count - ahead):
            return
        if _fetch(list(windows(step, min(step + count, stop)))):
            # The store is unavailable: the reader uses the cache, and this thread continues when the store is back.
            time.sleep(AGAIN_S)
            continue
        step += count


def _fetch(spans: Sequence[Windows]) -> bool:
    """Fetch some windows; returns whether the store has failed."""
    failed = False
    for span in spans:
        try:
            span.data.fetch(span.offset, span.length, documents=span.packed)
        except StoreError:
            failed = True
        except ValueError:  # damage: the step that reads the window raises it
            pass
    return failed


class Stream:
    """Batches of a plan from `start_step`; its whole state is the integer `step`.

    Args:
        plan: the rows of each step.
        dataset: the single data set of the plan, or all by the plan's names; those that an amendment removed before
            `start_step` may be missing.
        sharding: of a (rows, tokens) batch on the mesh, or None for numpy arrays. Of a batch whose rows do not divide,
            several devices have the same rows (`cluster.mesh.fit_sharding`).
        start_step: the first step to read, from 0.
        grad_accum: micro-batches that the batch is used in; the rows of each of them are what is cut.

    Iterating gives int32[batch_size, seq_len] arrays: a global `jax.Array` of which this process reads only the parts
    of its devices. In a phase with `packing="documents"` it yields a `Packed` of three such arrays.

    Raises:
        ValueError: a data set of the plan is missing.
    """

    def __init__(
        self,
        plan: RowPlan,
        dataset: Roxxel | Mapping[str, Roxxel],
        sharding: "NamedSharding | None",
        start_step: int = 0,
        grad_accum: int = 1,
    ) -> None:
        named = dataset if isinstance(dataset, Mapping) else {plan.datasets[0]: dataset}
        read = plan.datasets_from(start_step)
        if missing := [name for name in plan.datasets if name in read and name not in named]:
            raise UserError(f"the plan reads {', '.join(plan.datasets)}; give the data sets {', '.join(missing)} too")
        self.plan = plan
        self.datasets: dict[int, Roxxel] = {
            number: named[name] for number, name in enumerate(plan.datasets) if name in named
        }
        for number, data in self.datasets.items():
            if data.dtype.kind not in "iu":
                raise UserError(
                    f"data {plan.datasets[number]!r} holds elements of {data.dtype}, which are no token ids: write it "
                    "again with an integer dtype, such as uint16"
                )
        self._fits_int32 = {number for number, data in self.datasets.items() if np.can_cast(data.dtype, np.int32)}
        self.sharding = sharding
        self.grad_accum: int = grad_accum
        self.step: int = start_step
        self._rows: Rows | None = None
        self._ahead: dict[int, Rows] = {}
        self._fetch_ahead: FetchAhead | None = None

    def __len__(self) -> int:
        if self.plan.total_steps >= ENDLESS:
            raise TypeError("a stream with passes=None has no length: it repeats, pass after pass")
        return self.plan.total_steps - self.step

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        if self.step >= self.plan.total_steps:
            raise StopIteration
        if any(dataset.fetcher for dataset in self.datasets.values()):
            self._fetch_from(self.step)
        self._rows = self._ahead.pop(self.step, None) or self.plan.rows(self.step)
        batch = self.place(self._rows)
        self.step += 1
        if any(dataset.reads_ahead for dataset in self.datasets.values()):
            self._look_ahead()
        return batch

    @property
    def rows(self) -> Rows:
        """The rows of the last batch from iteration, those of all processes included."""
        assert self._rows is not None
        return self._rows

    def _look_ahead(self) -> None:
        """Prefetch the windows of the next steps in the data sets."""
        known, self._ahead = self._ahead, {}
        for step in range(self.step, min(self.step + STEPS_AHEAD, self.plan.total_steps)):
            rows = self._ahead[step] = known.get(step) or self.plan.rows(step)
            if step not in known:
                for low, high in self._local((len(rows.offset), rows.seq_len))[1]:
                    for number, chosen in self._by_dataset(rows.dataset[low:high]):
                        self.datasets[number].prefetch(rows.offset[low:high][chosen], rows.seq_len)

    def _fetch_from(self, step: int) -> None:
        """Start or advance the thread that fetches windows of later steps ahead."""
        if self._fetch_ahead is None:
            fetchers = [dataset.fetcher for dataset in self.datasets.values() if dataset.fetcher]
            self._fetch_ahead = FetchAhead(self.twin().windows, step, self.plan.total_steps, fetchers)
        self._fetch_ahead.reach(step)

    def windows(self, first: int, stop: int) -> Iterator[Windows]:
        """The windows that this process reads in the steps [first, stop), by data set and length."""
        steps = [self.plan.rows(step) for step in range(first, stop)]
        for (batch, length, packed), group in groupby(steps, attrgetter("offset.size", "seq_len", "packed")):
            alike = list(group)
            for low, high in self._local((batch, length))[1]:
                offset = np.concatenate([rows.offset[low:high] for rows in alike])
                for number, chosen in self._by_dataset(np.concatenate([rows.dataset[low:high] for rows in alike])):
                    yield Windows(self.plan.datasets[number], self.datasets[number], offset[chosen], length, packed)

    def twin(self) -> "Stream":
        """A copy of the stream for another thread."""
        named = {self.plan.datasets[number]: dataset for number, dataset in self.datasets.items()}
        return Stream(self.plan.copy(), named, self.sharding, self.step, self.grad_accum)

    def verify(self, first: int, stop: int, blocks: VerifiedBlocks) -> None:
        """Verify the blocks that this process reads in the steps [first, stop), except those verified before. Raises
        DamagedData, which names data set, file, block and documents, where tokens do not match their checksums."""
        for windows in self.windows(first, stop):
            try:
                blocks.verify(windows.data, windows.offset, windows.length, documents=windows.packed)
            except ValueError as error:
                raise DamagedData(f"data {windows.name!r}: {error}") from error

    def batch(self, step: int) -> Any:
        """The batch of any step."""
        return self.place(self.plan.rows(step))

    def abstract(self) -> Any:
        """Shape, dtype and sharding of the next batch, for compiling ahead: `jax.ShapeDtypeStruct`s."""
        import jax

        phase = self.plan.shape_at(self.step)
        shape = (phase.batch_size, phase.seq_len)
        array = jax.ShapeDtypeStruct(shape, np.int32, sharding=self._local(shape)[0])
        return Packed(array, array, array) if phase.packing == "documents" else array

    def place(self, rows: Rows) -> Any:
        """The batch of these rows, as in iteration."""
        shape = (len(rows.offset), rows.seq_len)
        sharding, ranges = self._local(shape)
        local = [self._read(rows, low, high) for low, high in ranges]
        if sharding is None:
            arrays: list[Any] = local[0]
        else:
            arrays = [to_global_array(shape, sharding, ranges, pieces) for pieces in zip(*local, strict=True)]
        return Packed(*arrays) if rows.packed else arrays[0]

    def _local(self, shape: tuple[int, int]) -> tuple["NamedSharding | None", tuple[tuple[int, int], ...]]:
        return local_row_ranges(self.sharding, shape, self.grad_accum)

    def _read(self, rows: Rows, low: int, high: int) -> list[np.ndarray]:
        """The tokens of the rows `low` to `high`, for a packed batch with segments and positions: int32 [R,
        seq_len]."""
        offset, seq_len, merged = rows.offset[low:high], rows.seq_len, []
        for number, chosen in self._by_dataset(rows.dataset[low:high]):
            arrays = [self._read_ids(number, offset[chosen], seq_len)]
            if rows.packed:
                arrays += self.datasets[number].segments(offset[chosen], seq_len)
            if chosen is ALL_ROWS:
                return arrays
            merged = merged or [np.empty((high - low, seq_len), np.int32) for _ in arrays]
            for whole, part in zip(merged, arrays, strict=True):
                whole[chosen] = part
        return merged

    def _read_ids(self, number: int, offset: np.ndarray, seq_len: int) -> np.ndarray:
        """The windows of a data set. Raises ValueError for an id beyond int32."""
        data = self.datasets[number]
        if number in self._fits_int32:
            return data.read(offset, seq_len, np.int32)
        wide = data.read(offset, seq_len)
        ids = wide.astype(np.int32)
        if not np.array_equal(ids, wide):
            row, column = np.argwhere(ids != wide)[0].tolist()
            location = locate_token(data, int(offset[row]) + column)
            raise UserError(
                f"data {self.plan.datasets[number]!r}: {location.path}, document {location.document}: the id "
                f"{wide[row, column]} is not below 2^31: build the data again with the tokenizer of the model"
            )
        return ids

    def _by_dataset(self, dataset: np.ndarray) -> list[tuple[int, np.ndarray | slice]]:
        """(number, indices of its rows) of each data set in some rows."""
        if len(self.plan.datasets) == 1:
            return [(0, ALL_ROWS)]
        if (dataset == dataset[0]).all():
            return [(int(dataset[0]), ALL_ROWS)]
        return [(number, np.flatnonzero(dataset == number)) for number in np.unique(dataset).tolist()]


def stream_of(
    dataset: Roxxel,
    seq_len: int,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int | None,
    passes: int | None,
    *,
    mesh: "Mesh | None" = None,
    data_sharding: "NamedSharding | None" = None,
    mix_datasets: Mapping[str, Roxxel] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Stream:
    """The stream of `Roxxel.stream`: a curriculum of one phase."""
    if steps is not None and passes != 1:
        raise UserError(f"steps={steps} and passes={passes}: give one of them, steps are counted whatever the passes")
    if passes is not None and passes < 1:
        raise UserError(f"passes={passes}: passes over the data set, at least 1, or None for a stream without an end")
    steps = ENDLESS if steps is None and passes is None else steps
    phase = Phase(steps, batch_size, seq_len, epochs=passes if steps is None else None, weights=weights)
    plan = Curriculum(dataset, [phase], mix_datasets).plan(seed)
    if mesh is not None and data_sharding is None:
        from roxxel_dist.cluster.mesh import batch_sharding

        data_sharding = batch_sharding(mesh)
    return Stream(plan, {"self": dataset, **(mix_datasets or {})}, data_sharding, start_step)


@lru_cache(maxsize=64)
def local_row_ranges(
    sharding: "NamedSharding | None", shape: tuple[int, int], grad_accum: int = 1
) -> tuple["NamedSharding | None", tuple[tuple[int, int], ...]]:
    """The sharding of a batch of this shape, and the ranges of rows, (first, end), that this process needs."""
    if sharding is None:
        return None, ((0, shape[0]),)
    from roxxel_dist.cluster.mesh import fit_sharding

    fitted = fit_sharding(sharding, shape, grad_accum)
    indices: Any = fitted.addressable_devices_indices_map(shape).values()
    ranges: list[tuple[int, int]] = []
    for low, high in sorted({index[0].indices(shape[0])[:2] for index in indices}):
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(high, ranges[-1][1])
        else:
            ranges.append((low, high))
    return fitted, tuple(ranges)


def to_global_array(
    shape: tuple[int, int], sharding: "NamedSharding", ranges: Sequence[tuple[int, int]], pieces: Sequence[np.ndarray]
) -> "jax.Array":
    """A global array of `shape` from the ranges of rows of this process's devices, and those rows."""
    import jax

    if len(ranges) == 1 and not ranges[0][0]:
        return jax.make_array_from_callback(shape, sharding, pieces[0].__getitem__)

    def local(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        number = next(number for number, (low, high) in enumerate(ranges) if low <= start and stop <= high)
        low = ranges[number][0]
        return pieces[number][start - low : stop - low, index[1]]

    return jax.make_array_from_callback(shape, sharding, local)


@dataclass(frozen=True, kw_only=True)
class TokenLocation:
    """The location of one token."""

    path: Path | ObjectUrl
    """The shard."""
    document: int
    """The number of its document in that shard, from 0."""
    position: int
    """Tokens of the document before it."""


def locate_token(dataset: Roxxel, offset: int) -> TokenLocation:
    """The location of token `offset`, counted from the data set's start over all shards. Raises ValueError where the
    data set has no such token."""
    number = int(dataset.first_tokens.searchsorted(offset, side="right")) - 1
    last = int(dataset.first_tokens[-1]) + len(dataset.shards[-1].tokens) - 1
    if not 0 <= offset <= last:
        raise UserError(f"token {offset}: the data set has tokens 0 to {last}")
    shard, inside = dataset.shards[number], offset - int(dataset.first_tokens[number])
    document = int(shard.document_ends.searchsorted(inside, side="right"))
    start = int(shard.document_ends[document - 1]) if document else 0
    return TokenLocation(path=shard.path, document=document, position=inside - start)
