"""A mixture of experts (Shazeer et al., 2017): many feed-forward layers, of which each token goes through a few.

Decision 13.
"""

import logging
import math
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import EXPERT, FSDP, TENSOR, TOKENS, device_type
from roxxel_dist.cluster.parameter_sharding import MESH_AXES
from roxxel_dist.cluster.step_parts import EXPERTS
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts.exchange import apply_experts, apply_own_experts, rows_at
from roxxel_dist.model.experts.grouped_products import grouped_product, missing_kernel
from roxxel_dist.model.layers import COLUMN_AXES, FULL_PRECISION, STACKED
from roxxel_dist.model.lora import ADAPTER, ExpertsAdapter
from roxxel_dist.model.mlp import Activation, Balance, activation, hidden_sizes, initializers


class Matrices(NamedTuple):
    """The matrices of some experts."""

    first: Any
    """[E, D, P, F]: P is 2 for gate and up, else 1."""
    second: Any
    """[E, F, D]."""


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

    def dropped_share(self, chosen_NxK: jax.Array, count: int) -> jax.Array:
        """float32[]: the share of the choices, int32 among `count` experts, that are dropped."""
        over_BxE = jnp.maximum(_counts(chosen_NxK.reshape(-1, self.length * chosen_NxK.shape[1]), count) - self.most, 0)
        return over_BxE.sum() / jnp.float32(chosen_NxK.size)

    def keep_choices(self, chosen_NxK: jax.Array, count: int) -> jax.Array:
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
    """Places of the A choices of B rows: R slots, of each expert `most` for each row."""

    slot_A: jax.Array
    """int32: the slot of each choice; R for one that is dropped."""
    choice_R: jax.Array
    """int32: the choice in each slot, of one expert after the other; A for none."""

    @classmethod
    def of_choices(cls, chosen_NxK: jax.Array, count: int, capacity: Capacity) -> "Slots":
        """The slots of choices among `count` experts."""
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


def apply_by_slots(
    x_NxD: jax.Array, chosen_NxK: jax.Array, matrices: Matrices, activate: Activation, capacity: Capacity, devices: int
) -> jax.Array:
    """[N, K, D]: the outputs of the experts, int32 of all devices, of whole rows of tokens, 0 for choices that are
    dropped.

    An expert is a product of as many slots as there are, whatever the load: shapes are fixed, and no slot waits. With
    several `devices` along "expert", within a `jax.shard_map`, each has the `matrices` of a share of the experts, in
    order, and slots are sent there and back.
    """
    top_k, count = chosen_NxK.shape[1], len(matrices.second) * devices
    slot_A, choice_R = Slots.of_choices(chosen_NxK, count, capacity)
    x_ExRxD = rows_at(x_NxD, choice_R, slot_A, top_k).reshape(count, -1, x_NxD.shape[1])
    if devices > 1:
        x_ExRxD = jax.lax.all_to_all(x_ExRxD, EXPERT, 0, 1, tiled=True)
    inner_ExRxF = activate(jnp.einsum("erd,edpf->erpf", x_ExRxD, matrices.first))
    y_ExRxD = jnp.einsum("erf,efd->erd", inner_ExRxF, matrices.second)
    if devices > 1:
        y_ExRxD = jax.lax.all_to_all(y_ExRxD, EXPERT, 1, 0, tiled=True)
    y_AxD = rows_at(y_ExRxD.reshape(-1, x_NxD.shape[1]), slot_A, choice_R, 1)
    return y_AxD.reshape(*chosen_NxK.shape, -1)


log: logging.Logger = logging.getLogger(__name__)


def experts(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, matrices: Matrices, activate: Activation
) -> jax.Array:
    """[N, D] in the type of x: the sum over a row's experts e of gate x (activate(row @ first[e]) @ second[e]).

    It is `ragged` on TPUs, and on GPUs with a kernel for it. Elsewhere `dense` is less work than `jax.lax.ragged_dot`,
    which computes every expert for each of N x K rows there. The experts of a row, int32, are all different; their
    weights are float32.
    """
    form = ragged if uses_ragged(chosen_NxK.size, len(matrices.second), chosen_NxK.shape[1]) else dense
    return form(x_NxD, chosen_NxK, gates_NxK, matrices, activate)


