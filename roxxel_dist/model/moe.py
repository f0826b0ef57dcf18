"""A mixture of experts (Shazeer et al., 2017): many feed-forward layers, of which each token goes through a few."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR
from roxxel_dist.model.attention import INIT_STD
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.experts import Activate, experts
from roxxel_dist.model.feedforward import Activation, activation, hidden_sizes, initializers
from roxxel_dist.model.lora import ADAPTER, ExpertsAdapter
from roxxel_dist.model.setting import FULL_PRECISION


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
