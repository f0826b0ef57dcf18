"""A language model of gated linear recurrences, and its loss: all that `model` and `loss` of a config need."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Recurrence(nnx.Module):
    """Carries a state along a row: h_t = a_t h_(t-1) + (1 - a_t) u_t, where a_t and u_t follow from the token alone."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.inner = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """The input and what the state adds to it. All positions at once, by an associative scan."""
        value, gate, keep = jnp.split(self.inner(self.norm(x_BxLxD)), 3, axis=-1)
        decay = jax.nn.sigmoid(keep + 2.0)  # remembers some ten tokens to begin with

        def joined(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, state = jax.lax.associative_scan(joined, (decay, (1 - decay) * value), axis=1)
        return x_BxLxD + self.out(state * jax.nn.silu(gate))


class Model(nnx.Module):
    """Embedding, recurrences, logits: int32[B, L] to float32[B, L, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([Recurrence(width, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that follows each token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(config: Any, rngs: nnx.Rngs) -> Model:
    """The model of a config. `model_args` are free: here `width` and `depth`. Its vocabulary is known by now."""
    width, depth = config.model_args.get("width", 64), config.model_args.get("depth", 2)
    if width < 1 or depth < 1:
        raise ValueError(f"model_args: width is {width} and depth is {depth}: both must be at least 1")
    return Model(config.vocab_size, width, depth, rngs)


def loss(model: Model, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What is minimised, and numbers that go into the log beside it. `batch` is int32[B, L]."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    accuracy = (jnp.argmax(logits, axis=-1) == targets).mean()
    too_large = 1e-4 * jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean()  # keeps logits from drifting
    return entropy + too_large, {"accuracy": accuracy}
