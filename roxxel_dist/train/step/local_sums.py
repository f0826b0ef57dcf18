"""What devices send with micro-batches: parameters and gradient once a step, where that is right and memory allows.

XLA by itself gathers the parameters of fsdp, and sends the gradient, in each micro-batch. Where the loss is a mean over
tokens, the part of a micro-batch that a device holds is a micro-batch too: each device sums the gradients of its own in
float32, and the sums are added once. Where it is not, the parameters alone can be gathered before. Both cost memory.
"""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import EXPERT, fit_sharding, micro_batches
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.utils.display import size

MOST_OF_MEMORY = 8
"""Of a device's memory they may take one byte in so many: the rest is for the state and the activations."""
UNKNOWN_MEMORY = 8_000_000_000
"""Taken for that of a device that no table has, such as a CPU."""
Cuts = tuple[tuple[str, ...], ...]
"""The axes that each dimension of an array is cut over."""


@dataclass(frozen=True)
class LocalSums:
    """How the devices add up what each has summed."""

    mesh: Mesh
    axes: tuple[str, ...]
    """That the rows of a micro-batch are cut over."""
    cuts: Mapping[str, Cuts]
    """Of each parameter, along these axes."""

    @property
    def devices(self) -> int:
        """How many sums there are of each number."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def run(self, function: Callable[..., Any], params: Leaves, hparams: Leaves, batch: Any) -> Any:
        """`function(params, hparams, batch)` of each device's rows: (the gradient, as `gradient` adds it up; a tree of
        numbers that all devices share; a tree of arrays [B, ...] of its rows)."""
        # An axis along which nothing is cut is no axis to cut along either: kernels then find a device alone.
        manual = {axis for axis, count in self.mesh.shape.items() if axis in self.axes or count == 1}
        rows, gradient = P(self.axes), {name: P(*(axes or None for axes in self.cuts[name])) for name in params}
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(P(), P(), rows),
            out_specs=(gradient, P(), rows),
            axis_names=manual,
            check_vma=False,
        )
        return mapped(params, hparams, batch)

    def sum(self, number: jax.Array) -> jax.Array:
        """The sum of a number of each device, within `run`."""
        return jax.lax.psum(number, self.axes)

    def gradient(self, sums: Leaves) -> Leaves:
        """The sum over the devices, each with its part of it as it has one of the parameter, within `run`."""

        def each(total: jax.Array, cuts: Cuts) -> jax.Array:
            left = self.axes
            for place, axes in enumerate(cuts):
                if axes:
                    total = jax.lax.psum_scatter(total, axes, scatter_dimension=place, tiled=True)
                    left = tuple(axis for axis in left if axis not in axes)
            return jax.lax.psum(total, left) if left else total

        return {name: each(total, self.cuts[name]) for name, total in sums.items()}


class Accumulation(NamedTuple):
    """How the micro-batches of a step are added up."""

    local: LocalSums | None = None
    """None: XLA adds up the gradient of the devices in each micro-batch."""
    whole: Mapping[str, NamedSharding] | None = None
    """How the parameters lie for all micro-batches; None: as in the state, and XLA gathers them for each."""
    text: str = ""
    """What is sent, and why; empty where nothing is."""


def accumulation(
    split: ModuleSplit,
    loss_fn: Any,
    like: TrainState,
    hparams: Mapping[str, Any],
    sharding: NamedSharding,
    shape: tuple[int, int],
    grad_accum: int,
    compute_dtype: Any,
) -> Accumulation:
    """How a step adds up `grad_accum` micro-batches of a batch of `shape`, (rows, tokens); arrays may be abstract.

    `sharding` is that of batches, before it is fitted to one; `compute_dtype` is that of parameters in the forward and
    backward pass, None for their own.
    """
    mesh, count = sharding.mesh, micro_batches(grad_accum, shape[0])
    axes = tuple(axis for axis in _entries(sharding.spec[:1])[0] if mesh.shape[axis] > 1) if sharding.spec else ()
    if count == 1 or not axes or not isinstance(mesh, Mesh):
        return Accumulation()
    params: dict[str, Any] = like.params
    specs = {name: leaf.sharding.spec for name, leaf in params.items()}
    gathered = set(axes) - {EXPERT}  # tokens go to experts, not these to tokens
    cuts = {name: tuple(e if set(e) <= gathered else () for e in _entries(spec)) for name, spec in specs.items()}
    local = LocalSums(mesh, axes, cuts)
    fitted = fit_sharding(sharding, (shape[0] // count, shape[1]))
    whole = {name: NamedSharding(fitted.mesh, _without(spec, gathered)) for name, spec in specs.items()}
    reason = _why_together(split, loss_fn, split.merge(like.params, like.rest, hparams, training=True))
    if not reason and fitted != sharding:
        reason = "the devices do not divide its rows"
    if not reason and set(mesh.axis_types) != {AxisType.Auto}:
        reason = "the mesh has axes that are not automatic"
    known = accelerator(mesh.devices.flat[0].device_kind)
    memory = int(known.memory_gigabytes * 1e9) if known else UNKNOWN_MEMORY
    copies, sums = _more_bytes(local, params, split.params.uncast, compute_dtype)
    most = f"at most an eighth of its memory ({size(memory)}{'' if known else ', as it is not known'})"
    if not reason and (copies + sums) * MOST_OF_MEMORY <= memory:
        more = f", which takes {size(copies + sums)} more of it" if copies else ""
        text = f"the gradient of {count} micro-batches is summed on each device{more}, and sent once"
        return Accumulation(local, whole, text)
    reason = reason or f"its sums on each device take {size(copies + sums)} more, and may take {most}"
    if not copies and not split.frozen.names:
        return Accumulation(text=f"the gradient is sent in each of {count} micro-batches: {reason}")
    if copies * MOST_OF_MEMORY <= memory and not split.frozen.names:
        once = f"the parameters of fsdp are sent once a step, which takes {size(copies)} more of each device"
        return Accumulation(None, whole, f"{once}, and the gradient in each of {count} micro-batches: {reason}")
    return Accumulation(
        text=f"the parameters of fsdp and the gradient are sent in each of {count} micro-batches: {reason}"
    )


def _why_together(split: ModuleSplit, loss_fn: Any, model: nnx.Module) -> str:
    """Why the gradient of a micro-batch is not the sum of those of its rows; empty if it is."""
    kinds = {type(module).__module__.partition(".")[0] for _, module in nnx.iter_modules(model)}
    if type(model) is not Transformer or kinds - {"roxxel_dist", "flax"}:
        return "a model of your own may compute on all rows of one together"
    if loss_fn not in (token_losses, next_token_loss):
        return "a loss of your own may compute on all rows of one together"
    if model.config.use_moe:
        return "the balance of experts is that of all its rows"
    if split.frozen.names:
        return "with adapters most parameters have no gradient"
    return "dropout draws for all its rows together" if split.rest.names else ""


def _entries(spec: Any) -> Cuts:
    """The mesh axes of each dimension."""
    return tuple(() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec)


def _without(spec: P, axes: Container[str]) -> P:
    return P(*(tuple(axis for axis in entry if axis not in axes) or None for entry in _entries(spec)))


def _more_bytes(local: LocalSums, params: Leaves, uncast: Any, compute_dtype: Any) -> tuple[int, int]:
    """(bytes of each device for the parameters that are cut, whole; for the sums of their gradients)."""
    copies = sums = 0
    for name, leaf in params.items():
        pieces = math.prod(local.mesh.shape[axis] for cut in local.cuts[name] for axis in cut)
        computes = leaf.dtype if compute_dtype is None or name in uncast else jnp.dtype(compute_dtype)
        numbers = math.prod(leaf.sharding.shard_shape(leaf.shape)) * (pieces - 1)
        copies += numbers * computes.itemsize
        sums += numbers * jnp.promote_types(leaf.dtype, jnp.float32).itemsize
    return copies, sums
