"""Models of a user's own, as a package on PYTHONPATH has them: a recurrent one, and some that are wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import roxxel_dist
from roxxel_dist.lora import LoRALinear


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


class Attending(nnx.Module):
    """Layers of attention over embedded tokens, by the package's function or by jax's, in rows or packed documents."""

    def __init__(self, vocabulary, width, depth, heads, rngs, plain=False):
        self.heads, self.plain = heads, plain
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, 3 * width, rngs=rngs) for _ in range(depth)])
        self.mix = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.out = nnx.Linear(width, vocabulary, rngs=rngs)

    def states(self, tokens, segments=None, positions=None):
        x = self.embedding(tokens)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(layer(x), 3, axis=-1))
            if self.plain:
                mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            else:
                mixed = roxxel_dist.attention(q, k, v, segments=segments, positions=positions)
            x = x + jax.nn.relu(mix(mixed.reshape(x.shape)))
        return x

    def logits(self, x):
        return self.out(x)

    def __call__(self, *batch):
        return self.logits(self.states(*batch))


class Placed(nnx.Module):
    """Names the axes of a mesh: for parameters, where it makes one, and for what it computes."""

    def __init__(self, vocabulary, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "data"))
        self.embedding = nnx.Embed(vocabulary, 32, rngs=rngs)
        self.out = nnx.Linear(32, vocabulary, use_bias=False, kernel_init=init, rngs=rngs)
        self.mean = nnx.BatchStat(jax.lax.with_sharding_constraint(jnp.zeros(32), jax.P("data")))

    def __call__(self, tokens):
        return self.out(self.mean[...] + jax.lax.with_sharding_constraint(self.embedding(tokens), jax.P("data")))


def build_placed(config, rngs):
    return Placed(config.vocab_size, rngs)


def build_attending(config, rngs):
    return Attending(config.vocab_size, **({"width": 32, "depth": 2, "heads": 2} | config.model_args), rngs=rngs)


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


class Seen(nnx.Variable):
    """State of a kind that NNX does not know."""


class Counting(nnx.Module):
    """Counts its calls in an array beside its parameters."""

    def __init__(self, kind, first):
        self.seen = kind(first)

    def __call__(self):
        now = self.seen[...]
        self.seen[...] = (now + jnp.ones_like(now)).astype(now.dtype)
        return now.astype(jnp.float32).sum()


KINDS = {
    "a statistic": lambda: Counting(nnx.BatchStat, jnp.zeros(3)),
    "a cache": lambda: Counting(nnx.Cache, jnp.zeros((2, 1), jnp.bfloat16)),
    "a kind of its own": lambda: Counting(Seen, jnp.zeros((), jnp.float16)),
    "a plain variable": lambda: Counting(nnx.Variable, jnp.zeros(2, jnp.int32)),
    "a count of bytes": lambda: Counting(nnx.Variable, jnp.zeros((1, 2), jnp.uint8)),
}
"""The attribute `kinds` of `Stateful`, a dictionary of modules."""


class Stateful(nnx.Module):
    """Bigrams, whose logits also depend on all kinds of state, and which count the calls in training."""

    def __init__(self, vocabulary, width, rngs):
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.tied = self.embedding.embedding  # one variable by two names
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.kinds = nnx.Dict({name.replace(" ", "_"): make() for name, make in KINDS.items()})
        self.listed = nnx.List([Counting(Seen, jnp.zeros(1)), Counting(nnx.BatchStat, jnp.zeros(1))])
        self.shared = self.listed[0]  # a module by two names
        self.array = nnx.data(jnp.arange(3.0))
        self.nested = nnx.Variable({"a": jnp.zeros(1), "b": [jnp.zeros(2)]})
        self.key = nnx.Variable(jax.random.key(5))
        self.old_key = nnx.Variable(jax.random.PRNGKey(5))
        self.number, self.factor = nnx.Variable(0), nnx.Variable(1.0)  # numbers of Python
        self.flags = nnx.Variable(np.zeros(2, bool))  # an array of numpy
        self.gain = nnx.Param(jnp.ones(()))
        self.out = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.gain * self.dropout(self.norm(3 + 2 * self.embedding(tokens)))
        bias = sum(module() for module in [*self.kinds.values(), *self.listed])
        self.array = self.array + 1
        self.number[...] += 1
        self.factor[...] = self.factor[...] * 2
        self.flags[...] = ~self.flags[...]
        self.old_key[...] = jax.random.split(self.old_key[...])[0]
        self.hidden = nnx.Intermediate(x)  # it is made by the call, and is no state
        self.nested.set_value(jax.tree.map(lambda leaf: leaf + 1, self.nested.get_value()))
        self.key[...] = jax.random.fold_in(self.key[...], 1)
        noise = jax.random.normal(self.key[...], (len(self.tied),))
        return self.out(x) + 1e-3 * bias * noise + x @ self.tied.T


def build_stateful(config, rngs):
    return Stateful(config.vocab_size, config.dim, rngs)


def loss_of_state(model, batch):
    """It falls by one a step, from a hundred."""
    return 100 - model(batch[:, :-1]).mean() * 0 - model.shared.seen[...].sum()


def build_adapted(config, rngs):
    """The same model with an adapter."""
    model = build_stateful(config, rngs)
    model.out = LoRALinear(config.dim, config.vocab_size, rank=2, use_bias=True, rngs=rngs)
    return model


def build_wider_state(config, rngs):
    """The same model with a statistic more, and one in another shape."""
    model = build_stateful(config, rngs)
    model.more = nnx.BatchStat(jnp.full(2, 7.0))
    model.kinds["a_cache"].seen = nnx.Cache(jnp.full((4, 1), 7.0, jnp.bfloat16))
    return model
