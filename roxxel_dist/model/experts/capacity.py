"""A capacity of experts: of the choices of a row each takes the first ones, and drops the rest.

Lepikhin et al., "GShard", 2020; Fedus et al., "Switch Transformers", 2021. Decision 13.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.mesh import EXPERT
from roxxel_dist.model.experts.exchange import rows_at
from roxxel_dist.model.mlp import Activation


class Capacity(NamedTuple):
    """How many choices of a row an expert takes."""

    length: int
    """Tokens of a row."""
    most: int
    """Choices; a row has at most `length` for an expert, as those of a token are all different."""

    @classmethod
    def of_rows(cls, factor: float, length: int, top_k: int, count: int) -> "Capacity":
        """ceil(factor x length x top_k / count) of `count` experts, the factor as it is written in decimals."""
        return cls(length, min(length, math.ceil(Fraction(repr(float(factor))) * length * top_k / count)))

    @property
    def drops(self) -> bool:
        """Whether any choices could be more than it takes."""
        return self.most < self.length

    def dropped(self, chosen_NxK: jax.Array, count: int) -> jax.Array:
        """float32[]: the share of the choices, int32 among `count` experts, that are dropped."""
        over_BxE = jnp.maximum(_counts(chosen_NxK.reshape(-1, self.length * chosen_NxK.shape[1]), count) - self.most, 0)
        return over_BxE.sum() / jnp.float32(chosen_NxK.size)

    def kept(self, chosen_NxK: jax.Array, count: int) -> jax.Array:
        """bool[N, K]: the choices that are not dropped."""
        rank_BxA, _, _ = _ranks(chosen_NxK.reshape(-1, self.length * chosen_NxK.shape[1]), count)
        return (rank_BxA < self.most).reshape(chosen_NxK.shape)


def _counts(chosen_BxA: jax.Array, count: int) -> jax.Array:
    """int32[B, E]: the choices of each expert in each row."""
    return (chosen_BxA[..., None] == jnp.arange(count)).sum(1, dtype=jnp.int32)


def _ranks(chosen_BxA: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32 (the place of each choice among those of its expert in its row, the choices of the row by expert, the first
    of each expert among these).

    Choices are in the order of the tokens, and of a token the most probable first: no token's output depends on a token
    behind it.
    """
    count_BxE = _counts(chosen_BxA, count)
    first_BxE = jnp.cumsum(count_BxE, 1) - count_BxE
    order_BxA = jnp.argsort(chosen_BxA, axis=1, stable=True)
    rank_BxA = jnp.argsort(order_BxA, axis=1) - jnp.take_along_axis(first_BxE, chosen_BxA, axis=1)
    return rank_BxA, order_BxA, first_BxE


class Slots(NamedTuple):
    """Where the A choices of B rows go: R slots, of each expert `most` for each row."""

    slot_A: jax.Array
    """int32: the slot of each choice; R for one that is dropped."""
    choice_R: jax.Array
    """int32: the choice in each slot, of one expert after the other; A for none."""

    @classmethod
    def of_choices(cls, chosen_NxK: jax.Array, count: int, capacity: Capacity) -> "Slots":
        """Those of choices among `count` experts."""
        most, size = capacity.most, chosen_NxK.size
        chosen_BxA = chosen_NxK.reshape(-1, capacity.length * chosen_NxK.shape[1])
        rank_BxA, order_BxA, first_BxE = _ranks(chosen_BxA, count)
        rows, each = chosen_BxA.shape
        row_Bx1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
        slot_BxA = jnp.where(rank_BxA < most, (chosen_BxA * rows + row_Bx1) * most + rank_BxA, count * rows * most)
        place_BxExC = first_BxE[..., None] + jnp.arange(most, dtype=jnp.int32)
        end_BxE = jnp.concatenate([first_BxE[:, 1:], jnp.full((rows, 1), each, jnp.int32)], 1)
        found_BxR = jnp.take_along_axis(order_BxA, jnp.minimum(place_BxExC, each - 1).reshape(rows, -1), axis=1)
        choice_BxR = row_Bx1 * each + found_BxR.astype(jnp.int32)
        choice_BxExC = jnp.where(place_BxExC < end_BxE[..., None], choice_BxR.reshape(place_BxExC.shape), size)
        return cls(slot_BxA.reshape(-1).astype(jnp.int32), choice_BxExC.swapaxes(0, 1).reshape(-1))


def through_slots(
    x_NxD: jax.Array, chosen_NxK: jax.Array, matrices: Any, activate: Activation, capacity: Capacity, devices: int
) -> jax.Array:
    """The outputs of the experts of whole rows, 0 for choices that are dropped.

    An expert is a product of as many slots as there are, whatever the load: shapes are fixed, and no slot waits. With
    several `devices` along "expert", within a `jax.shard_map`, each has a share of the experts, in order, and slots are
    sent there and back.

    Args:
        x_NxD: rows of tokens, one after the other.
        chosen_NxK: int32: their experts, of all devices.
        matrices: (first [E, D, P, F], second [E, F, D]) of this device's experts.
        activate: [..., P, F] to [..., F].
        capacity: of each expert.
        devices: along "expert".

    Returns:
        [N, K, D].
    """
    (first_ExDxPxF, second_ExFxD), (_, top_k) = matrices, chosen_NxK.shape
    count = len(second_ExFxD) * devices
    slot_A, choice_R = Slots.of_choices(chosen_NxK, count, capacity)
    x_ExRxD = rows_at(x_NxD, choice_R, slot_A, top_k).reshape(count, -1, x_NxD.shape[1])
    if devices > 1:
        x_ExRxD = jax.lax.all_to_all(x_ExRxD, EXPERT, 0, 1, tiled=True)
    inner_ExRxF = activate(jnp.einsum("erd,edpf->erpf", x_ExRxD, first_ExDxPxF))
    y_ExRxD = jnp.einsum("erf,efd->erd", inner_ExRxF, second_ExFxD)
    if devices > 1:
        y_ExRxD = jax.lax.all_to_all(y_ExRxD, EXPERT, 1, 0, tiled=True)
    y_AxD = rows_at(y_ExRxD.reshape(-1, x_NxD.shape[1]), slot_A, choice_R, 1)
    return y_AxD.reshape(*chosen_NxK.shape, -1)
