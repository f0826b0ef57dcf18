"""A mixture of experts (Shazeer et al., 2017): many feed-forward layers, of which each token goes through a few.

Rows through the experts that they were sent to: each row costs its own experts, not all of them.

Two forms of the same sum. `in_blocks` is for the CPU, where `jax.lax.ragged_dot` computes every expert for every row;
`ragged` is for GPUs and TPUs, which have kernels for it.

Letters in names: N rows, K experts a row, A = N x K assignments of a row to an expert, E experts, S slots, D the width
outside, H inside an expert and P of what its first matrix gives (H, or 2 x H for a gated one).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR
from roxxel_dist.model.attention import INIT_STD
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import FULL_PRECISION
from roxxel_dist.model.lora import ADAPTER, ExpertsAdapter
from roxxel_dist.model.mlp import Activation, activation, hidden_sizes, initializers

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


class MixtureOfExperts(nnx.Module):
    """A router chooses `top_k_mlp` of `n_experts` for each token, and weighs what they give.

    The convention is Mixtral's (Jiang et al., 2024): a softmax over all experts, of which the k largest are taken and
    divided by their sum. Of a single one (k = 1) the gate is the probability itself, as in Switch (Fedus et al., 2021):
    divided by its sum it would be 1, and the router would learn nothing from the text. The router computes in float32
    whatever the rest does, with its matrix as it is stored; its choice is of the tokens at hand, and no expert is ever
    full: none are dropped.

    What it costs: tokens are sorted by expert, and each costs its k experts (see `experts.py`). On a mesh that is set
    (`jax.set_mesh`, as `Trainer` does) and whose size divides the tokens, each device sorts and computes its own
    tokens, with all experts gathered to it, as data parallelism and FSDP have it; devices along "tensor" have the same
    tokens, and a share of each expert's hidden units. Otherwise the result is the same, but XLA gathers the tokens and
    every device computes all of them.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.n_experts: int = config.n_experts
        self.top_k: int = config.top_k_mlp
        self.activate: Activation = activation(config.activation, gated=config.use_swiglu)
        hidden, width = hidden_sizes(config)
        init, init_out = initializers(config)
        self.router: nnx.Linear = nnx.Linear(
            config.dim, config.n_experts, use_bias=False, dtype=jnp.float32, precision="highest",
            kernel_init=nnx.initializers.normal(INIT_STD), kernel_metadata={FULL_PRECISION: True}, rngs=rngs,
        )  # fmt: skip
        first = nnx.Param(init(rngs.params(), (config.n_experts, config.dim, width)))
        if config.use_swiglu:
            self.gate_up = first
        else:
            self.up = first
        self.down: nnx.Param[jax.Array] = nnx.Param(init_out(rngs.params(), (config.n_experts, hidden, config.dim)))
        if config.adapts("mlp"):
            for name in (self.first_name, "down"):
                setattr(self, name + ADAPTER, ExpertsAdapter(getattr(self, name).shape, config, rngs))

    @property
    def first_name(self) -> str:
        """What the experts' first matrices are called."""
        return "gate_up" if hasattr(self, "gate_up") else "up"

    @property
    def first(self) -> nnx.Param[jax.Array]:
        """[n_experts, dim, width]: the experts' first matrices."""
        return getattr(self, self.first_name)

    @property
    def idle(self) -> int:
        """Parameters that a token does not meet."""
        spent = self.first.get_value().size + self.down.get_value().size  # shapes alone, where a run is planned
        return spent // self.n_experts * (self.n_experts - self.top_k)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, L, dim] to [B, L, dim], and float32[]: the balance of this call's tokens, see `balance_of`."""
        x_NxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
        probability_NxE = jax.nn.softmax(self.router(x_NxD))
        chosen_NxK, gates_NxK = choose(probability_NxE, self.top_k)
        first, second = (self._matrices(name).astype(x_NxD.dtype) for name in (self.first_name, "down"))
        y_NxD = by_device(x_NxD, chosen_NxK, gates_NxK, first, second, self.activate)
        return y_NxD.reshape(x_BxLxD.shape), balance_of(probability_NxE, chosen_NxK)

    def _matrices(self, name: str) -> jax.Array:
        """The experts' matrices of one kind, with their adapters where they have any."""
        kernel_ExIxO, adapter = getattr(self, name)[...], getattr(self, name + ADAPTER, None)
        return kernel_ExIxO if adapter is None else adapter.merged(kernel_ExIxO)


def choose(probability_NxE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """(int32[N, k] the most probable experts of each token, float32[N, k] what each counts).

    Of equals the one with the lower number is taken.
    """
    chosen_NxK = jax.lax.top_k(jax.lax.stop_gradient(probability_NxE), top_k)[1]
    # Not the values that top_k gives: their gradient is a scatter, one number at a time on a CPU.
    one_hot_NxKxE = jax.nn.one_hot(chosen_NxK, probability_NxE.shape[1])
    gates_NxK = (one_hot_NxKxE * probability_NxE[:, None]).sum(2)
    return chosen_NxK, gates_NxK if top_k == 1 else gates_NxK / gates_NxK.sum(1, keepdims=True)


def balance_of(probability_NxE: jax.Array, chosen_NxK: jax.Array) -> jax.Array:
    """float32[]: E x the sum over experts of (share of the tokens' choices) x (mean probability).

    1 where all experts are equally busy, E where one has all. The shares have no gradient; the probabilities have, and
    those of busy experts weigh more (Switch; GShard, Lepikhin et al., 2020).
    """
    count = probability_NxE.shape[1]
    share_E = jax.nn.one_hot(chosen_NxK, count).mean((0, 1))
    return count * (share_E * probability_NxE.mean(0)).sum()


def by_device(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, first_ExDxP: jax.Array, second_ExHxD: jax.Array,
    activate: Activate,
) -> jax.Array:  # fmt: skip
    """`experts`, each device for its own share of the rows where the mesh that is set divides them.

    Devices along "tensor" have the same rows, and of every expert their share of the hidden units.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)
    n_experts, hidden, _ = second_ExHxD.shape
    shares = TENSOR if automatic and mesh.shape.get(TENSOR, 1) > 1 and hidden % mesh.shape[TENSOR] == 0 else None
    rows = tuple(axis for axis in mesh.axis_names if axis != shares) if automatic else ()
    if not automatic or mesh.size == 1 or x_NxD.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        return experts(x_NxD, chosen_NxK, gates_NxK, first_ExDxP, second_ExHxD, activate)

    def local(x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, *weights: jax.Array) -> jax.Array:
        first_ExDxFxH, second_ExHxD = weights
        first_ExDxP = first_ExDxFxH.reshape(*first_ExDxFxH.shape[:2], -1)
        y_NxD = experts(x_NxD, chosen_NxK, gates_NxK, first_ExDxP, second_ExHxD, activate)
        return y_NxD if shares is None else jax.lax.psum(y_NxD, shares)

    # XLA cannot cut a sort, nor a loop over what it gives: left to itself it repeats all of it on every device.
    specs = (P(rows), P(rows), P(rows), P(None, None, None, shares), P(None, shares))
    # A unit's gate goes where its other half is: they are apart by half the matrix.
    first_ExDxFxH = first_ExDxP.reshape(n_experts, x_NxD.shape[1], -1, hidden)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(rows), check_vma=False)(
        x_NxD, chosen_NxK, gates_NxK, first_ExDxFxH, second_ExHxD
    )
