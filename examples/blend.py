"""Two data sets in shares that change from phase to phase, of which the smaller one runs out.

It writes both data sets, prints the plan, streams every batch of it to count the shares, and trains a small model
through the same curriculum. Every size is an option (`--help`). Alone or on many processes, it is the same program:

    python examples/blend.py
    roxxel-dist launch local --nprocs 2 --devices-per-proc 2 -- python examples/blend.py
"""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import roxxel_dist
from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.input.stream import Stream
from roxxel_dist.sharding import make_mesh

SEED = 42
VOCAB = 200
"""The ids of the primary data set are below half of it, those of the other one above: a row tells where it is from."""


class Bigram(nnx.Module):
    """Predicts a token from the one before it: int32[B, L] to float32[B, L, vocabulary]."""

    def __init__(self, vocab: int, dim: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.linear = nnx.Linear(dim, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that follows each token."""
        return self.linear(self.embed(tokens))


def loss_fn(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy of every token but the first of a row."""
    logits = model(batch[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def write_data_set(pattern: Path, documents: int, low: int, high: int) -> None:
    """Documents of 128 random tokens from `low` to `high`, and a 0 behind each; the same ones each time."""

    def tokens() -> Iterator[np.ndarray]:
        rng = np.random.default_rng([SEED, low])
        for _ in range(documents):
            yield rng.integers(low, high, 128, dtype=np.uint16)

    with Roxxel(pattern) as data:
        data.write(tokens(), separator=0, vocab_size=VOCAB)


def main(
    folder: Path = Path("blend"),
    documents: int = 400,
    domain_documents: int = 40,
    short_steps: int = 50,
    short_len: int = 33,
    long_steps: int = 20,
    long_len: int = 257,
) -> None:
    """Train on 90 % of one data set and 10 % of another, then on half of each in longer rows.

    Args:
        folder: where the data sets and the run go.
        documents: of 128 tokens each, in the primary data set.
        domain_documents: of 128 tokens each, in the other one.
        short_steps: steps of the first phase, of 16 rows each.
        short_len: tokens of its rows, the last target included.
        long_steps: steps of the second phase, of 2 rows each.
        long_len: tokens of its rows.
    """
    roxxel_dist.initialize()
    primary, domain = folder / "dataset_primary_*.rox", folder / "dataset_domain_*.rox"
    if is_primary() and not list(folder.glob("*.rox")):
        folder.mkdir(parents=True, exist_ok=True)
        write_data_set(primary, documents, 1, VOCAB // 2)
        write_data_set(domain, domain_documents, VOCAB // 2, VOCAB)
    barrier("both data sets are written")

    short, long = {"self": 0.9, "domain_specific": 0.1}, {"self": 0.5, "domain_specific": 0.5}
    phases = [
        Phase(steps=short_steps, batch_size=16, seq_len=short_len, weights=short),
        Phase(steps=long_steps, batch_size=2, seq_len=long_len, weights=long),
    ]
    with Roxxel(primary) as primary_ds, Roxxel(domain) as domain_ds:
        curriculum = Curriculum(
            primary_streamer=primary_ds, phases=phases, mix_streamers={"domain_specific": domain_ds}
        )
        if is_primary():
            tell_what_is_read(curriculum)
        mesh = make_mesh()
        trainer = Trainer(
            model=lambda: Bigram(VOCAB, 16, nnx.Rngs(SEED)),
            optimizer=optax.adamw(1e-2),
            curriculum=curriculum,
            loss_fn=loss_fn,
            save_path=folder / "run",
            log_every=10,
            checkpoint_every=50,
            val_fraction=0.0,
            seed=SEED,
            mesh=mesh,
            data_sharding=NamedSharding(mesh, P("data", None)),
        )
        trainer.run()


def tell_what_is_read(curriculum: Curriculum) -> None:
    """Print the plan, which knows before training when a data set leaves the blend, and count what a stream gives."""
    plan = curriculum.plan(SEED)
    print(plan.describe())
    steps = {number: [0, 0] for number, _ in enumerate(curriculum.phases, 1)}
    for step, batch in enumerate(Stream(plan, curriculum.datasets, sharding=None)):
        steps[plan.phase(step) + 1][int(batch.max() >= VOCAB // 2)] += 1
    for number, (ours, theirs) in steps.items():
        print(f"phase {number}: {ours} steps of self, {theirs} of domain_specific")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in inspect.signature(main).parameters.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(option.default), default=option.default)
    main(**vars(parser.parse_args()))
