"""A process's view of the plan: the rows that its own devices need, read and placed on the mesh."""

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
        dataset: where the tokens are.
        sharding: how a (rows, tokens) batch lies on the mesh, or None for numpy arrays. A batch that it does not divide
            is cut along the tokens instead, or copied whole (`cluster.mesh.fit_sharding`).
        start_step: the first step to read, from 0.

    Iterating gives int32[batch_size, seq_len] arrays: a global `jax.Array` of which this process read only what its
    devices hold.
    """

    def __init__(self, plan: Plan, dataset: "Roxxel", sharding: NamedSharding | None, start_step: int = 0) -> None:
        self.plan = plan
        self.dataset = dataset
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
        return self.dataset.read(rows.offset[part], rows.seq_len)


def place(shape: tuple[int, int], sharding: NamedSharding, read: Any) -> jax.Array:
    """A global int32 array of `shape` of which `read(rows: slice)` is asked once for each run of rows held here."""
    held: dict[tuple[int, int], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in held:
            held[start, stop] = read(slice(start, stop))
        return np.ascontiguousarray(held[start, stop][:, index[1]])

    return jax.make_array_from_callback(shape, sharding, piece)
