"""Where virtual shards and copies of the state lie: the rules of a run, global arrays and each device's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.train.train_state import TrainState
from roxxel_dist.train.train_step import check_batches

SHARDS = "shards"
"""The one axis of `Layout.line`."""


def check_shapes(shapes: Sequence[Shape], grad_accum: int, virtual_shards: int, mesh: Mesh) -> None:
    """Raises UserError for a phase whose batch cannot be divided as the run asks for; `plan` and `train` share it."""
    check_batches(shapes, grad_accum)
    if virtual_shards:
        check_virtual_shards(virtual_shards, shapes, grad_accum, mesh)


def check_virtual_shards(count: int, shapes: Sequence[Shape], grad_accum: int, mesh: Mesh) -> None:
    """Raises ValueError where the devices do not divide the shards, or these a phase's batch.

    `count` is a power of two already, as `LoopOptions` says.
    """
    if mesh.size > 1 and max(mesh.devices.shape) < mesh.size:
        raise UserError(
            f"virtual_shards is {count}, and the mesh is {dict(mesh.shape)}: each device keeps the whole state, so "
            f"use a mesh of one axis, without tensor_devices and fsdp, or set virtual_shards to 0"
        )
    if count % mesh.size:
        raise UserError(
            f"virtual_shards is {count}, which {mesh.size} device(s) do not divide: set n_devices to 1, 2, 4, …, at "
            f"most {count}"
        )
    for i, shape in enumerate(shapes):
        if shape.batch_size % (count * grad_accum):
            accumulated = f" x grad_accum ({grad_accum})" if grad_accum > 1 else ""
            raise UserError(
                f"phase {i + 1}: batch_size is {shape.batch_size}, which is not a multiple of virtual_shards ({count})"
                f"{accumulated}: use a multiple of {count * grad_accum}"
            )


def on_all_devices(tree: Any, mesh: Mesh) -> Any:
    """A tree of arrays of one device, the same in each process, whole on each device of the mesh.

    Of shapes it gives shapes with that sharding.
    """
    everywhere = NamedSharding(mesh, P())
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
        copies = [jax.device_put(leaf.addressable_data(0), device) for device in own]
        return jax.make_array_from_single_device_arrays(leaf.shape, everywhere, copies)

    return jax.tree.map(place, tree)


def copies(tree: Any, devices: Sequence[Any]) -> list[Any]:
    """Of a tree of global arrays what lies on each of these devices of this process; nothing is copied."""
    leaves, treedef = jax.tree.flatten(tree)
    parts = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    return [jax.tree.unflatten(treedef, [part[device] for part in parts]) for device in devices]


@dataclass(frozen=True)
class Layout:
    """Which of `count` virtual shards each device has: those of its rows, which are contiguous."""

    count: int
    sharding: NamedSharding
    """Of a (rows, tokens) batch."""

    @property
    def mesh(self) -> Mesh:
        """That of the run."""
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh

    @cached_property
    def line(self) -> Mesh:
        """All devices along one axis, in the order of the rows that they hold."""
        mesh = self.mesh
        places = self.sharding.devices_indices_map((mesh.size, 1))
        rows = {device: index[0].indices(mesh.size)[:2] for device, index in places.items()}
        if {stop - start for start, stop in rows.values()} != {1}:
            raise UserError(
                f"virtual_shards is {self.count}, and data_sharding is {self.sharding.spec} on the mesh "
                f"{dict(mesh.shape)}: the rows of a batch must be split over all devices, so leave data_sharding out"
            )
        devices: list[Any] = sorted(rows, key=lambda device: rows[device])
        return Mesh(np.array(devices), (SHARDS,), axis_types=(AxisType.Auto,))

    @cached_property
    def devices(self) -> list[Any]:
        """The devices of this process, in that order."""
        return [device for device in self.line.devices.flat if device.process_index == jax.process_index()]

    @cached_property
    def per_device(self) -> int:
        """Virtual shards of each device."""
        return self.count // self.line.size

    def shards_of(self, device: Any) -> range:
        """The numbers of the virtual shards of a device."""
        first = list(self.line.devices.flat).index(device) * self.per_device
        return range(first, first + self.per_device)

    @cached_property
    def cut(self) -> NamedSharding:
        """Of an array [devices, N], a row of which is on each device."""
        return NamedSharding(self.line, P(SHARDS))

    def along(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """[1, N] arrays of the devices of this process, in order, as a part of one array [devices, N]."""
        shape = (self.line.size, *pieces[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.cut, list(pieces), dtype=pieces[0].dtype)

    @cached_property
    def _places(self) -> list[int]:
        """The number of each device's part of a batch among those of this process."""
        own = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        return [own.index(device) for device in self.devices]

    def rows(self, batch: Any) -> list[Any]:
        """The rows of a batch on each device of this process; `copies` asks each array for more than that."""
        leaves, treedef = jax.tree.flatten(batch)
        return [jax.tree.unflatten(treedef, [leaf.addressable_data(i) for leaf in leaves]) for i in self._places]


@dataclass(eq=False)
class DeviceStates:
    """A train state as a copy on each device of this process, which programs of one device take and give."""

    parts: list[TrainState]
    mesh: Mesh
    _whole: TrainState | None = field(default=None, repr=False)

    @property
    def whole(self) -> TrainState:
        """The same arrays as global ones, whole on each device of the mesh; they are not copied."""
        if self._whole is None:
            everywhere = NamedSharding(self.mesh, P())
            whole: TrainState = jax.tree.map(
                lambda *parts: jax.make_array_from_single_device_arrays(parts[0].shape, everywhere, list(parts)),
                *self.parts,
            )
            self._whole = whole
            return whole
        return self._whole
