"""How parameters lie on a mesh of `AXES`: as the metadata of each asks, else by one rule.

Along "tensor" devices share the work on the same rows (Shoeybi et al., "Megatron-LM", 2019): a matrix that leads into
heads, hidden units or the vocabulary is split along its output dimension, the one that leads back along its input
dimension. Between the two each device has its own heads or hidden units, and their results are added once. Along "fsdp"
devices share memory alone (Rajbhandari et al., "ZeRO", 2020): the other dimension is split, and gathered for use.
Along "expert" each has some of the experts of a mixture, and tokens go there (Lepikhin et al., "GShard", 2020).
Decision 14.
"""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import AXES, DATA, EXPERT, FSDP, TENSOR, TOKENS, row_axes, row_shards, token_shards
from roxxel_dist.process.exit_codes import UserError

Axes = tuple[str | None, ...]
"""The axis that each dimension of an array is meant for, or None. An array with more dimensions has those of layers
that are stacked in front."""
MESH_AXES = "mesh_axes"
"""Metadata of an `nnx.Param`: its `Axes`. They are preferences: an axis that the mesh lacks, or that does not divide
the dimension, is left out. An `out_sharding` (`nnx.with_partitioning`) must be possible."""
FSDP_MIN_SIZE = 1 << 16
"""Arrays of fewer elements stay whole, as norms and biases do; matrices from 256 x 256 on are cut. To gather a small
array costs a collective's delay in every step and saves next to nothing."""


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh, requested: P | None, fsdp: bool, axes: Axes | None = None
) -> NamedSharding:
    """The sharding of the array `name`: by its `out_sharding`, else by its `axes`, else by the rule (`fsdp_spec`).

    Without `fsdp` no array is cut over "fsdp", and the rule cuts none at all.

    Raises:
        ValueError: the mesh lacks an axis that the module asks for, or the axis does not divide the dimension.
    """
    if requested is None and axes is not None:
        return NamedSharding(mesh, axes_spec(shape, mesh, axes, fsdp=fsdp))
    if requested is None:
        return NamedSharding(mesh, fsdp_spec(shape, mesh) if fsdp else P())
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in requested]
    names = [axis for entry in entries for axis in entry]
    if missing := [axis for axis in names if axis not in mesh.axis_names]:
        raise UserError(
            f"{name} is partitioned over {missing[0]!r}, an axis that the mesh does not have "
            f"({', '.join(mesh.axis_names)}): use a mesh with it, or nnx.logical_axis_rules([({missing[0]!r}, None)])"
        )
    pieces = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
    divides = len(pieces) <= len(shape) and not any(n % k for n, k in zip(shape, pieces, strict=False))
    if not divides or len(set(names)) < len(names):
        raise UserError(
            f"{name} of shape {shape} cannot be partitioned as {requested} over the mesh {dict(mesh.shape)}: "
            f"each axis must divide its dimension and be there once"
        )
    return NamedSharding(mesh, requested)


def fsdp_axis(mesh: Mesh) -> str:
    """The axis that fsdp cuts parameters over: "fsdp", or the mesh's first one where nothing lies along that."""
    return FSDP if mesh.shape.get(FSDP, 1) > 1 else mesh.axis_names[0]


def fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """The rule: the largest dimension that the axis of fsdp divides is cut over it; small arrays stay whole."""
    axis = fsdp_axis(mesh)
    fitting = [i for i, size in enumerate(shape) if size and size % mesh.shape[axis] == 0]
    if math.prod(shape) < FSDP_MIN_SIZE or not fitting:
        return P()
    cut = max(fitting, key=lambda i: shape[i])
    return P(*(axis if i == cut else None for i in range(cut + 1)))


def axes_spec(shape: tuple[int, ...], mesh: Any, axes: Axes, *, fsdp: bool) -> P:
    """The spec of `axes` on this mesh. Small arrays stay whole, but for those of experts.

    A dimension that "expert" or "tensor" does not divide is not cut over it. One that fsdp does not divide leaves that
    to the largest other dimension that is free and divides.
    """
    first = len(shape) - len(axes)  # behind the layers
    spec: list[str | None] = [None] * len(shape)
    large = math.prod(shape[first:]) >= FSDP_MIN_SIZE
    for axis in (EXPERT, *[TENSOR] * large):
        pieces = mesh.shape.get(axis, 1)
        if axis in axes and pieces > 1 and shape[i := first + axes.index(axis)] % pieces == 0:
            spec[i] = axis
    if fsdp and large and FSDP in axes:
        intended, axis = first + axes.index(FSDP), fsdp_axis(mesh)
        free = [i for i in range(first, len(shape)) if spec[i] is None and shape[i] % mesh.shape[axis] == 0]
        if free:
            spec[max(free, key=lambda i: (i == intended, shape[i]))] = axis
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def has_all_axes(mesh: Any) -> bool:
    """Whether a mesh is one of `make_mesh` or `phase_mesh`, and XLA cuts arrays along all of its axes, or all but those
    of the rows, which a `jax.shard_map` has cut."""
    axes = tuple(axis for axis in mesh.axis_names if axis != TOKENS)
    left = [kind for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if axis not in mesh.manual_axes]
    return axes == AXES and TENSOR not in mesh.manual_axes and set(left) == {AxisType.Auto}


def constrain_batch(x: jax.Array) -> jax.Array:
    """`x` [B, L, ...] cut as a batch is, if a mesh from `make_mesh` or `phase_mesh` is set and divides its rows.

    Rows are cut over `row_axes`. Tokens are cut over "tokens", and over "tensor" too, as far as these divide
    them: between two layers the devices along "tensor" would keep the same numbers (Korthikanti et al., "Reducing
    activation recomputation", 2022). Left to itself, XLA may cut activations as the parameters of fsdp are cut, and
    send them around. Along "data" alone it does what is meant, and programs stay the same to the bit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_all_axes(mesh) or mesh.size == mesh.shape[DATA] or x.shape[0] % row_shards(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, P(row_axes(mesh), token_axes(mesh, x.shape[1])))


def constrain_tokens(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, L] of numbers of tokens, cut as `constrain_batch` does where a phase cuts its rows."""
    cut = token_shards(jax.sharding.get_abstract_mesh()) > 1
    return tuple(map(constrain_batch, arrays)) if cut else arrays


def on_phase_mesh(tree: Any) -> Any:
    """A state of the run's mesh as arrays of the phase's, where that is another one and set; they stay where they are.

    Some of jax's functions, such as those of random keys, take arrays of one mesh only.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if token_shards(mesh) == 1:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, P(*[P.UNCONSTRAINED] * leaf.ndim)), tree)


def token_axes(mesh: Any, length: int) -> tuple[str, ...]:
    """The axes of a mesh that `length` tokens of a row are cut over between the layers.

    "tokens" need not divide them: then the last devices have fewer.
    """
    axes: tuple[str, ...] = (TOKENS,) if 1 < token_shards(mesh) <= length else ()
    pieces = token_shards(mesh) * mesh.shape[TENSOR]
    return (*axes, TENSOR) if mesh.shape[TENSOR] > 1 and length % pieces == 0 else axes
