"""What a step with virtual shards costs a device: what is alive at once, from shapes alone, and how often each program
runs, as the step itself says: it runs once, on simulated devices, with programs that compute nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.train.exact.block_programs import BlockPrograms
from roxxel_dist.train.exact.block_update import is_cut
from roxxel_dist.train.exact.blocks import Selection
from roxxel_dist.train.exact.compiled_step import SumTree, subtrees
from roxxel_dist.train.exact.gradient import Packed, ShardPrograms
from roxxel_dist.train.exact.layout import ShardLayout, shapes_of
from roxxel_dist.train.exact.long_rows import LongSums
from roxxel_dist.train.exact.piece_programs import AFTER, BEFORE, FIRST, LAST
from roxxel_dist.train.exact.step import RowSums, ShardedEvaluation, ShardedStep
from roxxel_dist.train.step.compile import Compiler, StepMemory
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams
from roxxel_dist.train.step.throughput import device_bytes

GROUP_COPIES = 6
"""Arrays of the size of a group's gradient while it is updated: its parts, the whole, and what Muon iterates on."""
SPREAD_COPIES = 3
"""Arrays of the size of a block that no device keeps while it is updated: its bits, itself, and the new one."""


@dataclass(frozen=True)
class ShardedMemory:
    """The memory of a training step with virtual shards: of its programs, as compiled, and of what is alive beside."""

    sums: RowSums | LongSums
    state: TrainState
    hparams: Hparams
    batch: Any
    """As shapes with shardings; so the state and the inputs."""

    @classmethod
    def of_step(
        cls, programs: ShardPrograms, layout: ShardLayout, state: TrainState, hparams: Hparams, batch: Any
    ) -> "ShardedMemory":
        """The memory of a step for such (abstract) arguments."""
        kind = LongSums if jax.tree.leaves(batch)[0].shape[0] < layout.count else RowSums
        return cls(kind.of_step(programs, layout, state, hparams, shapes_of(batch)), state, hparams, batch)

    @property
    def jitted(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """(jitted, its arguments) of the programs of a shard that take most."""
        found = [(self.sums.jitted, self.sums.args)]
        if isinstance(self.sums, LongSums):
            shapes, programs = self.sums.shapes, self.sums.shapes.programs
            found.append((jax.jit(programs.after_back), shapes.after_back))
            found.append((jax.jit(programs.before_back), shapes.before_back))
            found.append((jax.jit(programs.losses_back), shapes.losses))
        return found

    def compile(self, compiler: Compiler, *args: Any) -> StepMemory:
        """`Composite.compile`, but of these programs alone, on one device: they are measured, and not called."""
        del args
        device = [self.sums.update.layout.line.devices.flat[0]]
        return self.with_programs({each[0].__name__: compiler.each(*each, device)[0] for each in self.jitted})

    def with_programs(self, programs: Mapping[str, Any]) -> StepMemory:
        """The memory of one device; `programs`: by the name of what was compiled, those of `jitted` among them."""
        found = {each.__name__: programs[each.__name__].memory_analysis() for each, _ in self.jitted}
        temporaries = {name: account.temp_size_in_bytes for name, account in found.items()}
        if isinstance(self.sums, LongSums):
            peaks = long_peaks(self.sums, self.state, self.hparams, temporaries)
        else:
            (of_sums,) = temporaries.values()
            peaks = step_peaks(self.sums.update, self.sums.packed, self.state, self.hparams, of_sums)
        return StepMemory.of_parts(
            arguments=device_bytes((self.state, self.hparams, self.batch)),
            temporaries=peaks.most,
            results=0,
            code=sum(account.generated_code_size_in_bytes for account in found.values()),
        )


@dataclass(frozen=True, kw_only=True)
class StepPeaks:
    """Bytes of one device at most, of each part of a step, without state, inputs and batch."""

    gradient: int
    """The gathered model, sums of gradients that are held, the program of a shard."""
    exchange: int
    """The gathered model, the sums that a device sends, and those that it is sent."""
    update: int
    """The gathered model, totals, and what is gathered for the update."""

    @property
    def most(self) -> int:
        """The largest of them."""
        return max(self.gradient, self.exchange, self.update)


def step_peaks(
    programs: BlockPrograms, packed: Packed, state: TrainState, hparams: Hparams, temporaries: int
) -> StepPeaks:
    """The peaks for (abstract) sums of a shard and arguments with shardings; its program takes `temporaries` beside."""
    layout, sums = programs.layout, whole_bytes(packed)
    model = gathered_bytes((state.params, state.rest, hparams))
    shards = [layout.shards_of(device) for device in layout.line.devices.flat]
    trees = max(len(subtrees(own)) for own in shards)
    kept, update = _update_bytes(programs, packed, state)
    chunks = [whole_bytes(each) for each in packed.values()]
    # All as they are, and of one chunk a copy, its pieces, and what arrives.
    sent = 0 if layout.line.size == 1 else trees * (sums + 2 * max(chunks))
    return StepPeaks(
        gradient=model + sums * (1 + max(map(_held, shards))) + temporaries,
        exchange=model + int(sent + kept),
        update=model + int(kept + update),
    )


def long_peaks(own: LongSums, state: TrainState, hparams: Hparams, temporaries: Mapping[str, int]) -> StepPeaks:
    """The peaks where virtual shards cut rows; `temporaries` are those of its programs by name."""
    shapes, layout, kept = own.shapes, own.update.layout, own.shapes.kept
    uses = {use: whole_bytes(sums) for use, sums in shapes.sums.items()}
    peaks = step_peaks(own.update, own.packed, state, hparams, 0)
    model = gathered_bytes((state.params, state.rest, hparams))
    shards = [layout.shards_of(device) for device in layout.line.devices.flat]
    trees, held, most = max(len(subtrees(each)) for each in shards), max(map(_held, shards)), layout.most
    depth, cut = shapes.programs.layers, shapes.programs.cut
    of_block = most * whole_bytes(kept)
    # Keys and values of the rows of a device, and of one row the sums of their gradients.
    rows = whole_bytes(shapes.kv) * (max(1, most // cut.parts) if layout.is_even else layout.count // cut.parts)
    sums = sum(math.prod(leaf.shape) * 4 for leaf in shapes.kv)
    of_layer, top = trees * (uses[BEFORE] + uses[AFTER]), trees * uses[LAST]
    inputs = most * whole_bytes((shapes.piece, shapes.segments))
    gradients = most * (2 * whole_bytes(kept.x) + whole_bytes((kept.q, kept.normed)))
    attention = rows + (held + 2) * sums + gradients + (held + 1) * uses[AFTER] + temporaries["after_back"]
    projections = sums + gradients + (held + 1) * uses[BEFORE] + temporaries["before_back"]
    losses = gradients + (held + 1) * uses[LAST] + temporaries["losses_back"]
    # The backward pass begins with all that the forward pass kept, and ends with the gradients of all layers.
    begins = depth * of_block + max(losses, top + max(attention, projections))
    ends = of_block + top + depth * of_layer + max(attention, projections)
    joins = top + depth * of_layer + trees * (uses[FIRST] + whole_bytes(own.packed)) + temporaries["join_sums"]
    return replace(peaks, gradient=model + inputs + max(begins, ends, joins))


def whole_bytes(tree: Any) -> int:
    """Bytes of all leaves, whole."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gathered_bytes(tree: Any) -> int:
    """Bytes of the leaves that are cut, whole: what to gather them takes on each device."""
    return whole_bytes([leaf for leaf in jax.tree.leaves(tree) if is_cut(leaf)])


def _held(shards: range) -> int:
    """The most sums that a device holds while it computes another one."""
    tree, most = SumTree(lambda left, right: left, shards.start), 0
    for shard in shards:
        most = max(most, tree.count)
        tree.put(shard)
    return most


def _update_bytes(programs: BlockPrograms, packed: Packed, state: TrainState) -> tuple[float, float]:
    """(the totals that a device gets, the most that an update takes beside them and the gathered parameters)."""
    blocks = programs.sums.blocks
    sizes = [whole_bytes([packed[name] for name in group]) for group in programs.sums.chunks]
    owner = programs.ownership(state)
    share = sum(sizes) * owner.most / owner.count
    first, *others = (
        (gathered_bytes(_moments(state, names)), size) for names, size in zip(blocks.groups, sizes, strict=True)
    )
    rest = whole_bytes(packed) - sum(sizes)
    together = gathered_bytes(_moments(state, blocks.small)) + rest
    needs = [3 * share, together, *(moments + GROUP_COPIES * size for moments, size in others)]
    if not owner.is_cut:
        arrays = Selection.of_names(state, blocks.groups[0]).leaves(state)[0]
        needs.append(SPREAD_COPIES * (whole_bytes(arrays) + first[1]) / owner.count)
    elif len(owner.teams[0]) > 1:
        needs.append(2 * first[1] * len(owner.owned[0]) / owner.count)
    return rest + share, max(needs)


def _moments(state: TrainState, names: tuple[str, ...]) -> list[Any]:
    """What the optimizer keeps of some parameters."""
    params = {id(leaf) for leaf in state.params.values()}
    return [leaf for leaf in Selection.of_names(state, names).leaves(state)[0] if id(leaf) not in params]


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
    """How often one of all devices, by its number, runs each program in one `step` on a `simulated_mesh`; the
    `programs` and the step's `args`, shapes with shardings, are those of the target."""
    mesh = step.layout.mesh

    def placed(leaf: Any) -> Any:
        on = mesh
        if leaf.sharding.mesh.devices.shape != mesh.devices.shape:  # that of a phase with few rows
            on = Mesh(mesh.devices.reshape(leaf.sharding.mesh.devices.shape), leaf.sharding.mesh.axis_names)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, leaf.sharding.spec))

    args = jax.tree.map(placed, args)
    counted = CountedPrograms(programs, mesh, step.layout.line.devices.flat[number])
    with jax.set_mesh(one_device(mesh)):
        program = step.compile(Compiler(counted.one, counted.each), *args)
    program(*jax.tree.map(lambda leaf: zeros(leaf, leaf.sharding), args))
    return counted.calls


class CountedPrograms:
    """The programs of a target on simulated devices: they give arrays of zeros, which take no memory, and calls on
    `device` are counted."""

    def __init__(self, programs: Mapping[Key, Any], mesh: Mesh, device: Any) -> None:
        self._programs, self._mesh, self._device = programs, mesh, device
        self.calls: Counter[Key] = Counter()

    def one(self, jitted: Any, args: Sequence[Any], mesh: Mesh) -> Any:
        """`Compiler.one`."""
        key = key_of(jitted, args)
        places = [NamedSharding(mesh, place.spec) for place in jax.tree.leaves(self._programs[key].output_shardings)]
        return self._called(key, mesh, jitted, args, places)

    def each(self, jitted: Any, args: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """`Compiler.each`."""
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
