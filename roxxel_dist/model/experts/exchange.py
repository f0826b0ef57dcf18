"""Experts that devices share: each token goes to the devices of its experts, and comes back (Lepikhin et al., 2020).

Devices send each other blocks of one size, as arrays have one. The first ones have room for an even load and an eighth
more, and are what a step costs then. Where a device is sent more, smaller blocks follow until none is left: no token is
dropped, memory does not grow, and time grows with the load of the busiest device. Decision 13.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.mesh import EXPERT
from roxxel_dist.devices.traced_flops import MEAN_TRIPS
from roxxel_dist.model.experts.grouped_products import TPU_ROWS

ROOM = 9 / 8
"""Rows of the first blocks, of those of an even load."""
FURTHER = 4
"""A block that follows is a part of the first one, one in so many."""
USUALLY_NONE = f"{MEAN_TRIPS}0"
"""The scope of a loop over these: of an even load there are none, and costs of a step are those of one."""
Compute = Callable[[jax.Array, jax.Array, Any], jax.Array]
"""The outputs of rows [A, D] by their experts' numbers int32[A, 1], those of this device, and its matrices. Rows of the
number behind the last may have any output."""


def block_sizes(rows: int, most: int, devices: int) -> tuple[int, int]:
    """(rows of the first block to each device, of those that follow): a device sends `rows`, and at most `most` to one.

    All blocks that a device receives are a multiple of what the kernel of TPUs takes.
    """
    unit = TPU_ROWS // math.gcd(TPU_ROWS, devices)

    def padded(size: float) -> int:
        return math.ceil(size / unit) * unit

    first = min(padded(rows / devices * ROOM), padded(most))
    return first, padded(first / FURTHER)


class Routes(NamedTuple):
    """Which copies of rows, A = N x K, go to which of the S devices along "expert"."""

    order_A: jax.Array
    """int32: the copies by expert, and so by device."""
    device_A: jax.Array
    """int32: where each goes."""
    place_A: jax.Array
    """int32: its place among what goes there."""
    start_S: jax.Array
    """int32: the first in `order_A` that goes to each device."""
    size_S: jax.Array
    """int32: how many go to each."""
    end_SxE: jax.Array
    """int32: where the rows of each of this device's experts end among what each device sends here."""

    @classmethod
    def of_experts(cls, chosen_A: jax.Array, count: int) -> "Routes":
        """The routes of copies with these experts, of which each device has `count`."""
        devices = jax.lax.axis_size(EXPERT)
        order_A, device_A = jnp.argsort(chosen_A, stable=True), chosen_A // count
        count_SxE = (chosen_A[:, None] == jnp.arange(devices * count)).sum(0, dtype=jnp.int32).reshape(devices, count)
        size_S = count_SxE.sum(1)
        start_S = jnp.cumsum(size_S) - size_S
        end_SxE = jnp.cumsum(jax.lax.all_to_all(count_SxE, EXPERT, 0, 0), axis=1)
        return cls(order_A, device_A, jnp.argsort(order_A) - start_S[device_A], start_S, size_S, end_SxE)


