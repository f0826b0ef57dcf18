"""The feed-forward layer: plain, or gated (Shazeer, "GLU variants improve Transformer", 2020; SwiGLU is with silu)."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.step_parts import MLP
from roxxel_dist.model.config import ACTIVATIONS, ModelConfig
from roxxel_dist.model.lora import linear

Activation = Callable[[jax.Array], jax.Array]


class Balance(NamedTuple):
    """How evenly the experts of a layer are used, or those of a stack of layers."""

    loss: jax.Array
    """float32[]: of a layer 1 where all experts get equally many tokens; of a stack the sum; 0 without experts."""
    load: jax.Array | None = None
    """float32[experts]: of a layer the share of its tokens' choices that each has; of a stack [layers, experts]."""
    dropped: jax.Array | None = None
    """float32[]: of a layer the share of these choices that are dropped, where experts have a capacity; of a stack
    [layers]."""


class FeedForward(nnx.Module):
    """act(x G) * (x U), projected back; plain: act(x U), projected back. Tokens are independent.

    Three matrices of 2/3 the width have as many parameters as the two of a plain layer; the width is rounded up to a
    multiple of 8. `hidden_dim` is the width itself. The first matrix is [D, 2, F], gate and up; of a plain layer [D, 1,
    F].
    """

    inactive_params = 0
    """Parameters that a token does not use."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        count, hidden = hidden_sizes(config)
        init, init_out = initializers(config)
        self.activate: Activation = activation(config.activation, gated=config.use_swiglu)
        axes = (FSDP, None, TENSOR)
        self.gate_up: nnx.LinearGeneral = linear(config, "mlp", config.dim, (count, hidden), axes, init, rngs)
        self.down: nnx.LinearGeneral = linear(config, "mlp", hidden, config.dim, (TENSOR, FSDP), init_out, rngs)

    @jax.named_scope(MLP)
    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, Balance]:
        """[B, L, dim] to [B, L, dim], and the balance without experts (see `MixtureOfExperts`)."""
        return self.down(self.activate(self.gate_up(x_BxLxD))), Balance(jnp.zeros((), jnp.float32))


def hidden_sizes(config: ModelConfig) -> tuple[int, int]:
    """(the number of first matrices: 2 with a gate, otherwise 1; the hidden width)."""
    plain = config.expansion * config.dim
    hidden = config.hidden_dim or (-(-2 * plain // (3 * 8)) * 8 if config.use_swiglu else plain)
    return 2 if config.use_swiglu else 1, hidden


def initializers(config: ModelConfig) -> tuple[nnx.Initializer, nnx.Initializer]:
    """The initializers of the first matrix, and of the last, which starts smaller by the depth (see `Attention`)."""
    return nnx.initializers.normal(config.init_std), nnx.initializers.normal(
        config.init_std / (2 * config.num_blocks) ** 0.5
    )


@cache
def activation(name: str, *, gated: bool) -> Activation:
    """The function between the two matrices: [..., 2, F] to [..., F], act(gate) * up; plain: [..., 1, F] to [..., F].

    Equal arguments return the same object, because jit compiles for each object.
    """
    act = _ACTIVATIONS[name]
    if gated:
        return lambda x: act(x[..., 0, :]) * x[..., 1, :]
    return lambda x: act(x[..., 0, :])


_GELU, _GELU_TANH = (partial(jax.nn.gelu, approximate=is_tanh) for is_tanh in (False, True))
_FUNCTIONS: tuple[Activation, ...] = (
    jax.nn.silu, _GELU, _GELU_TANH, jax.nn.relu, lambda x: jnp.square(jax.nn.relu(x)), jnp.tanh, jax.nn.sigmoid,
)  # fmt: skip
_ACTIVATIONS: dict[str, Activation] = dict(zip(ACTIVATIONS, _FUNCTIONS, strict=True))
"""relu2: So et al., "Primer", 2021."""
