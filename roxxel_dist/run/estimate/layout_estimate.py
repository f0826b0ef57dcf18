"""What a layout costs, about, before its step is compiled: from the parts of arrays that devices hold and send.

A compiler of accelerators takes minutes for a deep model, and most layouts are far from the best. So the order in which
they are compiled, and what cannot fit, is found without it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import EXPERT, TENSOR, row_axes
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.devices.targets import hosts_of
from roxxel_dist.model.experts.exchange import ROOM
from roxxel_dist.run.estimate.step_costs import link_seconds
from roxxel_dist.train.step.throughput import device_bytes

TOUCHED = 24
"""How often a block reads or writes a number of each token and feature that devices along "tensor" do not share: norms,
residuals and their gradients, as compilers fuse them."""
KEPT = {False: 4, "products": 3, True: 1}
"""Numbers of each token and feature that a block keeps for the backward pass at least, by `gradient_checkpointing`."""


class _Links:
    """What a device sends in collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sent = self.network = 0.0
        self._hosts = dict(zip(mesh.devices.flat, hosts_of(list(mesh.devices.flat)), strict=True))

    def add(self, axes: Sequence[str], passes: float, whole: float) -> None:
        """Of a ring along these axes, in which an array of `whole` bytes goes round so often: 2 for a sum."""
        place = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        group = list(self.mesh.devices[place].flat) if axes else []
        if len(group) <= 1:
            return
        self.sent += passes * whole * (len(group) - 1) / len(group)
        members = Counter(self._hosts[device] for device in group)
        if len(members) > 1:
            self.network += passes * whole * (len(members) - 1) / len(members) / max(members.values())


def _tokens(mesh: Mesh, batch: Any) -> float:
    """Of a device."""
    rows, length = jax.tree.leaves(batch)[0].shape
    pieces = mesh.size // mesh.shape.get(TENSOR, 1)
    return rows * length / pieces


def estimated_seconds(config: Any, mesh: Mesh, args: tuple[Any, ...], flops: float) -> float | None:
    """About what a step of the built-in model takes; None for devices that no table knows.

    Args:
        config: of the run.
        mesh: of the layout.
        args: (state, hparams, batch) of the step, as shapes with shardings.
        flops: of the same step on one device.
    """
    known = accelerator(mesh.devices.flat[0].device_kind)
    if known is None:
        return None
    state, _, batch = args
    links, used = _Links(mesh), 0.0
    rows, numbers = row_axes(mesh), 2 if config.bf16_compute or config.use_bf16 else 4
    for leaf in state.params.values():
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in leaf.sharding.spec)
        cut = {axis for entry in entries for axis in entry if axis}
        gathered = [axis for axis in rows if axis in cut and axis != EXPERT]
        own = math.prod(leaf.sharding.shard_shape(leaf.shape))
        whole = own * math.prod(mesh.shape[axis] for axis in gathered)
        used += whole * numbers
        links.add(gathered, 2, whole * numbers)  # parameters, forward and backward
        links.add(gathered, 1, whole * 4)
        links.add([axis for axis in rows if axis not in cut], 2, own * 4.0)
    tokens = _tokens(mesh, batch) * config.dim * numbers
    links.add([TENSOR], 2 * 4 * config.num_blocks, tokens)
    if config.use_moe:
        room = ROOM if config.expert_capacity_factor is None else config.expert_capacity_factor
        links.add([EXPERT], 4 * config.num_blocks, tokens * min(config.top_k_mlp * room, config.n_experts))
    touched = 2 * device_bytes(args) + 3 * used + TOUCHED * config.num_blocks * tokens
    compute = flops / mesh.size / (known.tera_flops * 1e12)
    return compute + touched / (known.gigabytes_per_s * 1e9) + link_seconds(known, links.sent, links.network)


def least_bytes(config: Any, mesh: Mesh, args: tuple[Any, ...]) -> float:
    """Memory of a device that a step of the built-in model needs at least: its state, and what a micro-batch keeps."""
    numbers = 2 if config.bf16_compute or config.use_bf16 else 4
    kept = KEPT[config.gradient_checkpointing] * config.num_blocks * config.dim * numbers
    tensor = mesh.shape.get(TENSOR, 1)
    return device_bytes(args) + kept * _tokens(mesh, args[-1]) / max(1, config.grad_accum) / tensor
