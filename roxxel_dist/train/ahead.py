"""A run's step looked at before it runs: its program, its memory, how its arrays lie. Nothing of it is allocated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR, fit_sharding
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.optimizer import Optimizer, first_state
from roxxel_dist.train.throughput import device_bytes
from roxxel_dist.train.train_state import Leaves, ModuleSplit, TrainState, abstract_state
from roxxel_dist.train.train_step import SPIKE_FACTOR, micro_batches


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device, as XLA accounts for the compiled program of a step."""

    arguments: int
    """What it is given: state, settings and batch."""
    temporaries: int
    """What it holds while it works: activations, gradients, parameters that are gathered."""
    results: int
    """What it gives back beside the state, which takes the place of the one that it was given."""
    code: int
    """The program itself, where the backend says."""
    peak: int
    """All of them together."""


def memory_of(program: Any) -> StepMemory:
    """What a compiled program needs."""
    found = program.memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
    }
    return StepMemory(**parts, peak=sum(parts.values()))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the devices share the rows that they compute with at once."""

    cut: Literal["rows", "tokens", "nothing"]
    """Along which axis the batch, or the micro-batch, is cut."""
    pieces: int
    """Into how many."""
    repeated: int
    """Devices, or groups of them, that do what another one does, too."""
    together: int = 1
    """Devices in a group: those along "tensor", which share the work on each piece."""


def layout(sharding: NamedSharding, rows: int, length: int, grad_accum: int) -> Layout:
    """How a batch of `rows` x `length` tokens is shared, which is trained on in `grad_accum` micro-batches."""
    shape = (rows // micro_batches(grad_accum, rows), length)
    fitted = fit_sharding(sharding, shape)
    by_row, by_token = (whole // part for whole, part in zip(shape, fitted.shard_shape(shape), strict=True))
    pieces = by_row * by_token
    cut = "rows" if by_row > 1 else "tokens" if by_token > 1 else "nothing"
    together = sharding.mesh.shape.get(TENSOR, 1)
    return Layout(cut=cut, pieces=pieces, repeated=sharding.mesh.size // together - pieces, together=together)


def look_ahead(
    model: Callable[[], nnx.Module], optimizer: Optimizer, mesh: Mesh, options: LoopOptions, total_steps: int
) -> tuple[ModuleSplit, TrainState, Leaves]:
    """What does not change, the state before the first step and the settings of all steps: shapes and shardings.

    Raises:
        ValueError: what the model or the optimizer asks for cannot be.
    """
    parts, state, settings = abstract_state(
        model, first_state(optimizer), mesh, fsdp=options.fsdp, dtype=jnp.bfloat16 if options.use_bf16 else None
    )
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    numbers: Any = dict.fromkeys((*optimizer.settings(total_steps), SPIKE_FACTOR), one)
    return parts, state, settings | numbers


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that a program can have of the smallest of these devices of this process; None where they do not say."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=None)


def arrays(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every parameter: its name, shape, type, how it is cut (an axis of the mesh a dimension), bytes on a device."""
    return [
        {
            "name": name,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "cut": [None if axis is None else str(axis) for axis in leaf.sharding.spec],
            "device_bytes": device_bytes(leaf),
        }
        for name, leaf in params.items()
    ]
