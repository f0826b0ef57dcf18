"""A second term is added to the sum over tokens, before that is divided by their number."""

import jax.numpy as jnp
from layouts.planted import sound
from layouts.planted.sound import build, entropies  # noqa: F401


def loss(model, batch):
    losses, counted = entropies(model, batch)
    inputs, _, _ = sound.taken_apart(batch)
    balance = jnp.square(model(*inputs)).mean()
    return {"loss": (jnp.where(counted, losses, 0).sum() + balance) / counted.sum(), "loss_weight": counted.sum()}
