"""The model of `make demo` against a 3-gram model of the same tokens: losses on the held-out part, in nats a token.

The 3-gram is interpolated with modified Kneser-Ney smoothing (Chen and Goodman, "An empirical study of smoothing
techniques for language modeling", 1998). It counts what the training has read, no more and no less, and both predict
every token of the held-out part in the same rows of 257 tokens: all but the first of a row, from those before it there.

python benchmarks/ngram.py FOLDER [--json FILE]
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from measure import Lines, Result, flags

from roxxel_dist import Config, Plan, Roxxel
from roxxel_dist.cli.train import CONFIG, corpus_words
from roxxel_dist.model.loss import token_losses
from roxxel_dist.run.curriculum import build_curriculum, saved_metadata
from roxxel_dist.weights.load import load_run

ROW = 257
ROWS_AT_ONCE = 16
CPU_LIMIT_S = 600.0


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    report = Lines(asked.json)
    report.add("the demo's model and n-grams", lambda: of_demo(asked.folder))
    return report.end()


def of_demo(folder: Path) -> Iterable[Result]:
    """Train the demo's model; then count what it has read."""
    data, run = folder / "demo_data", folder / f"ngram_{time.strftime('%Y%m%d_%H%M%S')}"
    if not data.exists():
        build(data)
    command("train", "--config", CONFIG, "--data_path", data, "--run_dir", run)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    corpus, saved = Roxxel(data), saved_metadata(run)
    assert saved is not None, "the training has saved its plan"
    plan = Plan.from_state(saved.plan)
    config = Config.from_yaml(run / "config.yaml")
    rows = in_rows(build_curriculum(config, corpus)[1])
    mine = of_model(run, rows)
    grams = of_grams(tokens_read(corpus, plan), rows, config.vocab_size)
    tokens = sum(plan.tokens(step) for step in range(plan.total_steps))
    what = f"demo.yaml, {tokens:,} tokens read, {rows[:, 1:].size:,} held out"
    yield Result(what="the model", against="nats a token", measured=mine)
    for n, loss in enumerate(grams, 1):
        yield Result(what=f"{n}-gram", against="nats a token", measured=loss)
    yield Result(what=what, against="x 3-gram", measured=mine / grams[-1], target=1.0, at_most=True)
    cpu = used.ru_utime + used.ru_stime
    yield Result(what="CPU time of the training", against="s", measured=cpu, target=CPU_LIMIT_S, at_most=True)


def build(out: Path) -> None:
    """The corpus of `make demo`."""
    command("data", "build", *corpus_words(str(out)))


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "roxxel_dist", *map(str, words)], check=True)


def in_rows(held_out: Roxxel) -> np.ndarray:
    """int64[N, 257]: the held-out part of each shard in rows, the last token of each being the first of the next."""
    starts = [np.arange(first, first + length - ROW + 1, ROW - 1) for first, length in held_out.ranges]
    return held_out.read(np.concatenate(starts), ROW).astype(np.int64)


def tokens_read(corpus: Roxxel, plan: Plan) -> list[np.ndarray]:
    """int64[B, L] of every step."""
    found = (plan.rows(step) for step in range(plan.total_steps))
    return [corpus.read(rows.offset, rows.seq_len).astype(np.int64) for rows in found]


def of_model(run: Path, rows: np.ndarray) -> float:
    model, *_ = load_run(run)
    graphdef, state = nnx.split(model)
    losses = jax.jit(lambda state, batch: token_losses(nnx.merge(graphdef, state), batch)["row_loss"])
    pieces = np.array_split(rows.astype(np.int32), -(-len(rows) // ROWS_AT_ONCE))
    return float(np.concatenate([losses(state, piece) for piece in pieces]).mean())


def of_grams(batches: list[np.ndarray], rows: np.ndarray, vocabulary: int) -> list[float]:
    """The mean losses of a 1-gram, a 2-gram and a 3-gram.

    The lower ones are those that the 3-gram falls back to: they count in how many contexts a token was seen.
    """
    size = vocabulary
    threes = np.concatenate([((b[:, :-2] * size + b[:, 1:-1]) * size + b[:, 2:]).ravel() for b in batches])
    threes, of_threes = np.unique(threes, return_counts=True)
    twos, of_twos = np.unique(threes % size**2, return_counts=True)
    ones, of_ones = np.unique(twos % size, return_counts=True)
    next_token, pair = rows[:, 1:], rows[:, :-1] * size + rows[:, 1:]
    uniform = np.full(next_token.shape, 1 / size)
    one = Level(ones, of_ones, size).probability(next_token, uniform)
    two = Level(twos, of_twos, size).probability(pair, one)
    three = two.copy()  # before a row's second token there is one token alone
    three[:, 1:] = Level(threes, of_threes, size).probability(rows[:, :-2] * size**2 + pair[:, 1:], two[:, 1:])
    return [float(-np.log(p).mean()) for p in (one, two, three)]


class Level:
    """n-grams of one length.

    Args:
        codes: int64[N], sorted: context x vocabulary + token.
        counts: of each.
        size: of the vocabulary.
    """

    def __init__(self, codes: np.ndarray, counts: np.ndarray, size: int) -> None:
        self.codes, self.size = codes, size
        discount = discounts(counts)[np.minimum(counts, 3)]
        self.left = counts - discount
        self.contexts, first = np.unique(codes // size, return_index=True)
        self.total, self.taken = np.add.reduceat(counts, first), np.add.reduceat(discount, first)

    def probability(self, code: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Of each token in its context; what the discounts took from the seen is given out as `lower` says."""
        at = np.minimum(np.searchsorted(self.codes, code), len(self.codes) - 1)
        context = np.minimum(np.searchsorted(self.contexts, code // self.size), len(self.contexts) - 1)
        known = self.contexts[context] == code // self.size
        left = np.where(self.codes[at] == code, self.left[at], 0)
        return np.where(known, (left + self.taken[context] * lower) / self.total[context], lower)


def discounts(counts: np.ndarray) -> np.ndarray:
    """float64[4]: what is taken from n-grams that were counted 0, 1, 2 and more times (their equation 26)."""
    ones, twos, threes, fours = (int((counts == n).sum()) for n in (1, 2, 3, 4))
    if not min(ones, twos, threes):  # too few to estimate from: of single tokens, all of which are frequent
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = ones / (ones + 2 * twos)
    return np.array([0.0, 1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes])


if __name__ == "__main__":
    sys.exit(main())