def apply_experts(
    x_NxD: jax.Array, chosen_NxK: jax.Array, matrices: Any, count: int, compute: Compute, axes: tuple[str, ...]
) -> jax.Array:
    """[N, K, D]: the outputs of the experts of each row of this device; within a `jax.shard_map`.

    `chosen_NxK`, int32, are their experts, all different, of all devices; this device has `count` of them with these
    `matrices`, and the devices along "expert" have the others, in order. `compute` closes over no array; `axes` of the
    mesh are all whose devices may have other rows.
    """
    rows, top_k = chosen_NxK.shape
    sizes = block_sizes(rows * top_k, rows * min(top_k, count), jax.lax.axis_size(EXPERT))
    routes = Routes.of_experts(chosen_NxK.reshape(-1), count)
    more = -(-jnp.maximum(jax.lax.pmax(routes.size_S.max(), axes) - sizes[0], 0) // sizes[1])
    y_AxD: Any = _in_blocks(compute, sizes, routes, more, x_NxD, matrices)
    return y_AxD.reshape(rows, top_k, -1)


def apply_own_experts(x_NxD: jax.Array, chosen_NxK: jax.Array, matrices: Any, compute: Compute) -> jax.Array:
    """[N, K, D] as `apply_experts`, where all devices have the same rows: no row is sent, and outputs are summed."""
    (rows, top_k), count = chosen_NxK.shape, len(matrices[0])
    chosen_Ax1 = chosen_NxK.reshape(-1, 1) - jax.lax.axis_index(EXPERT) * count
    is_own = (chosen_Ax1 >= 0) & (chosen_Ax1 < count)
    y_AxD = compute(jnp.repeat(x_NxD, top_k, 0), jnp.where(is_own, chosen_Ax1, count), matrices)
    return jax.lax.psum(jnp.where(is_own, y_AxD, 0), EXPERT).reshape(rows, top_k, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_blocks(
    compute: Compute, sizes: tuple[int, int], routes: Routes, more: jax.Array, x_NxD: jax.Array, matrices: Any
) -> jax.Array:
    """[A, D]: the output of each copy's expert, by a first block and `more`. Of these nothing is kept for the backward
    pass: they are computed again, as there may be any number."""
    return _forward(compute, sizes, routes, more, x_NxD, matrices)[0]


def _forward(compute: Compute, sizes: Any, routes: Routes, more: jax.Array, x_NxD: jax.Array, matrices: Any) -> Any:
    y_AxD, backward = jax.vjp(partial(_exchanged, compute, routes, 0, sizes[0]), x_NxD, matrices)

    def add(i: Any, y_AxD: jax.Array) -> jax.Array:
        return y_AxD + _exchanged(compute, routes, sizes[0] + i * sizes[1], sizes[1], x_NxD, matrices)

    with jax.named_scope(USUALLY_NONE):
        y_AxD = jax.lax.fori_loop(0, more, add, y_AxD)
    return y_AxD, (backward, routes, more, x_NxD, matrices)


def _backward(compute: Compute, sizes: tuple[int, int], kept: Any, g_AxD: jax.Array) -> Any:
    backward, routes, more, *args = kept

    def add(i: Any, total: Any) -> Any:
        block = partial(_exchanged, compute, routes, sizes[0] + i * sizes[1], sizes[1])
        return jax.tree.map(jnp.add, total, jax.vjp(block, *args)[1](g_AxD))

    with jax.named_scope(USUALLY_NONE):
        found = jax.lax.fori_loop(0, more, add, backward(g_AxD))
    return None, None, *found


_in_blocks.defvjp(_forward, _backward)


def _exchanged(compute: Compute, routes: Routes, offset: Any, size: int, x_NxD: jax.Array, matrices: Any) -> jax.Array:
    """[A, D]: of `size` copies from `offset` on of what goes to each device the outputs, of others 0."""
    order_A, device_A, place_A, start_S, size_S, end_SxE = routes
    place_C = offset + jnp.arange(size, dtype=jnp.int32)
    sorted_SxC = jnp.where(place_C < size_S[:, None], start_S[:, None] + place_C, order_A.size)
    copy_R = order_A.at[sorted_SxC.reshape(-1)].get(mode="fill", fill_value=order_A.size)
    inside_A = (place_A >= offset) & (place_A < offset + size)
    slot_A = jnp.where(inside_A, device_A * size + place_A - offset, copy_R.size)
    expert_SxC = (place_C[:, None] >= end_SxE[:, None]).sum(2, dtype=jnp.int32)
    x_RxD = _swapped(rows_at(x_NxD, copy_R, slot_A, order_A.size // len(x_NxD)), len(size_S))
    y_RxD = compute(x_RxD, expert_SxC.reshape(-1, 1), matrices)
    return rows_at(_swapped(y_RxD, len(size_S)), slot_A, copy_R, 1)


def _swapped(x_RxD: jax.Array, devices: int) -> jax.Array:
    """Block i of each device on device i."""
    return jax.lax.all_to_all(x_RxD.reshape(devices, -1, x_RxD.shape[1]), EXPERT, 0, 0).reshape(x_RxD.shape)


def rows_at(x_NxD: jax.Array, copy_R: jax.Array, place_A: jax.Array, copies: int) -> jax.Array:
    """[R, D]: copies of rows, 0 where there is none; its gradient reads and sums rows, and scatters none.

    Args:
        x_NxD: rows, A = N x copies.
        copy_R: int32: which copy each is, A for none.
        place_A: int32: the inverse of it: where each copy is, R for nowhere.
        copies: of each row, one after the other.
    """
    y_RxD: Any = _rows_at(x_NxD, copy_R, place_A, copies)
    return y_RxD


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_at(x_NxD: jax.Array, copy_R: jax.Array, place_A: jax.Array, copies: int) -> jax.Array:
    return x_NxD.at[copy_R // copies].get(mode="fill", fill_value=0)


def _rows_back(copies: int, place_A: jax.Array, g_RxD: jax.Array) -> tuple[jax.Array, None, None]:
    g_AxD = g_RxD.at[place_A].get(mode="fill", fill_value=0)
    return g_AxD.reshape(-1, copies, g_RxD.shape[1]).sum(1), None, None


_rows_at.defvjp(lambda x_NxD, copy_R, place_A, copies: (_rows_at(x_NxD, copy_R, place_A, copies), place_A), _rows_back)
