"""Devices of all processes as one mesh, and how arrays lie on it."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.xla_flags import CPU_DEVICES
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import mesh_shape

DATA, FSDP, EXPERT, TENSOR = AXES = "data", "fsdp", "expert", "tensor"
"""The axes of a mesh: copies of the model, the devices that share one copy of its parameters, those that each have some
of the experts, and those that compute on the same rows together."""
TOKENS = "tokens"
"""The axis of a `phase_mesh` that the tokens of a row are cut over."""
MOST_SIMULATED = 1024
"""Devices that a CPU simulates: each has threads of its own, and XLA needs 7 s of CPU time to make 4,096 of them."""


def make_mesh(
    n_devices: int = 0, *, fsdp: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the devices of all processes, with the axes "data", "fsdp", "expert" and "tensor".

    jax orders the devices by how they are connected (on TPU), so that neighbours along "tensor", whose devices talk
    most, are neighbours; elsewhere they are neighbours in `jax.devices()`.

    Args:
        n_devices: how many devices to use, 0 for all.
        fsdp: size of "fsdp", 0 for all that "expert" and "tensor" leave; "data" gets the rest.
        expert: size of "expert".
        tensor: size of "tensor".
        devices: the devices there are; those of all processes if not given.

    Returns:
        A mesh of [data, fsdp, expert, tensor] devices; all four axes are there, also those of size 1.

    Raises:
        ValueError: more devices are asked for than there are, or they cannot be shared out so.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(len(devices), n_devices=n_devices, fsdp=fsdp, expert=expert, tensor=tensor)
    count = math.prod(shape)
    # Auto axes: with jax's newer default (Explicit) an ordinary model's gather raises ShardingTypeError.
    types = (AxisType.Auto,) * len(AXES)
    if count == len(devices):
        return jax.make_mesh(shape, AXES, types, devices=devices)
    # Of some of them jax knows no order: they need not make up a torus.
    return Mesh(np.asarray(devices[:count]).reshape(shape), AXES, axis_types=types)


def device_type(mesh: Any = None) -> Any:
    """The kind of the devices of a mesh: an object with `platform` ("cpu", "gpu", "tpu") and `device_kind`.

    A program is traced for its mesh, which may have other devices than this process: those of another backend of jax,
    or of a machine that is elsewhere.

    Args:
        mesh: by default the one that is set (`jax.set_mesh`). If it does not name its devices, or none is set, they are
            those that jax uses here.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    return getattr(mesh, "abstract_device", None) or default_device()


def default_device() -> Any:
    """The device that jax computes on where no mesh is set: that of `jax.default_device`, else its first one."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


def one_device(mesh: Mesh, device: Any = None) -> Mesh:
    """A mesh of a device, by default this process's first one, with the axes of `mesh`: for programs of one device."""
    device = device or mesh.local_devices[0]
    shape = (1,) * len(mesh.axis_names)
    return Mesh(np.asarray([device]).reshape(shape), mesh.axis_names, axis_types=(AxisType.Auto,) * len(shape))


