"""What a mixture of experts costs, against computing every expert for every token: a table of ratios.

python benchmarks/model.py [--quick] [--json FILE]
"""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from measure import QUICK_ROUNDS, Lines, Result, flags, interleave

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.moe import MixtureOfExperts, choose

SHAPE = ModelConfig(dim=256, expansion=4, use_moe=True, n_experts=8, top_k_mlp=2, num_blocks=1)
TOKENS = 8192
TARGET = 0.6
ROUNDS = 5

Layer = Callable[[Any, jax.Array], jax.Array]


def main() -> int:
    asked = flags(__doc__).parse_args()
    report, rounds = Lines(asked.json), QUICK_ROUNDS if asked.quick else ROUNDS
    report.add("forward", lambda: of_mixture("forward", forward, rounds))
    report.add("forward and backward", lambda: of_mixture("forward and backward", backward, rounds))
    return report.end()


def of_mixture(what: str, mode: Callable[[Layer], Callable[..., Any]], rounds: int) -> Iterable[Result]:
    """The layer alone, compiled, by the wall clock: every form may use all of the cores."""
    graphdef, weights = nnx.split(MixtureOfExperts(SHAPE, nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (TOKENS, 1, SHAPE.dim))

    def layer(of: Layer) -> Layer:
        return lambda weights, x: of(nnx.merge(graphdef, weights), x)

    forms = {
        "mine": sorted_by_expert,
        "every expert in one einsum": in_one_einsum,
        "one expert after another": in_turns,
    }
    compiled = {name: jax.jit(mode(layer(form))) for name, form in forms.items()}
    calls = {name: lambda run=run: jax.block_until_ready(run(weights, x)) for name, run in compiled.items()}
    times = interleave(calls, 1, time.perf_counter, rounds)
    for name in list(forms)[1:]:
        yield Result(
            what=f"{SHAPE.top_k_mlp} of {SHAPE.n_experts} experts, dim {SHAPE.dim}, {TOKENS:,} tokens: {what}",
            against=f"x {name}", measured=times["mine"] / times[name], target=TARGET, at_most=True,
        )  # fmt: skip


def forward(layer: Layer) -> Callable[..., Any]:
    return layer


def backward(layer: Layer) -> Callable[..., Any]:
    return jax.value_and_grad(lambda weights, x: jnp.square(layer(weights, x)).sum(), argnums=(0, 1))


def sorted_by_expert(moe: MixtureOfExperts, x: jax.Array) -> jax.Array:
    return moe(x)[0]


def in_one_einsum(moe: MixtureOfExperts, x: jax.Array) -> jax.Array:
    """The textbook's form: all experts as one more axis."""
    inner = moe.activate(jnp.einsum("nd,edp->enp", x[:, 0], moe.first[...]))
    return jnp.einsum("ne,end->nd", _weights(moe, x), jnp.einsum("enh,ehd->end", inner, moe.down[...]))


def in_turns(moe: MixtureOfExperts, x: jax.Array) -> jax.Array:
    """The fastest form on a CPU: what one expert gives stays in its caches."""
    weights = _weights(moe, x)
    each = (weights[:, e, None] * (moe.activate(x[:, 0] @ moe.first[e]) @ moe.down[e]) for e in range(SHAPE.n_experts))
    return sum(each, jnp.zeros_like(x[:, 0]))


def _weights(moe: MixtureOfExperts, x: jax.Array) -> jax.Array:
    """float32[N, E]: what each expert counts for each token, 0 for those not chosen."""
    chosen, gates = choose(jax.nn.softmax(moe.router(x[:, 0])), SHAPE.top_k_mlp)
    return (jax.nn.one_hot(chosen, SHAPE.n_experts) * gates[..., None]).sum(1)


if __name__ == "__main__":
    sys.exit(main())
