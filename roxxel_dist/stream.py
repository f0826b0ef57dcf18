"""A process's view of the plan: the rows that its own devices need, read and placed on the mesh."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from roxxel_dist.cluster.mesh import fit_sharding
from roxxel_dist.curriculum.plan import Plan, Rows

if TYPE_CHECKING:
    from roxxel_dist.data.dataset import Roxxel


class Stream:
    """Batches of a plan from `start_step` on; its whole state is the integer `step`.

    Args:
        plan: what each step reads.
        datasets: where the tokens are, by the names that the plan uses.
        sharding: how a (rows, tokens) batch lies on the mesh, or None for numpy arrays. A batch that it does not divide
            is cut along the tokens instead, or copied whole (`cluster.mesh.fit_sharding`).
        start_step: the first step to read, from 0.

    Iterating gives int32[batch_size, seq_len] arrays: a global `jax.Array` of which this process read only what its
    devices hold.
    """

    def __init__(
        self, plan: Plan, datasets: Mapping[str, "Roxxel"], sharding: NamedSharding | None, start_step: int = 0
    ) -> None:
        self.plan = plan
        self.datasets = datasets
        self.sharding = sharding
        self.step = start_step

    def __len__(self) -> int:
        return self.plan.total_steps - self.step

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        if self.step >= self.plan.total_steps:
            raise StopIteration
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def batch(self, step: int) -> Any:
        """The batch of any step."""
        rows = self.plan.rows(step)
        if self.sharding is None:
            return self._read(rows, slice(None)).astype(np.int32)
        shape = (len(rows.offset), rows.seq_len)
        return place(shape, fit_sharding(self.sharding, shape), lambda part: self._read(rows, part).astype(np.int32))

    def _read(self, rows: Rows, part: slice) -> np.ndarray:
        """[rows of the part, seq_len] tokens, in the data sets' own dtype where they share one."""
        dataset, offset = rows.dataset[part], rows.offset[part]
        used = np.unique(dataset)
        if len(used) == 1:
            return self._dataset(used[0]).read(offset, rows.seq_len)
        tokens = np.empty((len(offset), rows.seq_len), np.int32)
        for number in used:
            mine = dataset == number
            tokens[mine] = self._dataset(number).read(offset[mine], rows.seq_len)
        return tokens

    def _dataset(self, number: int) -> "Roxxel":
        return self.datasets[self.plan.datasets[number]]


def place(shape: tuple[int, int], sharding: NamedSharding, read: Any) -> jax.Array:
    """A global int32 array of `shape` of which `read(rows: slice)` is asked once for each run of rows held here."""
    held: dict[tuple[int, int], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in held:
            held[start, stop] = read(slice(start, stop))
        return np.ascontiguousarray(held[start, stop][:, index[1]])

    return jax.make_array_from_callback(shape, sharding, piece)
