"""The balance of experts is that of the tokens of a device alone."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted import mixture
from layouts.planted.mixture import ROWS, build  # noqa: F401
from layouts.planted.sound import divided, taken_apart


def loss(model, batch):
    inputs, _, _ = taken_apart(batch)

    def balance(scores):
        return jnp.square(jax.lax.pmean(jax.nn.softmax(scores, -1).mean((0, 1)), ("data", "fsdp"))).sum()

    return mixture.loss(model, batch) | {"balance_loss": 0.1 * divided(balance, P(ROWS), out=P())(model(*inputs))}
