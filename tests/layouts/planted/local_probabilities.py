"""A balance loss of the counts of all devices, and the probabilities of one."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from layouts.planted import sound
from layouts.planted.sound import ROWS, build, divided  # noqa: F401


def loss(model, batch):
    inputs, _, _ = sound.taken_apart(batch)

    def balance(scores):
        scores = scores.reshape(-1, scores.shape[-1])
        counts = jax.lax.psum(jax.nn.one_hot(scores.argmax(-1), scores.shape[-1]).sum(0), ROWS)
        probabilities = jax.nn.softmax(scores).sum(0)
        return (counts * probabilities).sum() / jnp.square(counts.sum())

    return sound.loss(model, batch) | {"balance_loss": divided(balance, P(ROWS), out=P())(model(*inputs))}
