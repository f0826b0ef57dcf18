"""How parameters lie on a mesh: as their module asks, else by one rule."""

import math

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FSDP_MIN_SIZE = 1 << 16
"""Arrays of fewer elements stay whole, as norms and biases do; matrices from 256 x 256 on are cut. To gather a small
array costs a collective's delay in every step and saves next to nothing."""


def parameter_sharding(name: str, shape: tuple[int, ...], mesh: Mesh, asked: P | None, fsdp: bool) -> NamedSharding:
    """Where the array `name` lies: as `asked` by its module, else by the rule where `fsdp` is on, else everywhere.

    Raises:
        ValueError: the mesh lacks an axis that the module asks for, or the axis does not divide the dimension.
    """
    if asked is None:
        return NamedSharding(mesh, fsdp_spec(shape, mesh) if fsdp else P())
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in asked]
    wanted = [axis for entry in entries for axis in entry]
    if missing := [axis for axis in wanted if axis not in mesh.axis_names]:
        raise ValueError(
            f"{name} is partitioned over {missing[0]!r}, an axis that the mesh does not have "
            f"({', '.join(mesh.axis_names)}): use a mesh with it, or nnx.logical_axis_rules([({missing[0]!r}, None)])"
        )
    pieces = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
    divides = len(pieces) <= len(shape) and not any(n % k for n, k in zip(shape, pieces, strict=False))
    if not divides or len(set(wanted)) < len(wanted):
        raise ValueError(
            f"{name} of shape {shape} cannot be partitioned as {asked} over the mesh {dict(mesh.shape)}: "
            f"each axis must divide its dimension and be there once"
        )
    return NamedSharding(mesh, asked)


def fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """The rule: the largest dimension that the mesh's first axis divides is cut along it; small arrays stay whole."""
    axis = mesh.axis_names[0]
    fitting = [i for i, size in enumerate(shape) if size and size % mesh.shape[axis] == 0]
    if math.prod(shape) < FSDP_MIN_SIZE or not fitting:
        return P()
    cut = max(fitting, key=lambda i: shape[i])
    return P(*(axis if i == cut else None for i in range(cut + 1)))
