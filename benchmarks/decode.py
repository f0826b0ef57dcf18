"""What a token costs while decoding with a cache: behind prompts of two lengths, and against no cache: ratios.

python benchmarks/decode.py [--quick] [--json FILE]
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import jax
from flax import nnx
from measure import QUICK_ROUNDS, Lines, Result, flags, interleave

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import generate
from roxxel_dist.model.transformer import Transformer

SHAPE = ModelConfig(dim=256, num_blocks=4, n_heads=4, kv_heads=2, vocab_size=4096, max_context=2048)
SHORT, MIDDLE, LONG = 64, 512, 1024
NEW, NEW_WITHOUT = 128, 8
ROUNDS = 5
FLAT, GAIN = 1.3, 5.0


class Uncached(nnx.Module):
    """The same model as one of the user's own, which reads the whole text again for each token."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        return self.model(tokens_BxL)


def main() -> int:
    asked = flags(__doc__).parse_args()
    report = Lines(asked.json)
    report.add("decoding", lambda: of_decoding(QUICK_ROUNDS if asked.quick else ROUNDS))
    return report.end()


def of_decoding(rounds: int) -> Iterable[Result]:
    """Seconds a new token by the wall clock, prefill taken away: the time of many new tokens less that of one."""
    model = Transformer(SHAPE, nnx.Rngs(0))
    calls: dict[str, Callable[[], object]] = {}
    for length in (SHORT, MIDDLE, LONG):
        for new in (1, 1 + NEW):
            calls[f"{length} + {new}"] = partial(add, model, length, new)
    without = Uncached(model)
    for new in (1, 1 + NEW_WITHOUT):
        calls[f"without, {MIDDLE} + {new}"] = partial(add, without, MIDDLE, new)
    times = interleave(calls, 1, time.perf_counter, rounds)
    a_token = {n: (times[f"{n} + {1 + NEW}"] - times[f"{n} + 1"]) / NEW for n in (SHORT, MIDDLE, LONG)}
    first, last = (times[f"without, {MIDDLE} + {new}"] for new in (1, 1 + NEW_WITHOUT))
    what = f"a token decoded behind {LONG:,}"
    yield Result(
        what=what, against=f"x behind {SHORT}", measured=a_token[LONG] / a_token[SHORT], target=FLAT, at_most=True
    )
    yield Result(
        what=f"tokens a second behind {MIDDLE}", against="x without a cache",
        measured=(last - first) / NEW_WITHOUT / a_token[MIDDLE], target=GAIN,
    )  # fmt: skip


def add(model: nnx.Module, length: int, new: int) -> None:
    """So many tokens behind a prompt of `length`, greedily."""
    found = generate(model, [1] * length, new, max_context=SHAPE.max_context, temperature=0.0)
    assert len(found) == new


if __name__ == "__main__":
    sys.exit(main())
