"""Small runs for the tests of the loop."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models import with_numbers

from roxxel_dist import Curriculum, Phase, Trainer
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import Dropout
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.train.saves import StepAgreement

ADAM = optax.adam(3e-2)
STILL = optax.sgd(0.0)
"""Learns nothing, so that no validation is better than the first."""
PHASES = [Phase(6, 8, 17), Phase(4, 8, 17), Phase(3, 8, 33)]


class Bigram(nnx.Module):
    """The next token from the last one alone: all that the loop asks of a model, and it compiles soon."""

    def __init__(self, config, rngs):
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.dim, rngs=rngs)
        self.dropout = Dropout(config.dropout_rate, rngs=rngs) if config.dropout_rate else None
        self.norm = nnx.RMSNorm(config.dim, rngs=rngs)
        self.head = nnx.Linear(config.dim, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens, *_):
        x = self.norm(self.embedding(tokens))
        return self.head(x if self.dropout is None else self.dropout(x))


def model(**fields):
    """The same weights each time, for a trainer to make."""
    return Bigram(ModelConfig(**{"dim": 16, "vocab_size": 500} | fields), nnx.Rngs(params=0, dropout=1))


def module(**fields):
    """Such a model that is there already, with numbers of its own: no program makes it."""
    return with_numbers(lambda: model(**fields), rate=fields.get("dropout_rate", 0.0))


def build(config, rngs):
    """Such a model of a `Config`, whose `model` is "runs:build"."""
    sizes = {"dim": config.dim, "vocab_size": config.vocab_size, "dropout_rate": config.dropout_rate}
    return Bigram(ModelConfig(**sizes), rngs)


def make(corpus, path, phases=PHASES, loss_fn=next_token_loss, **options):
    """A trainer that has taken up its run: on two devices, where nothing else is asked for."""
    usual = {"eval_every": 5, "checkpoint_every": 100, "log_every": 1, "eval_iters": 2, "val_fraction": 0.1}
    settings = usual | options
    settings.setdefault("mesh", make_mesh(2))
    optimizer = settings.pop("optimizer", ADAM)
    made = Trainer(settings.pop("model", model), optimizer, Curriculum(corpus, phases), loss_fn, path, **settings)
    made.open()
    return made


def train(corpus, path, phases=PHASES, **options):
    """Run to the end."""
    made = make(corpus, path, phases, **options)
    made.run()
    return made


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def losses(path):
    return [(row["step"], row["train_loss"], row.get("val_loss")) for row in rows(path)]


def told(path):
    """The messages to the user."""
    return (path / "logs" / "rank-0.log").read_text()


def saved(path):
    return sorted(int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdigit())


def poisoned(corpus, phases, *steps):
    """A loss that is no number on the batches which these steps (from 1) read."""
    curriculum, _ = Curriculum(corpus, phases).hold_out(0.1)
    plan = curriculum.plan(42)
    batches = [corpus.read(plan.rows(step - 1).offset, 17, np.int32) for step in steps]

    def loss_fn(model, batch):
        loss = next_token_loss(model, batch)
        for tokens in batches:
            loss = loss * jnp.where((batch == tokens).all(), jnp.nan, 1.0)
        return loss

    return loss_fn


def stop_after(patch, step):
    """Every trainer is asked to stop after `step`, while a `pytest.MonkeyPatch` lasts."""
    after = StepAgreement.announcement
    patch.setattr(StepAgreement, "announcement", lambda self, done: replace(after(self, done), stop=done == step))
