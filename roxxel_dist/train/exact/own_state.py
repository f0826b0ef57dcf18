"""What a user's own model changes of its state in a call, looked at before a run is begun."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.train.exact.gradient import ShardPrograms
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams


def check_own_state(programs: ShardPrograms, state: TrainState, hparams: Hparams, batch: Any, mesh: Mesh) -> None:
    """Raises UserError if a call of the model changes what has no mean over the virtual shards; traces one of them.

    Of whole rows: own models have no others.

    Args:
        programs: of the model and its loss.
        state: (abstract) arrays, as hparams and batch.
        hparams: inputs of every step.
        batch: of all shards.
        mesh: whose axes the model may name.
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def rows(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] // programs.shards, *leaf.shape[1:]), leaf.dtype)

    args = jax.tree.map(shape, (state.params, state.rest, hparams))
    with jax.set_mesh(one_device(mesh, mesh.devices.flat[0])):
        jax.eval_shape(programs.sums, *args, jax.tree.map(rows, batch), jax.ShapeDtypeStruct((), np.int32))
