"""A mixture of experts (Shazeer et al., 2017): many feed-forward layers, of which each token goes through a few.

Decision 13.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import FSDP, TENSOR, device_type
from roxxel_dist.cluster.parameter_sharding import MESH_AXES
from roxxel_dist.cluster.step_parts import EXPERTS
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import COLUMN_AXES, FULL_PRECISION, STACKED
from roxxel_dist.model.lora import ADAPTER, ExpertsAdapter
from roxxel_dist.model.mlp import Activation, activation, hidden_sizes, initializers


def experts(
    x_NxD: jax.Array,
    chosen_NxK: jax.Array,
    gates_NxK: jax.Array,
    first_ExDxPxF: jax.Array,
    second_ExFxD: jax.Array,
    activate: Activation,
) -> jax.Array:
    """The sum over a row's experts e of gate x (activate(row @ first[e]) @ second[e]).

    It is `ragged` on a TPU. Elsewhere `jax.lax.ragged_dot` computes every expert for each of N x K rows, so `dense`,
    which does so for N rows, is less work.

    Args:
        x_NxD: the rows.
        chosen_NxK: int32: the experts of each row, all different.
        gates_NxK: float32: the weight of each of them.
        first_ExDxPxF: the first matrices of each expert: P is 2 for gate and up, else 1.
        second_ExFxD: the second.
        activate: [..., P, F] to [..., F].

    Returns:
        [N, D] in the type of x.
    """
    form = ragged if device_type().platform == "tpu" else dense
    return form(x_NxD, chosen_NxK, gates_NxK, first_ExDxPxF, second_ExFxD, activate)


def ragged(
    x_NxD: jax.Array,
    chosen_NxK: jax.Array,
    gates_NxK: jax.Array,
    first_ExDxPxF: jax.Array,
    second_ExFxD: jax.Array,
    activate: Activation,
) -> jax.Array:
    """`experts` by matrix products over groups of unequal size, A = N x K rows sorted by expert."""
    top_k, (count, dim, *inner) = chosen_NxK.shape[1], first_ExDxPxF.shape
    chosen_A = chosen_NxK.reshape(-1)
    order_A = jnp.argsort(chosen_A, stable=True)
    count_E = jnp.bincount(chosen_A, length=count).astype(jnp.int32)
    product = grouped_product if has_gradient_kernel(chosen_A.size) else jax.lax.ragged_dot
    inner_AxPF = product(x_NxD[order_A // top_k], first_ExDxPxF.reshape(count, dim, -1), count_E)
    y_AxD = product(activate(inner_AxPF.reshape(-1, *inner)), second_ExFxD, count_E)
    y_NxKxD = y_AxD[jnp.argsort(order_A)].reshape(*chosen_NxK.shape, -1)
    return jnp.einsum("nk,nkd->nd", gates_NxK, y_NxKxD.astype(jnp.float32)).astype(x_NxD.dtype)


KERNEL_ROWS = 128
"""The kernel for gradients takes a multiple of these."""


def has_gradient_kernel(rows: int) -> bool:
    """Whether `grouped_product` runs here: on a TPU, on one device, or where each device has its own rows.

    XLA cannot cut a kernel over devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    own_rows = mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)
    return own_rows and rows % KERNEL_ROWS == 0 and device_type().platform == "tpu"


