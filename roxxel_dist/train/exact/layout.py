"""Where virtual shards and copies of the state lie: the rules of a run, global arrays and each device's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import AXES, EXPERT, TENSOR, micro_batches
from roxxel_dist.curriculum.segments import Shape, check_batches
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import check_shard_count
from roxxel_dist.train.step.state import TrainState

SHARDS = "shards"
"""The one axis of `ShardLayout.line`."""
Programs = Sequence[Any]
"""One compiled program, on each device of this process."""


def check_shapes(
    shapes: Sequence[Shape], grad_accum: int, virtual_shards: int, mesh: Mesh, *, cuts_rows: bool = True
) -> None:
    """Raises UserError for a phase whose batch cannot be divided as the run asks for; `plan` and `train` share it.

    `cuts_rows` says whether the model and the loss are those whose rows virtual shards can cut (`can_cut_rows`).
    """
    check_batches(shapes, grad_accum)
    if (experts := mesh.shape.get(EXPERT, 1)) > 1:
        for i, shape in enumerate(shapes):
            if (rows := shape.batch_size // micro_batches(grad_accum, shape.batch_size)) % experts:
                what = "batch_size" if grad_accum == 1 else f"batch_size / grad_accum ({grad_accum})"
                raise UserError(
                    f"phase {i + 1}: {what} is {rows}, and expert_devices ({experts}) divide the rows too: use "
                    f"{-(-rows // experts) * experts}, or {math.gcd(rows, experts)} expert_devices"
                )
    if virtual_shards:
        check_virtual_shards(virtual_shards, shapes, grad_accum, mesh, cuts_rows=cuts_rows)


def can_cut_rows(model: Any, loss_fn: Any) -> bool:
    """Whether virtual shards can cut rows: of the built-in Transformer, or its builder, and its loss."""
    if not isinstance(model, Transformer | TransformerBuilder) or loss_fn not in (token_losses, next_token_loss):
        return False
    # One program is for all layers, and sees one part of a row.
    return model.config.period == 1 and model.config.expert_capacity_factor is None


def check_virtual_shards(
    count: int, shapes: Sequence[Shape], grad_accum: int, mesh: Mesh, *, cuts_rows: bool = True
) -> None:
    """Raises UserError where there are more devices than shards, or these do not divide a phase's batch.

    `count` is a power of two already, as `LoopOptions` says.
    """
    if mesh.shape.get(EXPERT, 1) > 1:
        raise UserError(
            f"virtual_shards is {count}, and expert_devices is {mesh.shape[EXPERT]}: an expert's product is of rows of "
            f"several shards, whose number changes how it is added. Use fsdp, or set virtual_shards to 0"
        )
    if mesh.shape.get(TENSOR, 1) > 1 or (mesh.axis_names != AXES and sum(size > 1 for size in mesh.devices.shape) > 1):
        raise UserError(
            f"virtual_shards is {count}, and the mesh is {dict(mesh.shape)}: devices that share a product add it in "
            f"another order. Leave tensor_devices and meshes of your own with several axes out, or set virtual_shards "
            f"to 0"
        )
    check_shard_count(count, mesh.size)
    for i, shape in enumerate(shapes):
        phase, rows = f"phase {i + 1}: batch_size is {shape.batch_size}", shape.batch_size
        if rows < count and count % rows == 0:
            _check_long_rows(phase, count, shape, grad_accum, mesh, cuts_rows)
        elif rows < count:
            raise UserError(
                f"{phase}, and virtual_shards ({count}) cuts each row into {count} / {rows} shards, which is no whole "
                f"number: use a power of two, or a multiple of {count * grad_accum}"
            )
        elif rows % (count * grad_accum):
            accumulated = f" x grad_accum ({grad_accum})" if grad_accum > 1 else ""
            raise UserError(
                f"{phase}, which is not a multiple of virtual_shards ({count}){accumulated}: use a multiple of "
                f"{count * grad_accum}"
            )


def _check_long_rows(phase: str, count: int, shape: Shape, grad_accum: int, mesh: Mesh, cuts_rows: bool) -> None:
    """Raises UserError for a phase whose rows virtual shards would have to cut, and cannot."""
    rows, length = shape.batch_size, shape.seq_len
    cut = f"{phase}, so virtual_shards ({count}) cuts each row into {count // rows} shards"
    if not cuts_rows:
        raise UserError(
            f"{cut}. That needs the built-in model and its loss, without sliding_window_pattern, "
            f"no_rope_layer_interval and expert_capacity_factor: use a multiple of {count * grad_accum}, or set "
            f"virtual_shards to 0"
        )
    if micro_batches(grad_accum, rows) > 1:
        raise UserError(
            f"{cut}, which are computed at once, and grad_accum is {grad_accum}: use 1 row, a multiple of "
            f"{count * grad_accum}, or set grad_accum to 1"
        )
    if length - 1 < 2 * count // rows:
        raise UserError(
            f"{cut} of two pieces, and it has {length - 1} tokens to predict: use rows of at least "
            f"{2 * count // rows + 1} tokens, or fewer virtual_shards"
        )
    if mesh.size > 1 and mesh.axis_names != AXES:
        raise UserError(
            f"{cut}, which it can on a mesh of make_mesh alone, and the mesh is {dict(mesh.shape)}: leave mesh out, or "
            f"use a multiple of {count * grad_accum}"
        )


def rows_sharding(sharding: NamedSharding, virtual_shards: int) -> NamedSharding:
    """How a batch lies on the mesh: as without virtual shards, or whole on each device where these do not divide.

    `virtual_shards` is 0 for none.
    """
    assert isinstance(sharding.mesh, Mesh)
    return NamedSharding(sharding.mesh, P()) if virtual_shards % sharding.mesh.size else sharding


def place_like(tree: Any, like: Any) -> Any:
    """A tree of arrays of one device, the same in each process, on the mesh: placed as `like`, its shapes, says.

    Of shapes it gives shapes with that sharding.
    """

    def place(leaf: Any, like: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)
        whole, sharding = leaf.addressable_data(0), like.sharding
        if not sharding.is_fully_replicated:
            value = np.asarray(whole)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index].copy())
        own = [device for device in sharding.mesh.devices.flat if device.process_index == jax.process_index()]
        parts = [jax.device_put(whole, device) for device in own]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

    return jax.tree.map(place, tree, like)


def shapes_of(tree: Any) -> Any:
    """Shapes and types of a tree, without places: a program of one device has none."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def rows_like(batch: Any, rows: int) -> Any:
    """Shapes of so many rows of a batch, without places."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)


@dataclass(frozen=True)
class ShardLayout:
    """Which of `count` virtual shards each device has: those of its rows, which are contiguous."""

    count: int
    sharding: NamedSharding
    """Of a (rows, tokens) batch."""

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the run."""
        assert isinstance(self.sharding.mesh, Mesh)
        return self.sharding.mesh

    @cached_property
    def line(self) -> Mesh:
        """The devices along one axis, in the order of the rows that they hold."""
        mesh = self.mesh
        if not self.is_even:
            return Mesh(mesh.devices.reshape(-1), (SHARDS,), axis_types=(AxisType.Auto,))
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
    def is_even(self) -> bool:
        """Whether all devices have as many shards; else each holds all rows of a batch, and takes its own of them."""
        return self.count % self.mesh.size == 0

    @cached_property
    def most(self) -> int:
        """Virtual shards of the device that has most of them."""
        return -(-self.count // self.line.size)

    def shards_of(self, device: Any) -> range:
        """The numbers of the virtual shards of a device."""
        number, size = list(self.line.devices.flat).index(device), self.line.size
        return range(self.count * number // size, self.count * (number + 1) // size)

    @cached_property
    def owned(self) -> list[range]:
        """The numbers of the virtual shards of each device of this process."""
        return [self.shards_of(device) for device in self.devices]

    @cached_property
    def turns(self) -> list[tuple[int, int]]:
        """(number of a device of this process, of a shard among its own), in the order in which shards are computed:
        every device has something to do at once."""
        return [(i, k) for k in range(self.most) for i, own in enumerate(self.owned) if k < len(own)]

    @cached_property
    def numbers(self) -> list[list[jax.Array]]:
        """The number of each shard, int32[], by device of this process."""
        return [
            [jax.device_put(np.int32(number), device) for number in own]
            for own, device in zip(self.owned, self.devices, strict=True)
        ]

    @cached_property
    def cut(self) -> NamedSharding:
        """The sharding of an array [devices, N], a row of which is on each device."""
        return NamedSharding(self.line, P(SHARDS))

    @cached_property
    def places(self) -> list[int]:
        """The number of each device's part of a batch among those of this process."""
        own = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        return [own.index(device) for device in self.devices]


@dataclass(eq=False)
class DeviceStates:
    """A train state as what each device of this process has of it: the whole, or with fsdp its slices."""

    parts: list[TrainState]
    like: TrainState
    """The shapes of the whole, with shardings."""
    _whole: TrainState | None = field(default=None, repr=False)

    @property
    def whole(self) -> TrainState:
        """The state as global arrays; they are not copied."""
        if self._whole is None:
            whole: TrainState = jax.tree.map(
                lambda leaf, *parts: jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(parts)),
                self.like,
                *self.parts,
            )
            self._whole = whole
            return whole
        return self._whole
