"""A pre-training run in one file: write a corpus, train on short rows, then on long ones.

It runs in seconds on a CPU; every size is an option (`--help`). Alone or on many processes, it is the same program:

    python examples/curriculum_tutorial.py
    python -m roxxel_dist launch local --nprocs 2 --devices-per-proc 2 -- python examples/curriculum_tutorial.py

Started again it continues where it was, or says that it is finished. README.md tells where it comes from, and what was
put right.
"""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import roxxel_dist
from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.train.step.state import TrainView

SEED = 42
LR = 3e-4
LONG_SHARE = 0.2
"""Of a pass over the corpus, for the phase of long rows."""


class Bigram(nnx.Module):
    """Predicts a token from the one before it: int32[B, L] to float32[B, L, vocabulary]."""

    def __init__(self, vocab: int, dim: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.linear = nnx.Linear(dim, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token that follows each token."""
        return self.linear(self.embed(tokens))


def write_corpus(pattern: Path, documents: int, vocab: int) -> None:
    """Documents of 128 random tokens; the same ones each time."""

    def tokens() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(SEED)
        for _ in range(documents):
            yield rng.integers(1, vocab, 128, dtype=np.int32)  # 0 ends a document

    with Roxxel(pattern) as data:
        data.write(tokens(), separator=b"\x00", block_size=4096, max_shard_bytes=1 << 30)


def loss_fn(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy of every token but the first of a row."""
    logits = model(batch[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def sample_now(state: TrainView) -> str:
    """A real program would let the model write here."""
    return f"[sample after step {int(state.step[...])}] Once upon a time, on a mesh of devices"


def schedule(total_steps: int) -> optax.Schedule:
    """A short warm-up, then a cosine over all phases together."""
    return optax.warmup_cosine_decay_schedule(
        init_value=1e-7,
        peak_value=LR,
        warmup_steps=int(total_steps * 0.05),
        decay_steps=total_steps,
        end_value=LR * 0.01,
    )


def main(
    folder: Path = Path("tutorial"),
    documents: int = 256,
    vocab: int = 1000,
    dim: int = 32,
    short_batch: int = 16,
    short_len: int = 65,
    long_batch: int = 1,
    long_len: int = 513,
    every: int = 10,
) -> None:
    """Train through two phases.

    Args:
        folder: where the corpus and the run go.
        documents: of 128 tokens each, in the corpus.
        vocab: tokens there are.
        dim: width of the model.
        short_batch: rows of a batch in the first phase.
        short_len: tokens of a row in the first phase, the last target included.
        long_batch: rows of a batch in the second phase.
        long_len: tokens of a row in the second phase.
        every: steps between log rows, samples and checkpoints.
    """
    roxxel_dist.initialize()
    pattern = folder / "wiki_*.rox"
    if is_primary() and not list(folder.glob("wiki_*.rox")):
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(pattern, documents, vocab)
    barrier("the corpus is written")

    devices = jax.devices()
    mesh = Mesh(mesh_utils.create_device_mesh((len(devices),), devices), axis_names=("data",))
    with Roxxel(pattern) as data:
        short_steps = data.estimate_steps(seq_len=short_len, batch_size=short_batch)
        long_steps = int(data.estimate_steps(seq_len=long_len, batch_size=long_batch) * LONG_SHARE)
        short = Phase(steps=short_steps, batch_size=short_batch, seq_len=short_len)
        long = Phase(steps=long_steps, batch_size=long_batch, seq_len=long_len)
        model = Bigram(vocab, dim, nnx.Rngs(SEED))
        nadamw = optax.nadamw(schedule(short_steps + long_steps), weight_decay=0.01)
        tx = optax.chain(optax.clip_by_global_norm(1.0), nadamw)
        trainer = Trainer(
            model=model,
            optimizer=nnx.Optimizer(model, tx, wrt=nnx.Param),
            curriculum=Curriculum(primary_streamer=data, phases=[short, long]),
            loss_fn=loss_fn,
            save_path=folder / "run",
            eval_fn=sample_now,
            eval_every=every,
            checkpoint_every=every,
            log_every=every,
            val_fraction=0.0,
            seed=SEED,
            mesh=mesh,
            data_sharding=NamedSharding(mesh, P("data", None)),
        )
        trainer.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in inspect.signature(main).parameters.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(option.default), default=option.default)
    main(**vars(parser.parse_args()))
