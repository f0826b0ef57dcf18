"""How often the programs of a step with virtual shards run, as the step itself says.

It runs once, on simulated devices, with programs that compute nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.train.exact.step import ShardedEvaluation, ShardedStep

Key = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""Of a program: its name, shape and type of each of its arguments."""
ALIGNMENT = 64
"""Of arrays in memory that jax does not copy."""


def key_of(jitted: Any, args: Any) -> Key:
    """The key of a program."""
    return jitted.__name__, tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args))


def simulated_mesh(mesh: Mesh) -> Mesh:
    """A mesh of that shape of CPU devices, as many of which are simulated in this process."""
    devices = np.asarray(jax.devices("cpu")[: mesh.size]).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def count_calls(
    step: ShardedStep | ShardedEvaluation, number: int, programs: Mapping[Key, Any], args: tuple[Any, ...]
) -> Counter[Key]:
    """How often a device runs each program in one step.

    Args:
        step: on a `simulated_mesh`.
        number: of the device, among all.
        programs: of the target.
        args: of the step, on the target, as shapes with shardings.
    """
    mesh = step.layout.mesh

    def placed(leaf: Any) -> Any:
        on = mesh
        if leaf.sharding.mesh.devices.shape != mesh.devices.shape:  # that of a phase with few rows
            on = Mesh(mesh.devices.reshape(leaf.sharding.mesh.devices.shape), leaf.sharding.mesh.axis_names)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, leaf.sharding.spec))

    args = jax.tree.map(placed, args)
    counted = CountedPrograms(programs, mesh, step.layout.line.devices.flat[number])
    with jax.set_mesh(one_device(mesh)):
        program = step.compile(counted.one, counted.each, *args)
    program(*jax.tree.map(lambda leaf: zeros(leaf, leaf.sharding), args))
    return counted.calls


class CountedPrograms:
    """The same programs on simulated devices: they give arrays of zeros, which take no memory.

    Args:
        programs: of the target.
        mesh: of the simulated devices.
        device: of them, whose calls are counted.
    """

    def __init__(self, programs: Mapping[Key, Any], mesh: Mesh, device: Any) -> None:
        self._programs, self._mesh, self._device = programs, mesh, device
        self.calls: Counter[Key] = Counter()

    def one(self, jitted: Any, args: Sequence[Any], mesh: Mesh) -> Any:
        """`Compile`."""
        key = key_of(jitted, args)
        places = [NamedSharding(mesh, place.spec) for place in jax.tree.leaves(self._programs[key].output_shardings)]
        return self._called(key, mesh, jitted, args, places)

    def each(self, jitted: Any, args: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """`CompileForEach`."""
        key = key_of(jitted, args)
        return [
            self._called(key, one_device(self._mesh, device), jitted, args, SingleDeviceSharding(device))
            for device in devices
        ]

    def _called(self, key: Key, mesh: Mesh, jitted: Any, args: Sequence[Any], places: Any) -> Callable[..., Any]:
        with jax.set_mesh(mesh):
            leaves, treedef = jax.tree.flatten(jax.eval_shape(jitted, *args))
        places = places if isinstance(places, list) else [places] * len(leaves)
        is_counted = self._device in mesh.devices

        def program(*args: Any) -> Any:
            del args
            self.calls[key] += is_counted
            return jax.tree.unflatten(treedef, map(zeros, leaves, places))

        return program


def zeros(like: Any, place: Any) -> jax.Array:
    """An array of zeros of the same shape and type: as it is never written, all its pages are one."""
    if isinstance(place, SingleDeviceSharding):
        (device,) = place.device_set
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            numbers = np.zeros((*like.shape, *jax.random.key_data(jax.random.key(0)).shape), np.uint32)
            return jax.random.wrap_key_data(jax.device_put(numbers, device))
        size = math.prod(like.shape) * like.dtype.itemsize
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return jax.device_put(memory[start : start + size].view(like.dtype).reshape(like.shape), device)
    own = jax.ShapeDtypeStruct(place.shard_shape(like.shape), like.dtype)
    parts = [zeros(own, SingleDeviceSharding(device)) for device in place.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(like.shape, place, parts)
