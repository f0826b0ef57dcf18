"""Small runs for the tests of the loop."""

import json

import optax
from flax import nnx

from roxxel_dist import Curriculum, Phase, Trainer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

PHASES = [Phase(6, 8, 17), Phase(4, 8, 17), Phase(3, 8, 33)]


def model(**fields):
    """The same weights each time."""
    shape = ModelConfig(**{"dim": 16, "num_blocks": 1, "vocab_size": 500, "max_context": 64} | fields)
    return Transformer(shape, nnx.Rngs(params=0, dropout=1))


def make(corpus, path, phases=PHASES, loss_fn=next_token_loss, **options):
    settings = {"eval_every": 5, "checkpoint_every": 4, "log_every": 1, "eval_iters": 2, "val_fraction": 0.1} | options
    optimizer = settings.pop("optimizer", optax.adam(1e-2))
    return Trainer(settings.pop("model", model), optimizer, Curriculum(corpus, phases), loss_fn, path, **settings)


def train(corpus, path, phases=PHASES, **options):
    """Run to the end; the trainer is closed."""
    made = make(corpus, path, phases, **options)
    try:
        made.run()
    finally:
        made.close()
    return made


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def losses(path):
    return [(row["step"], row["train_loss"], row.get("val_loss")) for row in rows(path)]


def told(path):
    """What was said to people."""
    return (path / "logs" / "rank-0.log").read_text()


def saved(path):
    return sorted(int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdigit())
