"""Models of a user's own, as a package on PYTHONPATH has them: a recurrent one, and some that are wrong."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Recurrent(nnx.Module):
    """Layers of gated recurrent units over embedded tokens, with dropout."""

    def __init__(self, vocabulary, width, depth, dropout, rngs):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([nnx.RNN(nnx.GRUCell(width, width, rngs=rngs), rngs=rngs) for _ in range(depth)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return self.out(x)


def build(config, rngs):
    arguments = {"width": 32, "depth": 1, "dropout": 0.1} | config.model_args
    if arguments["depth"] < 1:
        raise ValueError(f"model_args.depth is {arguments['depth']}: it must be at least 1")
    return Recurrent(config.vocab_size, rngs=rngs, **arguments)


def loss(model, batch):
    """Cross-entropy, and how often the likeliest token was right."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    right = (jnp.argmax(logits, -1) == targets).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), {"accuracy": right}


class Pooled(Recurrent):
    """One vector of logits for a whole row: nothing that a text could be continued with."""

    def __call__(self, tokens):
        return super().__call__(tokens).mean(1)


def build_pooled(config, rngs):
    return Pooled(config.vocab_size, 16, 1, 0.0, rngs)


def pooled_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, -1]).mean()


def no_module(config, rngs):
    return jax.nn.relu


def loss_of_each(model, batch):
    """Not one number."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])


def loss_of_nothing(model):
    """It takes no batch."""
    return 0.0


NUMBER = 3
