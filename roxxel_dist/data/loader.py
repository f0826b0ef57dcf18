"""A process's view of the plan: the rows that its own devices need, read and placed on the mesh.

jax is imported only where batches are placed: a process that reads numpy arrays starts without it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from roxxel_dist.curriculum.plan import ENDLESS, Plan, Rows
from roxxel_dist.data.dataset import place_of
from roxxel_dist.data.packing import Packed
from roxxel_dist.data.verify_on_read import DamagedData, VerifiedBlocks

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

    from roxxel_dist.data.dataset import Roxxel

STEPS_AHEAD = 4
STEPS_TOGETHER, FEW_TOKENS = 8, 1 << 15
"""So many batches that follow each other are copied at once, where none has more tokens: it takes half the time."""
Runs = tuple[tuple[int, int], ...]
Host = tuple[tuple[int, int], list[np.ndarray]]


class Stream:
    """Batches of a plan from `start_step` on; its whole state is the integer `step`.

    Args:
        plan: what each step reads.
        dataset: where the tokens are: the one data set of the plan, or all by the plan's names; those that an
            amendment took away before `start_step` may be missing.
        sharding: how a (rows, tokens) batch lies on the mesh, or None for numpy arrays. A batch that it does not divide
            is cut along the tokens instead, or copied whole (`cluster.mesh.fit_sharding`).
        start_step: the first step to read, from 0.

    Iterating gives int32[batch_size, seq_len] arrays: a global `jax.Array` of which this process read only what its
    devices hold. In a phase with `packing="documents"` it gives a `Packed` of three such arrays.

    Raises:
        ValueError: a data set of the plan is missing.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: "Roxxel | Mapping[str, Roxxel]",
        sharding: "NamedSharding | None",
        start_step: int = 0,
    ) -> None:
        named = dataset if isinstance(dataset, Mapping) else {plan.datasets[0]: dataset}
        ends = [*(amendment.from_step for amendment in plan.amendments[1:]), ENDLESS]
        spans = zip(plan.amendments, ends, strict=True)
        read = {name for amendment, end in spans if start_step < end for name in amendment.sources}
        missing = [name for name in plan.datasets if name in read and name not in named]
        if missing:
            raise ValueError(f"the plan reads {', '.join(plan.datasets)}; give the data sets {', '.join(missing)} too")
        self.plan = plan
        self.datasets: dict[int, Roxxel] = {
            number: named[name] for number, name in enumerate(plan.datasets) if name in named
        }
        for number, data in self.datasets.items():
            if data.dtype.kind not in "iu":
                raise ValueError(
                    f"data {plan.datasets[number]!r} holds elements of {data.dtype}, which are no token ids: write it "
                    "again with an integer dtype, such as uint16"
                )
        self.sharding = sharding
        self.step: int = start_step
        self._ahead: dict[int, Rows] = {}
        self._next: int | None = None
        self._asks_ahead = False
        self._read: dict[int, Host] = {}

    def __len__(self) -> int:
        if self.plan.total_steps >= ENDLESS:
            raise TypeError("a stream with passes=None has no length: it goes on, pass after pass")
        return self.plan.total_steps - self.step

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        if self.step >= self.plan.total_steps:
            raise StopIteration
        batch = self._following_batch(self.step)
        self.step = self._next = self.step + 1
        self._asks_ahead = any(dataset.reads_ahead for dataset in self.datasets.values())
        if self._asks_ahead:
            self._look_ahead()
        return batch

    def _following_batch(self, step: int) -> Any:
        """The batch of a step, where the steps behind it will be asked for next."""
        read = self._read.pop(step, None)
        if read is not None:
            return self._place(*read)
        rows = self._ahead.pop(step, None) or self.plan.rows(step)
        # Only a step that follows the last one is read with others: the first batch should come at once.
        if self._asks_ahead or step != self._next or rows.packed or len(rows.offset) * rows.seq_len > FEW_TOKENS:
            return self.place(rows)
        return self._place(*self._with_following(step, rows))

    def twin(self) -> "Stream":
        """The same stream for another thread: a plan keeps the rows that it computed last, and is for one reader."""
        plan = Plan.from_state(self.plan.state(0))
        named = {self.plan.datasets[number]: dataset for number, dataset in self.datasets.items()}
        return Stream(plan, named, self.sharding, self.step)

    def verify(self, first: int, stop: int, blocks: VerifiedBlocks) -> None:
        """Compare what this process reads in the steps [first, stop) with its checksums, where that was not done.

        Raises:
            DamagedData: tokens do not agree. The message names data set, file, block and documents.
        """
        steps = [self.plan.rows(step) for step in range(first, stop)]
        shape_of = attrgetter("offset.size", "seq_len", "packed")
        for (batch, length, packed), group in groupby(steps, shape_of):
            alike = list(group)
            for low, high in _layout(self.sharding, (batch, length))[1]:
                dataset = np.concatenate([rows.dataset[low:high] for rows in alike])
                offset = np.concatenate([rows.offset[low:high] for rows in alike])
                for number, mine in _by_dataset(dataset, len(self.plan.datasets)):
                    try:
                        blocks.verify(self.datasets[number], offset[mine], length, documents=packed)
                    except ValueError as error:
                        raise DamagedData(f"data {self.plan.datasets[number]!r}: {error}") from error

    def batch(self, step: int) -> Any:
        """The batch of any step."""
        return self.place(self.plan.rows(step))

    def abstract(self) -> Any:
        """Shape, type and sharding of the next batch, for compiling ahead: `jax.ShapeDtypeStruct`s."""
        import jax

        phase = self.plan.segment(self.step).shape
        shape = (phase.batch_size, phase.seq_len)
        one = jax.ShapeDtypeStruct(shape, np.int32, sharding=_layout(self.sharding, shape)[0])
        return Packed(one, one, one) if phase.packing == "documents" else one

    def _with_following(self, step: int, rows: Rows) -> Host:
        """What `_host` gives for a step; steps of the same shape behind it, as far as they go together, are kept."""
        batch = len(rows.offset)
        steps = [rows]
        for later in range(step + 1, min(step + STEPS_TOGETHER, self.plan.total_steps)):
            following = self.plan.rows(later)
            if following.packed or (len(following.offset), following.seq_len) != (batch, rows.seq_len):
                break
            steps.append(following)
        shape, found = (batch, rows.seq_len), [[] for _ in steps]
        for low, high in _layout(self.sharding, shape)[1]:
            dataset = np.concatenate([rows.dataset[low:high] for rows in steps])
            offset = np.concatenate([rows.offset[low:high] for rows in steps])
            # Each step gets a view of one array, which nothing else is written to.
            together = self._copy(dataset, offset, rows.seq_len).reshape(len(steps), -1, rows.seq_len)
            for mine, part in zip(found, together, strict=True):
                mine.append(part)
        self._read = {step + number: (shape, mine) for number, mine in enumerate(found)}
        return self._read.pop(step)

    def _look_ahead(self) -> None:
        """Let the data sets prepare for what the next steps read."""
        following = range(self.step, min(self.step + STEPS_AHEAD, self.plan.total_steps))
        known, self._ahead = self._ahead, {}
        for step in following:
            self._ahead[step] = known.get(step) or self.plan.rows(step)
            if step not in known:
                self._prefetch(self._ahead[step])

    def _prefetch(self, rows: Rows) -> None:
        for low, high in _layout(self.sharding, (len(rows.offset), rows.seq_len))[1]:
            for number, mine in _by_dataset(rows.dataset[low:high], len(self.plan.datasets)):
                self.datasets[number].prefetch(rows.offset[low:high][mine], rows.seq_len)

    def place(self, rows: Rows) -> Any:
        """The batch of these rows, as iterating gives it."""
        return self._place_packed(rows) if rows.packed else self._place(*self._host(rows))

    def _host(self, rows: Rows) -> Host:
        """The batch's shape, and int32 [rows, seq_len] of each run of rows that is needed here."""
        shape = len(rows.offset), rows.seq_len
        if self.sharding is None:
            return shape, [self._copy(rows.dataset, rows.offset, rows.seq_len)]
        runs = _layout(self.sharding, shape)[1]
        return shape, [self._copy(rows.dataset[low:high], rows.offset[low:high], rows.seq_len) for low, high in runs]

    def _place(self, shape: tuple[int, int], host: list[np.ndarray]) -> Any:
        if self.sharding is None:
            return host[0]
        sharding, runs = _layout(self.sharding, shape)
        return _placed(shape, sharding, [(*run, rows) for run, rows in zip(runs, host, strict=True)])

    def _place_packed(self, rows: Rows) -> Packed:
        """The batch, and beside it the segments and positions of the same rows, placed alike."""
        shape = (len(rows.offset), rows.seq_len)
        sharding, runs = _layout(self.sharding, shape)
        tokens = self.place(replace(rows, packed=False))
        found = [self._segments(rows, low, high) for low, high in runs]
        if sharding is None:
            return Packed(tokens, *found[0])
        held = [[(low, high, marks[i]) for (low, high), marks in zip(runs, found, strict=True)] for i in (0, 1)]
        return Packed(tokens, *(_placed(shape, sharding, one) for one in held))

    def _segments(self, rows: Rows, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Segments and positions of the rows `low` to `high`, int32 [rows, seq_len] each."""
        segments, positions = np.empty((2, high - low, rows.seq_len), np.int32)
        for number, mine in _by_dataset(rows.dataset[low:high], len(self.plan.datasets)):
            found = self.datasets[number].segments(rows.offset[low:high][mine], rows.seq_len)
            segments[mine], positions[mine] = found
        return segments, positions

    def _copy(self, dataset: np.ndarray, offset: np.ndarray, seq_len: int) -> np.ndarray:
        """The windows of some rows, int32 [rows, seq_len]."""
        if len(self.plan.datasets) == 1:
            return self._ids(0, offset, seq_len)
        parts = _by_dataset(dataset, len(self.plan.datasets))
        if len(parts) == 1:
            return self._ids(parts[0][0], offset, seq_len)
        out = np.empty((len(offset), seq_len), np.int32)
        for number, mine in parts:
            out[mine] = self._ids(number, offset[mine], seq_len)
        return out

    def _ids(self, number: int, offset: np.ndarray, seq_len: int) -> np.ndarray:
        """The same of one data set. Raises ValueError for an id that int32 does not hold."""
        data = self.datasets[number]
        if np.can_cast(data.dtype, np.int32):
            return data.read(offset, seq_len, np.int32)
        wide = data.read(offset, seq_len)
        ids = wide.astype(np.int32)
        if not np.array_equal(ids, wide):
            row, column = np.argwhere(ids != wide)[0].tolist()
            place = place_of(data, int(offset[row]) + column)
            raise ValueError(
                f"data {self.plan.datasets[number]!r}: {place.path}, document {place.document}: the id "
                f"{wide[row, column]} is not below 2^31: build the data again with the tokenizer of the model"
            )
        return ids


def stream_of(
    dataset: "Roxxel",
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    steps: int | None = None,
    passes: int | None = 1,
    *,
    mesh: "Mesh | None" = None,
    data_sharding: "NamedSharding | None" = None,
    mix_datasets: "Mapping[str, Roxxel] | None" = None,
    weights: Mapping[str, float] | None = None,
) -> Stream:
    """What `Roxxel.stream` gives: a curriculum of one phase as a stream."""
    from roxxel_dist.curriculum.phases import Curriculum, Phase

    if steps is not None and passes != 1:
        raise ValueError(f"steps={steps} and passes={passes}: give one of them, steps are counted whatever the passes")
    if passes is not None and passes < 1:
        raise ValueError(f"passes={passes}: passes over the data set, at least 1, or None for a stream without an end")
    if steps is not None or passes is None:
        phase = Phase(ENDLESS if steps is None else steps, batch_size, seq_len, weights=weights)
    else:
        phase = Phase(batch_size=batch_size, seq_len=seq_len, epochs=passes, weights=weights)
    plan = Curriculum(dataset, [phase], mix_datasets).plan(seed)
    if mesh is not None and data_sharding is None:
        from roxxel_dist.cluster.mesh import batch_sharding

        data_sharding = batch_sharding(mesh)
    return Stream(plan, {"self": dataset, **(mix_datasets or {})}, data_sharding, start_step)


def _by_dataset(dataset: np.ndarray, count: int) -> list[tuple[int, Any]]:
    """(number, which rows) of each data set that some rows are from."""
    if count == 1:
        return [(0, slice(None))]
    if (dataset == dataset[0]).all():
        return [(int(dataset[0]), slice(None))]
    return [(int(number), np.flatnonzero(dataset == number)) for number in np.unique(dataset)]


@lru_cache(maxsize=64)
def _layout(sharding: "NamedSharding | None", shape: tuple[int, int]) -> tuple[Any, Runs]:
    """The sharding that a batch of this shape gets, and the runs of rows that are needed here: (first, end) of each."""
    if sharding is None:
        return None, ((0, shape[0]),)
    from roxxel_dist.cluster.mesh import fit_sharding

    fitted = fit_sharding(sharding, shape)
    indices: Any = fitted.addressable_devices_indices_map(shape).values()
    runs: list[tuple[int, int]] = []
    for low, high in sorted({index[0].indices(shape[0])[:2] for index in indices}):
        if runs and low <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(high, runs[-1][1])
        else:
            runs.append((low, high))
    return fitted, tuple(runs)


def _placed(shape: tuple[int, int], sharding: Any, held: list[tuple[int, int, np.ndarray]]) -> "jax.Array":
    """A global array of `shape` from the runs of rows that this process's devices hold: (first, end, rows) of each."""
    import jax

    if len(held) == 1 and not held[0][0]:
        return jax.make_array_from_callback(shape, sharding, held[0][2].__getitem__)

    def piece(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        low, rows = next((low, rows) for low, high, rows in held if low <= start and stop <= high)
        return rows[start - low : stop - low, index[1]]

    return jax.make_array_from_callback(shape, sharding, piece)
