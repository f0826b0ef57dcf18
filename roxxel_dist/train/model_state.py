"""What a run has come to, as the functions that users write see it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, process_index
from roxxel_dist.train.hardware import free_device_bytes
from roxxel_dist.train.state import ModelParts, TrainState

ROOM = 0.9
"""Share of a device's free memory that one more copy of the model may take; programs need some beside it."""


class ModelState:
    """The model, the optimizer's state and the step.

    It shows the arrays of the step that it was taken after: the next step takes their memory, so use it at once and
    copy what shall be kept.
    """

    def __init__(self, parts: ModelParts, state: TrainState, settings: dict[str, jax.Array]) -> None:
        self._parts, self._state, self._settings = parts, state, settings

    @property
    def step(self) -> jax.Array:
        """int32[]: steps done; `int(state.step)` and `state.step[...]` read it."""
        return self._state.step

    @property
    def model(self) -> Any:
        """The module with dropout off; its arrays lie on the mesh, so on several processes all must compute with it."""
        return self._parts.merge(self._state.params, self._state.rest, self._settings, training=False)

    @property
    def optimizer(self) -> Any:
        """The state of the optax transformation."""
        return self._state.opt_state

    @property
    def params(self) -> dict[str, jax.Array]:
        """Parameters by name; of a model with adapters, the adapters."""
        return self._state.params

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """Parameters that are not trained, by name; none without adapters."""
        return {name: self._settings[name] for name in self._parts.frozen.names}

    def flops_per_token(self) -> Callable[[int], float]:
        """(tokens a row) -> floating-point operations of a step, for a token: as the module says, or 6 a parameter."""
        usual = 6.0 * sum(leaf.size for leaf in self.params.values())
        usual += 4.0 * sum(leaf.size for leaf in self.frozen.values())  # there is no gradient of them
        # Asked for at every row, and a module may walk through all of its parameters to answer.
        return cache(getattr(self.model, "flops_per_token", lambda length: usual))

    def copy_to(self, model: nnx.Module, optimizer: nnx.Optimizer[Any] | None) -> None:
        """Give a module that was trained, and its optimizer, the arrays of this state; they are not copied.

        What lay on one device of this process is given from there, where each device has the whole of it.

        Args:
            model: of which this state was made.
            optimizer: whose transformation has trained it; None where there is no such object.
        """
        frozen = {name: self._settings[name] for name in self._parts.frozen.names}
        for part, leaves in ((self._parts.params, self.params), (self._parts.frozen, frozen),
                             (self._parts.rest, self._state.rest)):  # fmt: skip
            nnx.update(model, part.state(jax.tree.map(_on_one_device, leaves)))
        if optimizer is None:
            return
        names = set(self._parts.params.names)

        def of_parameters(tree: Any) -> bool:
            return isinstance(tree, dict) and set(tree) == names

        as_states = jax.tree.map(
            lambda tree: self._parts.params.state(tree) if of_parameters(tree) else tree,
            self._state.opt_state,
            is_leaf=of_parameters,
        )
        leaves = [_on_one_device(leaf) for leaf in jax.tree.leaves(as_states)]
        theirs, tree = jax.tree.flatten(nnx.state(optimizer.opt_state))
        if [leaf.shape for leaf in leaves] == [leaf.shape for leaf in theirs]:  # else it was made for other parameters
            nnx.update(optimizer.opt_state, jax.tree.unflatten(tree, leaves))
            optimizer.step[...] = jnp.asarray(int(self.step), optimizer.step[...].dtype)

    def local_model(self) -> Any:
        """A module with dropout off on this process's first device alone. Every process must ask for it.

        Raises:
            MemoryError: on every process, where a device of one of them has no room for the whole model beside what it
                holds.
        """
        leaves, tree = jax.tree.flatten((self._state.params, self._state.rest, self._settings))
        cut = {i: leaf for i, leaf in enumerate(leaves) if not leaf.sharding.is_fully_replicated}
        if cut:
            _check_room(sum(leaf.size * leaf.dtype.itemsize for leaf in cut.values()))
            everywhere = NamedSharding(next(iter(cut.values())).sharding.mesh, P())
            whole = jax.jit(lambda cut: cut, out_shardings=everywhere)(cut)
            leaves = [whole.get(i, leaf) for i, leaf in enumerate(leaves)]
        params, rest, settings = jax.tree.unflatten(tree, [leaf.addressable_data(0) for leaf in leaves])
        return self._parts.merge(params, rest, settings, training=False)


def _on_one_device(leaf: jax.Array) -> jax.Array:
    """The first device's copy of an array that all devices have the whole of."""
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def _check_room(size: int) -> None:
    """Raises MemoryError, on all processes alike, where so many bytes more do not fit on each device of this one."""
    free = free_device_bytes()
    problem = f"{size / 1e9:.1f} GB do not fit in the {free / 1e9:.1f} GB free on a device of rank {process_index()}"
    problems = gather_to_primary("room for the whole model", problem if size > ROOM * free else "")
    if problem := broadcast_from_primary("room for the whole model", next(filter(None, problems), "")):
        raise MemoryError(f"the whole model on one device: {problem}")