def uses_ragged(rows: int, count: int, top_k: int) -> bool:
    """Whether so many rows are computed by `ragged`, each for one of `count` experts.

    A GPU's kernel is further from the peak than a plain product is, so it must save half of the work.
    """
    platform = device_type().platform
    if platform == "tpu":
        return True
    if platform != "gpu" or top_k * 2 > count:
        return False
    if missing := missing_kernel(rows):
        _say_once(
            f"experts: {missing}: every expert computes every token, {count / top_k:.2g} times the work of "
            f"the {top_k} of {count} that are chosen"
        )
    return not missing


@cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def ragged(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, matrices: Matrices, activate: Activation
) -> jax.Array:
    """`experts` by matrix products over groups of unequal size, A = N x K rows sorted by expert."""
    top_k, (count, dim, *inner) = chosen_NxK.shape[1], matrices.first.shape
    chosen_A = chosen_NxK.reshape(-1)
    order_A = jnp.argsort(chosen_A, stable=True)
    place_A = jnp.argsort(order_A)
    # `bincount` adds to a few numbers in turn.
    count_E = (chosen_A[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    product: Any = jax.lax.ragged_dot if missing_kernel(chosen_A.size) else grouped_product
    x_AxD = rows_at(x_NxD, order_A, place_A, top_k)
    inner_AxPF = product(x_AxD, matrices.first.reshape(count, dim, -1), count_E)
    y_AxD = product(activate(inner_AxPF.reshape(-1, *inner)), matrices.second, count_E)
    chosen_AxD = rows_at(y_AxD, place_A, order_A, 1)
    return gate_outputs(gates_NxK, chosen_AxD.reshape(*chosen_NxK.shape, -1))


def gate_outputs(gates_NxK: jax.Array, y_NxKxD: jax.Array) -> jax.Array:
    """[N, D]: the sum of the outputs of a row's experts, in float32, with their weights."""
    return jnp.einsum("nk,nkd->nd", gates_NxK, y_NxKxD.astype(jnp.float32)).astype(y_NxKxD.dtype)


def dense(
    x_NxD: jax.Array, chosen_NxK: jax.Array, gates_NxK: jax.Array, matrices: Matrices, activate: Activation
) -> jax.Array:
    """`experts` by computing every expert for every row, with weight 0 for those not chosen."""
    gates_NxE = (jax.nn.one_hot(chosen_NxK, len(matrices.first)) * gates_NxK[..., None]).sum(1)
    inner_NxExF = activate(jnp.einsum("nd,edpf->nepf", x_NxD, matrices.first))
    y_NxExD = jnp.einsum("nef,efd->ned", inner_NxExF, matrices.second)
    return (gates_NxE[..., None] * y_NxExD).sum(1).astype(x_NxD.dtype)


class MixtureOfExperts(nnx.Module):
    """A router chooses `top_k_mlp` of `n_experts` for each token, and sums their outputs with weights.

    The convention is Mixtral's (Jiang et al., 2024): a softmax over all experts, of which the k largest are taken and
    divided by their sum. With k = 1 the gate is the probability itself, as in Switch (Fedus et al., 2021): divided by
    its sum it would always be 1, and the router would learn nothing from the text. The router always computes in
    float32, with its matrix in the stored dtype.

    Experts have no capacity limit, so no tokens are dropped, but with `expert_capacity_factor` in training: then an
    expert takes at most ceil(factor x L x k / E) choices of each row of L tokens, in the order of the tokens, and of a
    token the most probable first. Of the rest the token has the residual stream and its other experts, whose weights
    stay as they are: divided by the sum of what is left, the one expert that is left would always have weight 1.
    The row is the unit because no layout divides or joins rows: so the same choices are dropped on any number of
    devices, and in any micro-batches. As with dropout, nothing is dropped in evaluation, where a text is read a token
    at a time.

    Cost: on TPUs and GPUs tokens are sorted by expert, and each token costs its k experts; on CPUs it costs all of them
    (see `experts`). If a mesh is set (`jax.set_mesh`, as `Trainer` does) and its size divides the tokens, each device
    computes its own tokens and gathers all experts, as in data parallelism and FSDP; devices along "tensor" have the
    same tokens, and a share of each expert's hidden units. Otherwise the result is the same, but XLA gathers the tokens
    and every device computes all of them.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.n_experts: int = config.n_experts
        self.top_k: int = config.top_k_mlp
        self.capacity_factor: float | None = config.expert_capacity_factor
        self.deterministic = False  # NNX's eval() and train() set it
        self.divides: bool = config.top_k_mlp > 1 and config.norm_topk_prob
        self.activate: Activation = activation(config.activation, gated=config.use_swiglu)
        count, hidden = hidden_sizes(config)
        init, init_out = initializers(config)
        self.router: nnx.Linear = nnx.Linear(
            config.dim,
            config.n_experts,
            use_bias=False,
            dtype=jnp.float32,
            precision="highest",
            kernel_init=nnx.initializers.normal(config.init_std),
            rngs=rngs,
            kernel_metadata={FULL_PRECISION: True, MESH_AXES: (FSDP, None)},
        )
        first, second = (config.n_experts, config.dim, count, hidden), (config.n_experts, hidden, config.dim)
        metadata: dict[str, Any] = {MESH_AXES: (EXPERT, FSDP, None, TENSOR), COLUMN_AXES: 2, STACKED: 1}
        self.gate_up: nnx.Param[jax.Array] = nnx.Param(init(rngs.params(), first), **metadata)
        metadata = {MESH_AXES: (EXPERT, TENSOR, FSDP), STACKED: 1}
        self.down: nnx.Param[jax.Array] = nnx.Param(init_out(rngs.params(), second), **metadata)
        if config.adapts("mlp"):
            for name in ("gate_up", "down"):
                setattr(self, name + ADAPTER, ExpertsAdapter(getattr(self, name), config, rngs))

    @property
    def inactive_params(self) -> int:
        """Parameters that a token does not use."""
        spent = self.gate_up.get_value().size + self.down.get_value().size  # only shapes when a run is planned
        used = self.top_k * min(1.0, self.capacity_factor or 1.0)  # at most, a mean over tokens
        return round(spent // self.n_experts * (self.n_experts - used))

    @jax.named_scope(EXPERTS)
    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Balance]:
        """[B, L, dim] to [B, L, dim], and the balance of this call's tokens, see `balance_of`.

        The balance is that of what the router chooses, dropped or not (as in Switch).
        """
        x_NxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
        probability_NxE = jax.nn.softmax(self.router(x_NxD))
        chosen_NxK, gates_NxK = choose(probability_NxE, self.top_k, divides=self.divides)
        matrices = Matrices(*(self._matrices(name).astype(x_NxD.dtype) for name in ("gate_up", "down")))
        capacity = None
        if self.capacity_factor is not None and not self.deterministic:
            capacity = Capacity.of_rows(self.capacity_factor, x_BxLxD.shape[1], self.top_k, self.n_experts)
        limit = capacity if capacity is not None and capacity.drops else None
        y_NxD = by_device(x_NxD, chosen_NxK, gates_NxK, matrices, self.activate, limit)
        balance = balance_of(probability_NxE, chosen_NxK)
        if capacity is not None:
            balance = balance._replace(dropped=capacity.dropped_share(chosen_NxK, self.n_experts))
        return y_NxD.reshape(x_BxLxD.shape), balance

    def _matrices(self, name: str) -> jax.Array:
        """The experts' matrices of one kind, with their adapters merged, if any."""
        kernel, adapter = getattr(self, name)[...], getattr(self, name + ADAPTER, None)
        return kernel if adapter is None else adapter.merge_adapter(kernel)


def choose(probability_NxE: jax.Array, top_k: int, *, divides: bool) -> tuple[jax.Array, jax.Array]:
    """(int32[N, k] the most probable experts of each token, float32[N, k] their weights: the probabilities, divided by
    their sum if it `divides`).

    Of equal probabilities the expert with the lower number is chosen.
    """
    chosen_NxK = jax.lax.top_k(jax.lax.stop_gradient(probability_NxE), top_k)[1]
    # Not the values of top_k: their gradient is a scatter, one number at a time on a CPU.
    one_hot_NxKxE = jax.nn.one_hot(chosen_NxK, probability_NxE.shape[1])
    gates_NxK = (one_hot_NxKxE * probability_NxE[:, None]).sum(2)
    return chosen_NxK, gates_NxK / gates_NxK.sum(1, keepdims=True) if divides else gates_NxK


def balance_of(probability_NxE: jax.Array, chosen_NxK: jax.Array) -> Balance:
    """The balance of choices: its loss is E x the sum over experts of (share of the tokens' choices) x (mean
    probability), with these shares.

    It is 1 if all experts get equally many tokens, E if one gets all. The shares have no gradient; the probabilities
    do, and those of busy experts weigh more (Switch; GShard, Lepikhin et al., 2020).
    """
    count = probability_NxE.shape[1]
    share_E = jax.nn.one_hot(chosen_NxK, count).mean((0, 1))
    return Balance(count * (share_E * probability_NxE.mean(0)).sum(), jnp.float32(share_E))


def by_device(
    x_NxD: jax.Array,
    chosen_NxK: jax.Array,
    gates_NxK: jax.Array,
    matrices: Matrices,
    activate: Activation,
    capacity: Capacity | None = None,
) -> jax.Array:
    """`experts`, each device for its own share of the rows, if the current mesh divides them.

    Devices along "tensor" have the same rows, and a share of the hidden units of every expert; those along "expert"
    have a share of the experts, if it divides them, and rows go there and back. Rows that the mesh does not divide, as
    the few of a text that is generated, are on all devices then, and each computes those of its experts.

    With a `capacity` choices beyond it are dropped: a device with whole rows computes slots of a fixed number, see
    `apply_by_slots`; where devices share rows, dropped choices are computed, with weight 0.
    """
    mesh, (count, hidden, _) = jax.sharding.get_abstract_mesh(), matrices.second.shape
    automatic = not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)
    shares = TENSOR if automatic and mesh.shape.get(TENSOR, 1) > 1 and hidden % mesh.shape[TENSOR] == 0 else None
    rows = tuple(axis for axis in mesh.axis_names if axis != shares) if automatic else ()
    parts = mesh.shape.get(EXPERT, 1) if automatic else 1
    divided = EXPERT if parts > 1 and count % parts == 0 else None
    pieces = math.prod(mesh.shape[axis] for axis in rows)
    everywhere = x_NxD.shape[0] % pieces > 0
    alone = not automatic or mesh.size == 1 or (everywhere and not divided)
    if capacity is not None and not alone and (mesh.shape.get(TOKENS, 1) > 1 or len(x_NxD) // capacity.length % pieces):
        gates_NxK = jnp.where(capacity.keep_choices(chosen_NxK, count), gates_NxK, 0)
        capacity = None

    def of_rows(x: jax.Array, chosen: jax.Array, gates: jax.Array, own: Matrices) -> jax.Array:
        if capacity is None:
            return experts(x, chosen, gates, own, activate)
        return gate_outputs(gates, apply_by_slots(x, chosen, own, activate, capacity, count // len(own.second)))

    if alone:
        return of_rows(x_NxD, chosen_NxK, gates_NxK, matrices)

    def compute(x: jax.Array, expert: jax.Array, own: Matrices) -> jax.Array:
        return experts(x, expert, jnp.ones(expert.shape, jnp.float32), own, activate)

    def local(x: jax.Array, chosen: jax.Array, gates: jax.Array, own: Matrices) -> jax.Array:
        if everywhere:
            y_NxD = gate_outputs(gates, apply_own_experts(x, chosen, own, compute))
        elif divided and capacity is None:
            y_NxD = gate_outputs(gates, apply_experts(x, chosen, own, len(own.second), compute, rows))
        else:
            y_NxD = of_rows(x, chosen, gates, own)
        return y_NxD if shares is None else jax.lax.psum(y_NxD, shares)

    # XLA cannot partition a sort, or a loop over its result: without this it repeats all of it on every device.
    by_rows = P() if everywhere else P(rows)
    specs = by_rows, by_rows, by_rows, Matrices(P(divided, None, None, shares), P(divided, shares))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=by_rows, check_vma=False)
    return mapped(x_NxD, chosen_NxK, gates_NxK, matrices)
