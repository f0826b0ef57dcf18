"""The ways to divide a step that are compared: what devices there must be, and which batch it is of."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import batch_sharding, make_mesh
from roxxel_dist.process.exit_codes import UserError

NAMES = ("rows", "tokens", "fsdp", "tensor", "experts", "accum", "packing", "virtual")
"""All layouts, in the order in which they are compared."""
OWN_MESH = "mesh"
"""The layout of a mesh with axes of the user's own."""
MICRO_BATCHES = 4
BatchName = Literal["rows", "few rows", "rows of shards", "documents", "packed"]
"""Of which batch a step is: rows that the devices divide; fewer rows than devices; a row for each virtual shard;
documents, each a row of its own; the same documents packed into rows."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to divide a step."""

    name: str
    text: str
    """How it divides the batch, or the state, in words."""
    mesh: Mesh
    sharding: NamedSharding
    """Of a (rows, tokens) batch."""
    batch: BatchName = "rows"
    truth: BatchName = "rows"
    """The batch of the reference."""
    fsdp: bool = False
    grad_accum: int = 1
    virtual_shards: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What it is divided over -> into how many parts: the factors that a mistake may bring in."""

    @property
    def calls_once(self) -> bool:
        """Whether the model is called once with the whole batch, and not once for each part of it."""
        return self.grad_accum == 1 and not self.virtual_shards

    @property
    def divides_parameters(self) -> bool:
        """Whether it is there to divide parameters, those that are large enough."""
        return self.fsdp or self.name in ("tensor", "experts")


def parse_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of layouts as asked for, in order; all for None. Raises UserError for one that there is not."""
    for name in names or ():
        if name not in (*NAMES, OWN_MESH):
            raise UserError(f"layouts: there is no layout {name!r}: they are {', '.join(NAMES)}")
    return tuple(name for name in (OWN_MESH, *NAMES) if names is None or name in names)


def reference_layout(mesh: Mesh, sharding: NamedSharding, batch: BatchName) -> Layout:
    """The reference: the first device of a mesh, whose axes all have the size 1."""
    axes = mesh.axis_names
    alone = Mesh(
        np.asarray([mesh.devices.flat[0]]).reshape((1,) * len(axes)), axes, axis_types=(AxisType.Auto,) * len(axes)
    )
    return Layout(
        name="reference",
        text="one device",
        mesh=alone,
        sharding=NamedSharding(alone, sharding.spec),
        batch=batch,
        truth=batch,
    )


def few_rows(devices: int) -> int:
    """How many rows a batch has whose tokens are cut: two groups of devices share them, if there are enough."""
    return 2 if devices > 2 and devices % 2 == 0 else 1


def virtual_shards(devices: int) -> int:
    """Virtual shards for so many devices: the next power of two."""
    return 1 << (devices - 1).bit_length()


def layout_of(name: str, devices: Sequence[Any]) -> Layout | str:
    """A layout of these devices; or why it is left out."""
    count, mesh = len(devices), make_mesh(devices=devices)
    more: dict[str, Any] = {}
    sizes: dict[str, int] = {"devices": count}
    if name in ("tensor", "experts") and count % 2:
        return f"2 does not divide {count} devices"
    match name:
        case "rows":
            text = f"rows over {count} devices"
        case "tokens":
            rows = few_rows(count)
            text = f"{rows} row{'s' if rows > 1 else ''}, tokens over {count // rows} devices"
            sizes = {"devices along the tokens": count // rows, **sizes}
            more = {"batch": "few rows", "truth": "few rows"}
        case "fsdp":
            mesh, text, more = make_mesh(fsdp=0, devices=devices), f"parameters over {count} devices", {"fsdp": True}
        case "tensor":
            mesh, text = make_mesh(tensor=2, devices=devices), f"2 devices share each row, {count // 2} groups"
            sizes = {"devices of tensor": 2, "devices along the rows": count // 2, **sizes}
        case "experts":
            mesh, text = make_mesh(expert=2, devices=devices), f"2 devices share the experts, {count // 2} groups"
            sizes = {"devices of expert": 2, **sizes}
        case "accum":
            return _micro_batches(mesh)
        case "packing":
            mesh, text = make_mesh(devices=devices[:1]), "documents packed into rows, against a row for each"
            sizes, more = {"documents of a row": 2}, {"batch": "packed", "truth": "documents"}
        case "virtual":
            # On three where the shards are more than the devices, so that these have unequal numbers: it is the same to
            # the bit on any number, and each takes a compilation.
            shards = virtual_shards(count)
            used, batch = (2, "rows") if shards == count else (3, "rows of shards")
            mesh, text = make_mesh(devices=devices[:used]), f"{shards} virtual shards on {used} devices"
            sizes = {"virtual shards": shards, "devices": used}
            more = {"batch": batch, "truth": batch, "virtual_shards": shards}
        case _:
            return "the mesh has the axes of make_mesh: rows, fsdp, tensor and experts are compared"
    return Layout(name=name, text=text, mesh=mesh, sharding=batch_sharding(mesh), sizes=sizes, **more)


def _micro_batches(mesh: Mesh, sharding: NamedSharding | None = None) -> Layout:
    """Micro-batches on the first device of a mesh."""
    alone = reference_layout(mesh, sharding or batch_sharding(mesh), "rows")
    text, sizes = f"{MICRO_BATCHES} micro-batches on one device", {"micro-batches": MICRO_BATCHES}
    return dataclasses.replace(alone, name="accum", text=text, grad_accum=MICRO_BATCHES, sizes=sizes)


def layout_of_mesh(name: str, mesh: Mesh, sharding: NamedSharding, *, fsdp: bool) -> Layout | str:
    """A layout of a mesh with axes of the user's own; or why it is left out."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    sizes = {f"devices of {axis}": size for axis, size in mesh.shape.items() if size > 1} | {"devices": mesh.size}
    if name == OWN_MESH:
        return Layout(name=name, text=axes, mesh=mesh, sharding=sharding, fsdp=fsdp, sizes=sizes)
    if name == "accum":
        return _micro_batches(mesh, sharding)
    return f"the mesh has axes of its own ({axes})"


def place_whole(mesh: Mesh) -> NamedSharding:
    """Whole on each device."""
    return NamedSharding(mesh, P())


LISTS, COUNTS = ("devices", "local_devices"), ("device_count", "local_device_count")
"""Functions of jax that list devices, or count them."""


@contextlib.contextmanager
def devices_of(mesh: Mesh) -> Iterator[None]:
    """Let jax list and count the devices of the mesh alone within, as in a process that has no others.

    Else a loss that is divided by `jax.device_count()` would be so on one device too, and no layout would differ.
    """
    own = list(mesh.devices.flat)
    if len(own) == jax.device_count():
        yield
        return
    functions: dict[str, Any] = {name: lambda *args, **options: list(own) for name in LISTS}
    with _replaced(functions | {name: lambda *args, **options: len(own) for name in COUNTS}):
        yield


@contextlib.contextmanager
def pretend_process(index: int, count: int) -> Iterator[None]:
    """Let jax say within that this process is the one of this index, of so many."""
    functions = {"process_index": lambda *args, **options: index, "process_count": lambda *args, **options: count}
    with _replaced(functions):
        yield


@contextlib.contextmanager
def _replaced(functions: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(jax, name) for name in functions}
    try:
        jax.__dict__.update(functions)
        yield
    finally:
        jax.__dict__.update(before)
