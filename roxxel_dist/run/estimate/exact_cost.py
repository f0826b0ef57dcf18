"""What a step with virtual shards costs on a target: the cost of each of its programs, times how often it runs them.

The target's compiler compiles each program once. How often it is called, the step itself says: it runs once on
simulated devices, with programs that compute nothing.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.run.estimate.step_costs import roofline_seconds, summed
from roxxel_dist.run.estimate.target_steps import TargetCompiler, TargetStep
from roxxel_dist.train.exact.step import ShardedEvaluation, ShardedStep

Key = tuple[str, tuple[tuple[tuple[int, ...], str], ...]]
"""Of a program: its name, shape and type of each of its arguments."""
ExactStep = ShardedStep | ShardedEvaluation
ALIGNMENT = 64
"""Of arrays in memory that jax does not copy."""


def measure_exact(
    target: TargetCompiler,
    what: str,
    step: ExactStep,
    simulated: ExactStep,
    args: tuple[Any, ...],
    flops: float,
) -> tuple[TargetStep, Any]:
    """(the cost of a step with virtual shards, its program that takes the most memory, or None if one does not fit).

    The memory is that of this program: what is alive meanwhile besides its arguments is not in it.

    Args:
        target: its compiler.
        what: for messages.
        step: on the mesh of the target.
        simulated: the same one on a mesh of that shape of `simulated_mesh`.
        args: of `step`, as `jax.ShapeDtypeStruct`s with shardings.
        flops: of an ordinary step on one device.
    """
    mesh = step.layout.mesh
    programs = TargetPrograms(target, mesh, what)
    try:
        with jax.set_mesh(one_device(mesh, mesh.devices.flat[0])):
            step.compile(programs.one, programs.each, *args)
    except _TooLarge:
        seconds = sum(cost.compile_seconds for cost in programs.costs.values())
        refused = next(cost for cost in programs.costs.values() if cost.flops_per_device is None)
        return dataclasses.replace(refused, compile_seconds=seconds), None
    line = list(step.layout.line.devices.flat)
    number = line.index(max(step.layout.devices, key=lambda device: len(step.layout.shards_of(device))))
    calls = _calls(simulated, number, programs.programs, args)
    return _total(target, programs, calls, mesh, flops)


def simulated_mesh(mesh: Mesh) -> Mesh:
    """A mesh of that shape of CPU devices, as many of which are simulated in this process."""
    devices = np.asarray(jax.devices("cpu")[: mesh.size]).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _calls(step: ExactStep, number: int, programs: dict[Key, Any], args: tuple[Any, ...]) -> Counter[Key]:
    """How often a device, by its number among all, runs each program in one step, with such arguments of the target."""
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


def _total(
    target: TargetCompiler, programs: "TargetPrograms", calls: Counter[Key], mesh: Mesh, flops: float
) -> tuple[TargetStep, Any]:
    own, sent, gathered, bounds = 0.0, Counter[str](), dict[str, float](), Counter[str]()
    parts = summed((programs.costs[key].costs, count) for key, count in calls.items())
    for key, count in calls.items():
        cost = programs.costs[key]
        own += count * (cost.flops_per_device or 0.0)
        gathered |= cost.gathered
        for total, part in ((sent, cost.collectives), (bounds, cost.bound_seconds)):
            for name, value in part.items():
                total[name] += count * value  # pyright: ignore[reportArgumentType]
    largest = max(programs.costs, key=lambda key: programs.costs[key].peak_bytes or 0)
    peak = programs.costs[largest].peak_bytes
    step = TargetStep(
        peak_bytes=peak,
        device_bytes=target.device_bytes,
        fits=all(cost.fits for cost in programs.costs.values()),
        flops_per_device=own,
        flops_ratio=own * mesh.size / flops if flops else None,
        collectives=dict(sent),
        gathered=gathered,
        bound_seconds=dict(bounds),
        costs=parts,
        roofline_seconds=roofline_seconds(parts) if parts else None,
        compile_seconds=sum(cost.compile_seconds for cost in programs.costs.values()),
    )
    return step, programs.programs[largest]


def key_of(jitted: Any, args: Any) -> Key:
    """The key of a program."""
    return jitted.__name__, tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args))


class _TooLarge(Exception):
    """A program does not fit."""


class TargetPrograms:
    """Compiles the programs of a step for a target, each once: what `Composite.compile` takes to compile.

    Attributes:
        costs: of one call of each.
        programs: likewise.
    """

    def __init__(self, target: TargetCompiler, mesh: Mesh, what: str) -> None:
        self._target, self._mesh, self._what = target, mesh, what
        self.costs: dict[Key, TargetStep] = {}
        self.programs: dict[Key, Any] = {}

    def one(self, jitted: Any, args: Sequence[Any], mesh: Mesh) -> Any:
        """`Compile`. Raises _TooLarge."""
        key = key_of(jitted, args)
        if key not in self.costs:
            what = f"{self._what}, {jitted.__name__}"
            self.costs[key], program = self._target.measure(what, mesh, jitted, tuple(args), 0.0)
            if program is None:
                raise _TooLarge
            self.programs[key] = program
        return self.programs[key]

    def each(self, jitted: Any, args: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """`CompileForEach`."""
        place = SingleDeviceSharding(devices[0])
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), args)
        return [self.one(jitted, own, one_device(self._mesh, devices[0]))] * len(devices)


class CountedPrograms:
    """The same programs on simulated devices: they give arrays of zeros, which take no memory.

    Args:
        programs: of the target.
        mesh: of the simulated devices.
        device: of them, whose calls are counted.
    """

    def __init__(self, programs: dict[Key, Any], mesh: Mesh, device: Any) -> None:
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
