"""A model and a loss as a user writes them, with parts that name the axes of the mesh by hand. Sound in every layout.

Each other file of this folder is this one with one mistake.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

ROWS = ("data", "fsdp")


def mesh():
    return jax.sharding.get_abstract_mesh()


def size(axis):
    return mesh().shape.get(axis, 1)


def divided(function, *specs, out):
    """A function that sees what one device has."""
    return jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)


class Block(nnx.Module):
    """The mean of the tokens so far, and a layer of hidden units beside it."""

    def __init__(self, width, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

    def mixed(self, x, segments):
        """What of the tokens before, and of the same document, each token sees."""
        place = jnp.arange(x.shape[1])
        seen = place[:, None] >= place[None]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None])
        weights = seen / seen.sum(-1, keepdims=True)
        return jnp.einsum("...ts,bsd->btd", weights, x) if seen.ndim == 2 else jnp.einsum("bts,bsd->btd", weights, x)

    def hidden(self, x):
        return self.down(jax.nn.relu(self.up(x)))

    def __call__(self, x, segments=None):
        y = self.norm(x)
        return x + self.mix(self.mixed(y, segments)) + self.hidden(y)


class Model(nnx.Module):
    """int32[B, L] to [B, L, vocabulary]."""

    block = Block

    def __init__(self, vocabulary, rngs, width=32, depth=2):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([self.block(width, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def states(self, tokens, segments=None, positions=None):
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, segments)
        return self.norm(x)

    def __call__(self, tokens, segments=None, positions=None):
        return self.head(self.states(tokens, segments, positions))


def build(config, rngs):
    return Model(config.vocab_size, rngs)


def taken_apart(batch):
    """Inputs, targets, and which of these count: not token 1, and not the first of a document."""
    if not hasattr(batch, "tokens"):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        return (tokens,), targets, targets != 1
    tokens, segments, positions = batch
    inputs = tokens[:, :-1], segments[:, :-1], positions[:, :-1]
    return inputs, tokens[:, 1:], (segments[:, 1:] == segments[:, :-1]) & (tokens[:, 1:] != 1)


def entropies(model, batch):
    inputs, targets, counted = taken_apart(batch)
    return optax.softmax_cross_entropy_with_integer_labels(model(*inputs), targets), counted


def loss(model, batch):
    losses, counted = entropies(model, batch)
    return {"loss": jnp.where(counted, losses, 0).sum() / counted.sum(), "loss_weight": counted.sum()}


def summed_by_hand(model, batch):
    """The same loss, of sums over the rows of each device."""
    losses, counted = entropies(model, batch)

    def total(losses, counted):
        return jax.lax.psum((jnp.where(counted, losses, 0).sum(), counted.sum()), ROWS)

    rows = losses.shape[0] % (size("data") * size("fsdp")) == 0
    summed, count = divided(total, P(ROWS), P(ROWS), out=P())(losses, counted) if rows else total_of(losses, counted)
    return {"loss": summed / count, "loss_weight": count}


def total_of(losses, counted):
    return jnp.where(counted, losses, 0).sum(), counted.sum()