@jax.custom_vjp
def grouped_product(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot`, whose gradient of the matrices costs as much as the product itself.

    XLA for TPU makes that gradient of one dense product for each expert, over all rows, with zeros for the rows of
    others: E times the work. The kernel (Gale et al., "MegaBlocks", 2022) takes each row once.

    Args:
        x_AxD: rows, sorted by group.
        w_ExDxF: a matrix for each group.
        count_E: int32: rows of each group, A in all.

    Returns:
        [A, F]: each row times the matrix of its group.
    """
    return jax.lax.ragged_dot(x_AxD, w_ExDxF, count_E)


def _grouped_product(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array) -> tuple[jax.Array, Any]:
    return jax.lax.ragged_dot(x_AxD, w_ExDxF, count_E), (x_AxD, w_ExDxF, count_E)


def _grouped_gradients(kept: Any, g_AxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_AxD, w_ExDxF, count_E = kept
    dx_AxD = jax.lax.ragged_dot(g_AxF, w_ExDxF.swapaxes(1, 2), count_E)
    return dx_AxD, matrix_gradient(x_AxD, g_AxF, count_E).astype(w_ExDxF.dtype), None


grouped_product.defvjp(_grouped_product, _grouped_gradients)


def matrix_gradient(x_AxD: jax.Array, g_AxF: jax.Array, count_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """float32[E, D, F]: the sum over the rows a of each group of x[a] outer g[a].

    With `interpret` the kernel's steps run as they are written, on any device, for tests.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = tuple(_tile(size) for size in (x_AxD.shape[0], x_AxD.shape[1], g_AxF.shape[1]))
    return tgmm(x_AxD.swapaxes(0, 1), g_AxF, count_E, jnp.float32, tiles, interpret=interpret)


def _tile(size: int) -> int:
    """The size of a kernel's blocks with the least padding, of those the largest."""
    return min((512, 256, 128), key=lambda tile: -(-size // tile) * tile)


def dense(
    x_NxD: jax.Array,
    chosen_NxK: jax.Array,
    gates_NxK: jax.Array,
    first_ExDxPxF: jax.Array,
    second_ExFxD: jax.Array,
    activate: Activation,
) -> jax.Array:
    """`experts` by computing every expert for every row, with weight 0 for those not chosen."""
    gates_NxE = (jax.nn.one_hot(chosen_NxK, first_ExDxPxF.shape[0]) * gates_NxK[..., None]).sum(1)
    inner_NxExF = activate(jnp.einsum("nd,edpf->nepf", x_NxD, first_ExDxPxF))
    y_NxExD = jnp.einsum("nef,efd->ned", inner_NxExF, second_ExFxD)
    return (gates_NxE[..., None] * y_NxExD).sum(1).astype(x_NxD.dtype)


class MixtureOfExperts(nnx.Module):
    """A router chooses `top_k_mlp` of `n_experts` for each token, and sums their outputs with weights.

    The convention is Mixtral's (Jiang et al., 2024): a softmax over all experts, of which the k largest are taken and
    divided by their sum. With k = 1 the gate is the probability itself, as in Switch (Fedus et al., 2021): divided by
    its sum it would always be 1, and the router would learn nothing from the text. The router always computes in
    float32, with its matrix in the stored dtype. Experts have no capacity limit, so no tokens are dropped.

    Cost: on a TPU tokens are sorted by expert, and each token costs its k experts; elsewhere it costs all of them (see
    `experts`). If a mesh is set (`jax.set_mesh`, as `Trainer` does) and its size divides the tokens, each device
    computes its own tokens and gathers all experts, as in data parallelism and FSDP; devices along "tensor" have the
    same tokens, and a share of each expert's hidden units. Otherwise the result is the same, but XLA gathers the tokens
    and every device computes all of them.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.n_experts: int = config.n_experts
        self.top_k: int = config.top_k_mlp
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
        metadata: dict[str, Any] = {MESH_AXES: (None, FSDP, None, TENSOR), COLUMN_AXES: 2, STACKED: 1}
        self.gate_up: nnx.Param[jax.Array] = nnx.Param(init(rngs.params(), first), **metadata)
        metadata = {MESH_AXES: (None, TENSOR, FSDP), STACKED: 1}
        self.down: nnx.Param[jax.Array] = nnx.Param(init_out(rngs.params(), second), **metadata)
        if config.adapts("mlp"):
            for name in ("gate_up", "down"):
                setattr(self, name + ADAPTER, ExpertsAdapter(getattr(self, name), config, rngs))

    @property
    def inactive_params(self) -> int:
        """Parameters that a token does not use."""
        spent = self.gate_up.get_value().size + self.down.get_value().size  # only shapes when a run is planned
        return spent // self.n_experts * (self.n_experts - self.top_k)

    @jax.named_scope(EXPERTS)
    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, L, dim] to [B, L, dim], and float32[]: the balance of this call's tokens, see `balance_of`."""
        x_NxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
        probability_NxE = jax.nn.softmax(self.router(x_NxD))
        chosen_NxK, gates_NxK = choose(probability_NxE, self.top_k)
        first, second = (self._matrices(name).astype(x_NxD.dtype) for name in ("gate_up", "down"))
        y_NxD = by_device(x_NxD, chosen_NxK, gates_NxK, first, second, self.activate)
        return y_NxD.reshape(x_BxLxD.shape), balance_of(probability_NxE, chosen_NxK)

    def _matrices(self, name: str) -> jax.Array:
        """The experts' matrices of one kind, with their adapters merged, if any."""
        kernel, adapter = getattr(self, name)[...], getattr(self, name + ADAPTER, None)
        return kernel if adapter is None else adapter.merged(kernel)


def choose(probability_NxE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """(int32[N, k] the most probable experts of each token, float32[N, k] their weights).

    Of equal probabilities the expert with the lower number is chosen.
    """
    chosen_NxK = jax.lax.top_k(jax.lax.stop_gradient(probability_NxE), top_k)[1]
    # Not the values of top_k: their gradient is a scatter, one number at a time on a CPU.
    one_hot_NxKxE = jax.nn.one_hot(chosen_NxK, probability_NxE.shape[1])
    gates_NxK = (one_hot_NxKxE * probability_NxE[:, None]).sum(2)
    return chosen_NxK, gates_NxK if top_k == 1 else gates_NxK / gates_NxK.sum(1, keepdims=True)


def balance_of(probability_NxE: jax.Array, chosen_NxK: jax.Array) -> jax.Array:
    """float32[]: E x the sum over experts of (share of the tokens' choices) x (mean probability).

    1 if all experts get equally many tokens, E if one gets all. The shares have no gradient; the probabilities do, and
    those of busy experts weigh more (Switch; GShard, Lepikhin et al., 2020).
    """
    count = probability_NxE.shape[1]
    share_E = jax.nn.one_hot(chosen_NxK, count).mean((0, 1))
    return count * (share_E * probability_NxE.mean(0)).sum()


def by_device(
    x_NxD: jax.Array,
    chosen_NxK: jax.Array,
    gates_NxK: jax.Array,
    first_ExDxPxF: jax.Array,
    second_ExFxD: jax.Array,
    activate: Activation,
) -> jax.Array:
    """`experts`, each device for its own share of the rows, if the current mesh divides them.

    Devices along "tensor" have the same rows, and a share of the hidden units of every expert.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)
    hidden = second_ExFxD.shape[1]
    shares = TENSOR if automatic and mesh.shape.get(TENSOR, 1) > 1 and hidden % mesh.shape[TENSOR] == 0 else None
    rows = tuple(axis for axis in mesh.axis_names if axis != shares) if automatic else ()
    if not automatic or mesh.size == 1 or x_NxD.shape[0] % math.prod(mesh.shape[axis] for axis in rows):
        return experts(x_NxD, chosen_NxK, gates_NxK, first_ExDxPxF, second_ExFxD, activate)

    def local(x: jax.Array, chosen: jax.Array, gates: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        y_NxD = experts(x, chosen, gates, first, second, activate)
        return y_NxD if shares is None else jax.lax.psum(y_NxD, shares)

    # XLA cannot partition a sort, or a loop over its result: without this it repeats all of it on every device.
    specs = (P(rows), P(rows), P(rows), P(None, None, None, shares), P(None, shares))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(rows), check_vma=False)(
        x_NxD, chosen_NxK, gates_NxK, first_ExDxPxF, second_ExFxD
    )
