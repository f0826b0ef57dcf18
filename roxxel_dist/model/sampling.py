"""From logits to the next token: greedy, or drawn at a temperature from the likeliest ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_INT, MOST_FLOAT = np.iinfo(np.int32).max, float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. A token must pass both limits; the likeliest one always does.

    Raises:
        ValueError: a value breaks its rule.
    """

    temperature: float = 0.8
    """0 always takes the likeliest token; 1 draws from the model's distribution."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest of the likeliest tokens that have this probability together, at this temperature (Holtzman
    et al., "The curious case of neural text degeneration", 2020); 1 for all."""

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature!r}: it must be 0 (greedy) or more")
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}: it must be at least 1, or 0 for all tokens; a whole number")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}: it must be above 0 and at most 1, which is all tokens")


class How(NamedTuple):
    """The same as inputs of a program: other values compile nothing new."""

    temperature: Any
    """float32[]"""
    top_k: Any
    """int32[]"""
    top_p: Any
    """float32[]"""
    seed_B: Any
    """int32[B]: of each row's draws."""
    end: Any
    """int32[]: the token that ends a row; below 0 for none."""


def how(sampling: Sampling, seeds: Sequence[int], end: int | None) -> How:
    """The options of a batch of rows.

    Raises:
        ValueError: a seed is out of bounds.
    """
    for seed in seeds:
        if not isinstance(seed, Integral) or not 0 <= seed <= MOST_INT:
            raise ValueError(f"seed is {seed!r}: it must be at least 0 and below 2^31, a whole number")
    # What is more than the types hold says the same as the most that they do.
    temperature, top_k = min(sampling.temperature, MOST_FLOAT), min(sampling.top_k, MOST_INT)
    return How(
        np.float32(temperature),
        np.int32(top_k),
        np.float32(sampling.top_p),
        np.asarray(seeds, np.int32),
        np.int32(-1 if end is None else end),
    )


def draw(logits_BxV: jax.Array, place_B: jax.Array, how: How) -> jax.Array:
    """int32[B]: the token for a place in the text of each row. A row's draws depend on its seed and places alone."""
    logits_BxV = logits_BxV.astype(jnp.float32)
    scaled_BxV = logits_BxV / jnp.maximum(how.temperature, 1e-6)
    # Sorting a large vocabulary costs as much as a small model: only where it is asked for.
    limited = (how.temperature > 0) & ((how.top_k > 0) | (how.top_p < 1))
    scaled_BxV = jax.lax.cond(limited, _likeliest, lambda scaled_BxV, _: scaled_BxV, scaled_BxV, how)
    keys_B = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(how.seed_B, place_B)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BxV)
    return jnp.where(how.temperature > 0, drawn_B, jnp.argmax(logits_BxV, axis=1)).astype(jnp.int32)


def _likeliest(scaled_BxV: jax.Array, how: How) -> jax.Array:
    """The logits of the tokens within top_k and top_p; those of the others are minus infinity."""
    order_BxV = jnp.argsort(-scaled_BxV, axis=1, stable=True)
    sorted_BxV = jnp.take_along_axis(scaled_BxV, order_BxV, axis=1)
    rank_V = jnp.arange(scaled_BxV.shape[1])
    within_BxV = jnp.broadcast_to((rank_V < how.top_k) | (how.top_k == 0), scaled_BxV.shape)
    # Of those that are left, as of a distribution of their own.
    probability_BxV = jax.nn.softmax(jnp.where(within_BxV, sorted_BxV, -jnp.inf), axis=1)
    before_BxV = jnp.cumsum(probability_BxV, axis=1) - probability_BxV
    within_BxV &= (before_BxV < how.top_p) | (rank_V == 0)
    rows_Bx1 = jnp.arange(scaled_BxV.shape[0])[:, None]
    kept_BxV = jnp.zeros(scaled_BxV.shape, bool).at[rows_Bx1, order_BxV].set(within_BxV, unique_indices=True)
    return jnp.where(kept_BxV, scaled_BxV, -jnp.inf)
