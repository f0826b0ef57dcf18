"""The feed-forward layer: plain, or gated (Shazeer, "GLU variants improve Transformer", 2020; SwiGLU is with silu)."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.attention import INIT_STD
from roxxel_dist.model.config import ACTIVATIONS, ModelConfig
from roxxel_dist.model.lora import linear

Activation = Callable[[jax.Array], jax.Array]


class FeedForward(nnx.Module):
    """act(x G) * (x U), projected back; plain: act(x U), projected back. A token sees no other one here.

    Three matrices of 2/3 the width have the parameters of a plain layer's two; the width is rounded up to a multiple
    of 8. `hidden_dim` is the width itself.
    """

    idle = 0
    """Parameters that a token does not meet."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, width = hidden_sizes(config)
        init, init_out = initializers(config)
        self.activate: Activation = activation(config.activation, gated=config.use_swiglu)
        first = linear(config, "mlp", config.dim, width, init, rngs)
        if config.use_swiglu:
            self.gate_up = first
        else:
            self.up = first
        self.down: nnx.Linear = linear(config, "mlp", hidden, config.dim, init_out, rngs)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, L, dim] to [B, L, dim], and a float32[] 0: one layer has no balance to keep (see `MixtureOfExperts`)."""
        first = self.gate_up if hasattr(self, "gate_up") else self.up
        return self.down(self.activate(first(x_BxLxD))), jnp.zeros((), jnp.float32)


def hidden_sizes(config: ModelConfig) -> tuple[int, int]:
    """(the width inside, the width of what the first matrix gives: twice that where half of it is the gate)."""
    plain = config.expansion * config.dim
    hidden = config.hidden_dim or (-(-2 * plain // (3 * 8)) * 8 if config.use_swiglu else plain)
    return hidden, 2 * hidden if config.use_swiglu else hidden


def initializers(config: ModelConfig) -> tuple[nnx.Initializer, nnx.Initializer]:
    """Of the first matrix and of the last, which starts smaller by the depth (see `Attention`)."""
    return nnx.initializers.normal(INIT_STD), nnx.initializers.normal(INIT_STD / (2 * config.num_blocks) ** 0.5)


@cache
def activation(name: str, *, gated: bool) -> Activation:
    """What stands between the two matrices: [..., width] to [..., hidden], see `hidden_sizes`.

    The first half of a gated layer's input is the gate. One object for one function: what it is, programs are compiled
    for.
    """
    bend = _BENDS[name]
    if not gated:
        return bend

    def act_and_multiply(x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x, 2, axis=-1)
        return bend(gate) * up

    return act_and_multiply


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _relu2(x: jax.Array) -> jax.Array:
    """So et al., "Primer", 2021."""
    return jnp.square(jax.nn.relu(x))


_BENDS: dict[str, Activation] = dict(
    zip(ACTIVATIONS, (jax.nn.silu, _gelu, _gelu_tanh, jax.nn.relu, _relu2, jnp.tanh, jax.nn.sigmoid), strict=True)
)