def row_axes(mesh: Any) -> tuple[str, ...]:
    """The axes, one at least, that the rows of a batch are cut over: all but "tensor", those of size 1 left out.

    Of a mesh with other axes it is the first one. Within a `jax.shard_map` over them a program sees the rows of its
    device alone, and there is none left.
    """
    axes: tuple[str, ...] = (
        tuple(axis for axis in (DATA, FSDP, EXPERT) if axis in mesh.axis_names) or mesh.axis_names[:1]
    )
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1) or axes[:1]
    return tuple(axis for axis in axes if axis not in mesh.manual_axes)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch on a mesh: rows over `row_axes`, or the first axis of a mesh with other ones.

    Args:
        mesh: from `make_mesh`, or one of your own.

    Returns:
        The sharding of a (rows, tokens) array. Devices along "tensor" hold the same rows.
    """
    return NamedSharding(mesh, P(row_axes(mesh), None))


def row_shards(mesh: Any) -> int:
    """Into how many pieces the rows of a batch are cut."""
    return math.prod(mesh.shape[axis] for axis in row_axes(mesh))


def token_shards(mesh: Any) -> int:
    """Into how many pieces the tokens of a row are cut: 1 but on a `phase_mesh`."""
    return mesh.shape.get(TOKENS, 1)


def phase_mesh(mesh: Mesh, rows: int) -> Mesh:
    """The same devices for a phase whose rows they do not divide: rows are cut first, then the tokens of each.

    R rows on N devices along "data" x "fsdp" are cut into r x t pieces, r x t = N, where r is the largest divisor of N
    that divides R. A group of t neighbours shares its rows, each with its part of the tokens. The order of the devices
    stays, so arrays on either mesh go into one program. Devices along "expert" have rows of their own, so R is that of
    each: "expert" must divide the rows.

    Args:
        mesh: from `make_mesh`; one of your own is returned as it is.
        rows: R, of a batch, or of a micro-batch.

    Returns:
        `mesh` itself where N divides R, or nothing can be cut so, else one of [data, fsdp, tokens, expert, tensor]
        devices: r = data x fsdp, t = tokens.
    """
    if mesh.axis_names != AXES or rows % mesh.shape[EXPERT]:
        return mesh
    devices = mesh.shape[DATA] * mesh.shape[FSDP]
    pieces = math.gcd(devices, rows // mesh.shape[EXPERT])
    if pieces == devices:
        return mesh
    data = math.gcd(pieces, mesh.shape[DATA])
    shape = data, pieces // data, devices // pieces, mesh.shape[EXPERT], mesh.shape[TENSOR]
    return Mesh(mesh.devices.reshape(shape), (DATA, FSDP, TOKENS, EXPERT, TENSOR), axis_types=(AxisType.Auto,) * 5)


def simulate_devices(count: int) -> None:
    """Have jax make so many CPU devices and no others. It comes before jax makes its first device.

    Raises:
        ValueError: fewer than 1, more than `MOST_SIMULATED`, or jax has made others already.
    """
    if not 1 <= count <= MOST_SIMULATED:
        raise UserError(
            f"devices is {count}: it must be from 1 to {MOST_SIMULATED:,}, for each is simulated on this CPU; "
            f"`plan --target` compiles for more"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # it has made them, and another number of them was set
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) != count:
            raise UserError(
                f"devices is {count}, and jax has made {len(devices)} {devices[0].platform} device(s) already: leave "
                f"it out, or plan in a process of its own"
            ) from error
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Two ways to say how many there are, and jax takes the flag.
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(f"--{CPU_DEVICES}"))
    jax.config.update("jax_platforms", "cpu")


def num_devices(mesh: Mesh) -> int:
    """The number of devices that the mesh spans, on all processes."""
    return mesh.size


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put every leaf of `tree` whole on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def scalars_on(mesh: Mesh, numbers: Mapping[str, float]) -> dict[str, jax.Array]:
    """Numbers as float32[] on every device of a mesh that other processes may share."""
    everywhere = NamedSharding(mesh, P())
    return {
        name: jax.make_array_from_callback((), everywhere, lambda _, value=value: np.float32(value))
        for name, value in numbers.items()
    }


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch on a mesh, every leaf cut along its first axis over the mesh's `row_axes`.

    Raises:
        ValueError: the first axis is not a multiple of the devices.
    """
    size = row_shards(mesh)
    for rows in (leaf.shape[0] for leaf in jax.tree.leaves(batch)):
        if rows % size:
            raise UserError(
                f"a batch has {rows} rows, which is not a multiple of the {size} devices: use a multiple of {size}"
            )
    return jax.device_put(batch, NamedSharding(mesh, P(row_axes(mesh))))


def micro_batches(grad_accum: int, rows: int) -> int:
    """Into how many micro-batches a batch of so many rows is cut: each has a row at least."""
    return min(grad_accum, rows)


def fit_sharding(sharding: NamedSharding, shape: tuple[int, int], grad_accum: int = 1) -> NamedSharding:
    """The sharding that a (rows, tokens) batch gets: the asked one where it divides the rows of each micro-batch.

    Otherwise, on a mesh of `make_mesh`, that of a `phase_mesh`: each device has whole rows, and computes on its part of
    their tokens. With a mesh or a sharding of the user's own it is the same mesh axes along the tokens, if those divide
    them, and else a whole copy on every device.
    """
    rows, length = shape
    micro = rows // micro_batches(grad_accum, rows), length
    if _divides(sharding, micro):
        return sharding
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and sharding.is_equivalent_to(batch_sharding(mesh), 2):
        fitted = phase_mesh(mesh, micro[0])
        if fitted != mesh:
            return batch_sharding(fitted)
    if _divides(sharding, shape):
        return sharding
    axes = [axis for entry in sharding.spec if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
    along_tokens = NamedSharding(sharding.mesh, P(None, tuple(axes)))
    return along_tokens if _divides(along_tokens, shape) else NamedSharding(sharding.mesh, P())


def _divides(sharding: NamedSharding, shape: tuple[int, int]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
