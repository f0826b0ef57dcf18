"""Rows through the experts that they were sent to: each row costs its own experts, not all of them.

Two forms of the same sum. `in_blocks` is for the CPU, where `jax.lax.ragged_dot` computes every expert for every row;
`ragged` is for GPUs and TPUs, which have kernels for it.

Letters in names: N rows, K experts a row, A = N x K assignments of a row to an expert, E experts, S slots, D the width
outside, H inside an expert and P of what its first matrix gives (H, or 2 x H for a gated one).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Activate = Callable[[jax.Array], jax.Array]
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8
"""Rows that are multiplied at once. Larger blocks gain nothing on a CPU, and each expert fills up its last one."""


class Slots(NamedTuple):
    """Assignments sorted by expert: each expert has whole blocks of slots, of which the last may be filled in part."""

    of_assignment_NxK: jax.Array
    """int32: where each assignment stands."""
    row_S: jax.Array
    """int32: which row stands in each slot; any in an empty one."""
    gate_S: jax.Array
    """float32: its gate; 0 in an empty slot, which so adds nothing to any sum."""
    expert: jax.Array
    """int32, one a block: whose it is."""
    used: jax.Array
    """int32[]: blocks that hold anything. They come first."""


def experts(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array, second_ExHxD: jax.Array,
    activate: Activate,
) -> jax.Array:  # fmt: skip
    """The sum over a row's experts e of gate x (activate(row @ first[e]) @ second[e]).

    Args:
        x_NxD: the rows.
        chosen_NxK: int32: the experts of each row, all different.
        gates_NxK: float32: what each of them counts.
        first_ExDxP: the first matrix of each expert.
        second_ExHxD: the second.
        activate: [..., P] to [..., H], by element of H; the same object for the same function.

    Returns:
        [N, D] in the type of x.
    """
    on_cpu = jax.default_backend() == "cpu"
    return (in_blocks if on_cpu else ragged)(x_NxD, chosen_NxK, gates_NxK, first_ExDxP, second_ExHxD, activate)


def ragged(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array, second_ExHxD: jax.Array,
    activate: Activate,
) -> jax.Array:  # fmt: skip
    """`experts` by matrix products over groups of unequal size."""
    top_k = chosen_NxK.shape[1]
    chosen_A = chosen_NxK.reshape(-1)
    order_A = jnp.argsort(chosen_A, stable=True)
    count_E = jnp.bincount(chosen_A, length=first_ExDxP.shape[0]).astype(jnp.int32)
    inner_AxH = activate(jax.lax.ragged_dot(x_NxD[order_A // top_k], first_ExDxP, count_E))
    y_AxD = jax.lax.ragged_dot(inner_AxH, second_ExHxD, count_E)
    y_NxKxD = y_AxD[jnp.argsort(order_A)].reshape(*chosen_NxK.shape, -1)
    return jnp.einsum("nk,nkd->nd", gates_NxK, y_NxKxD.astype(jnp.float32)).astype(x_NxD.dtype)


def in_blocks(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array, second_ExHxD: jax.Array,
    activate: Activate,
) -> jax.Array:  # fmt: skip
    """`experts` by a loop over blocks of rows that have an expert in common."""
    count = first_ExDxP.shape[0]
    block = block_size(chosen_NxK.size, count)
    return _mix(activate, block, x_NxD, gates_NxK, first_ExDxP, second_ExHxD, chosen_NxK)


def block_size(assignments: int, count: int) -> int:
    """A power of two, so small that the slots that `count` experts leave empty in their last blocks are few."""
    size = SMALLEST_BLOCK
    while size < LARGEST_BLOCK and 4 * size * count <= assignments:
        size *= 2
    return size


def sort(chosen_NxK: jax.Array, gates_NxK: jax.Array, count: int, block: int) -> Slots:
    """Where each assignment goes when they are sorted by expert, each expert's filled up to whole blocks."""
    assignments, top_k = chosen_NxK.size, chosen_NxK.shape[1]
    chosen_A = chosen_NxK.reshape(-1)
    order_A = jnp.argsort(chosen_A, stable=True)
    count_E = jnp.bincount(chosen_A, length=count)
    blocks_E = -(-count_E // block)
    begin_E, end_E = jnp.cumsum(count_E) - count_E, jnp.cumsum(blocks_E)
    sorted_A = chosen_A[order_A]
    slot_A = (end_E - blocks_E)[sorted_A] * block + jnp.arange(assignments) - begin_E[sorted_A]
    most = assignments // block + min(count, assignments)
    # An empty slot stands for an assignment that does not exist.
    held_S = jnp.full(most * block, assignments, jnp.int32).at[slot_A].set(order_A, unique_indices=True)
    of_assignment_A = jnp.zeros(assignments, jnp.int32).at[order_A].set(slot_A, unique_indices=True)
    return Slots(
        of_assignment_NxK=of_assignment_A.reshape(chosen_NxK.shape),
        row_S=jnp.minimum(held_S, assignments - 1) // top_k,
        gate_S=jnp.take(gates_NxK.reshape(-1), held_S, mode="fill", fill_value=0),
        expert=jnp.minimum(jnp.searchsorted(end_E, jnp.arange(most), side="right"), count - 1),
        used=end_E[-1],
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(
    activate: Activate, block: int, x_NxD: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array,
    second_ExHxD: jax.Array, chosen_NxK: jax.Array,
) -> jax.Array:  # fmt: skip
    """Its gradient is written out below: derived by JAX, each block's would be added to an array of all the experts."""
    return _forward(activate, block, x_NxD, gates_NxK, first_ExDxP, second_ExHxD, chosen_NxK)[0]


def _forward(
    activate: Activate, block: int, x_NxD: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array,
    second_ExHxD: jax.Array, chosen_NxK: jax.Array,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """(the sum, what the backward pass needs)."""
    slots = sort(chosen_NxK, gates_NxK, first_ExDxP.shape[0], block)

    def step(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y_SxD, inner_SxP = done
        row, gate = _piece(slots.row_S, i, block), _piece(slots.gate_S, i, block)
        inner = x_NxD[row] @ first_ExDxP[slots.expert[i]]
        y = activate(inner) @ second_ExHxD[slots.expert[i]]
        y = (gate[:, None] * y).astype(y_SxD.dtype)
        return _put(y_SxD, y, i), _put(inner_SxP, inner, i)

    size = slots.row_S.size
    empty = jnp.zeros((size, x_NxD.shape[1]), x_NxD.dtype), jnp.zeros((size, first_ExDxP.shape[2]), x_NxD.dtype)
    y_SxD, inner_SxP = jax.lax.fori_loop(0, slots.used, step, empty)
    return _gather_sum(y_SxD, slots), (x_NxD, first_ExDxP, second_ExHxD, slots, inner_SxP)


def _backward(activate: Activate, block: int, kept: Any, dy_NxD: jax.Array) -> tuple[Any, ...]:
    """The gradients of what `_mix` takes."""
    x_NxD, first_ExDxP, second_ExHxD, slots, inner_SxP = kept

    def step(i: jax.Array, done: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dx_SxD, dgate_S, dfirst_ExDxP, dsecond_ExHxD = done
        row, gate, e = _piece(slots.row_S, i, block), _piece(slots.gate_S, i, block)[:, None], slots.expert[i]
        x, dy = x_NxD[row], dy_NxD[row]
        h, back = jax.vjp(activate, _piece(inner_SxP, i, block))
        dh = dy @ second_ExHxD[e].T  # for a gate of 1
        (dinner,) = back((gate * dh).astype(h.dtype))
        weighted = (gate * dy).astype(dy.dtype)
        return (
            _put(dx_SxD, dinner @ first_ExDxP[e].T, i),
            _put(dgate_S, (h.astype(jnp.float32) * dh.astype(jnp.float32)).sum(1), i),
            dfirst_ExDxP.at[e].add(_outer(x, dinner)),
            dsecond_ExHxD.at[e].add(_outer(h, weighted)),
        )

    # Sums of bfloat16 lose what is small: those over blocks are kept in float32.
    zeros = (
        jnp.zeros((slots.row_S.size, x_NxD.shape[1]), x_NxD.dtype), jnp.zeros_like(slots.gate_S),
        jnp.zeros(first_ExDxP.shape, jnp.float32), jnp.zeros(second_ExHxD.shape, jnp.float32),
    )  # fmt: skip
    dx_SxD, dgate_S, dfirst_ExDxP, dsecond_ExHxD = jax.lax.fori_loop(0, slots.used, step, zeros)
    return (
        _gather_sum(dx_SxD, slots),
        dgate_S[slots.of_assignment_NxK],
        dfirst_ExDxP.astype(first_ExDxP.dtype),
        dsecond_ExHxD.astype(second_ExHxD.dtype),
        None,
    )


_mix.defvjp(_forward, _backward)


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32: a transposed, times b."""
    return jnp.matmul(a.T, b, preferred_element_type=jnp.float32)


def _piece(array: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, i * block, block)


def _put(array: jax.Array, piece: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, i * piece.shape[0], 0)


def _gather_sum(y_SxD: jax.Array, slots: Slots) -> jax.Array:
    """[N, D]: what a row's slots hold, added up."""
    return y_SxD[slots.of_assignment_NxK].sum(1, dtype=jnp.float32).astype(y_SxD.dtype)
