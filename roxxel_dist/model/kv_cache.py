"""What attention keeps of the tokens it has read, so that one more token costs the work of one.

A cache is arrays of fixed shapes: `max_context` slots a row, or `context_window` where attention reaches no further.
The token at place p of its row lies in slot p modulo the number of slots, so that in a window a token takes the slot of
the one that has just gone out of reach.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LayerCache = tuple[jax.Array, ...]
"""What there is of each token: arrays [B, slots, ...] of a cache, or [B, L, ...] of new tokens."""

EMPTY = 1 << 30
"""The place of an empty slot: behind all tokens, so that the causal mask hides it."""


class Cache(NamedTuple):
    """The past of B rows of tokens. Rows may be of different lengths.

    A row holds `max_context` tokens at most: the caller counts, because lengths are not known while tracing.
    """

    length_B: jax.Array
    """int32 [B]: tokens read so far."""
    tokens: LayerCache
    """int32 [B, slots] each: the place in its row of the token in each slot, and its segment."""
    layers: tuple[LayerCache, ...]
    """For each block what its attention keeps: keys and values, or with mla latents and rotary keys."""
    count_B: jax.Array | None = None
    """int32 [B]: how many of the tokens that are read next are real; those behind them are padding, and not kept. None:
    all are real."""


class AttentionMetadata(NamedTuple):
    """What the attention of every block must know about the tokens that are being read."""

    position_L: jax.Array
    """int32 [L], or [B, L]: what positions are computed from."""
    mask_Bx1xLxS: jax.Array | None = None
    """bool: which of S keys each token may attend to. With a cache that is all there is to know; without one, only the
    causal mask and the window are to be added."""
    slot_BxL: jax.Array | None = None
    """int32: where the cache keeps each token; the number of slots for one that it does not keep. None: no cache."""
    segments_BxL: jax.Array | None = None
    """int32, without a cache: attention stays among the tokens of a row that have the same number. None: a row is one
    text."""


def empty_cache(batch: int, slots: int, shapes: Sequence[Sequence[tuple[int, ...]]], dtype: Any) -> Cache:
    """A cache of nothing.

    Args:
        batch: rows.
        slots: tokens that it holds a row.
        shapes: for each block, the shapes of what its attention keeps of a token.
        dtype: of that.
    """
    places = jnp.full((batch, slots), EMPTY, jnp.int32)
    layers = tuple(tuple(jnp.zeros((batch, slots, *shape), dtype) for shape in block) for block in shapes)
    return Cache(jnp.zeros(batch, jnp.int32), (places, jnp.zeros((batch, slots), jnp.int32)), layers)


def prepare(
    cache: Cache, length: int, segments_BxL: jax.Array | None, positions_BxL: jax.Array | None, window: int | None
) -> tuple[AttentionMetadata, Cache]:
    """What the blocks need to read `length` more tokens a row, and the cache after them but for its layers."""
    batch, slots = cache.tokens[0].shape
    place_BxL = cache.length_B[:, None] + jnp.arange(length)
    end_B = cache.length_B + (length if cache.count_B is None else cache.count_B)
    # Of two tokens for one slot only the later is kept: which one a scatter leaves there is not defined.
    kept_BxL = (place_BxL < end_B[:, None]) & (place_BxL >= end_B[:, None] - slots)
    slot_BxL = jnp.where(kept_BxL, place_BxL % slots, slots)
    segment_BxL = jnp.zeros((batch, length), jnp.int32) if segments_BxL is None else segments_BxL
    (seen_place_BxS, seen_segment_BxS), tokens = update(cache.tokens, (place_BxL, segment_BxL), slot_BxL, window)
    back_BxLxS = place_BxL[:, :, None] - seen_place_BxS[:, None]
    mask_BxLxS = (back_BxLxS >= 0) & (segment_BxL[:, :, None] == seen_segment_BxS[:, None])
    if window is not None:
        mask_BxLxS &= back_BxLxS < window
    position_BxL = place_BxL if positions_BxL is None else positions_BxL
    return AttentionMetadata(position_BxL, mask_BxLxS[:, None], slot_BxL), Cache(end_B, tokens, cache.layers)


def update(
    cache: LayerCache, new: LayerCache, slot_BxL: jax.Array, window: int | None
) -> tuple[LayerCache, LayerCache]:
    """Put new tokens into their slots.

    Returns:
        What the new tokens look at, and what is held from now on.
    """
    rows_Bx1 = jnp.arange(slot_BxL.shape[0])[:, None]
    kept = tuple(h.at[rows_Bx1, slot_BxL].set(n, mode="drop") for h, n in zip(cache, new, strict=True))
    if window is None or slot_BxL.shape[1] == 1:
        return kept, kept
    # Several tokens at once take slots whose tokens the first of them still reach.
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(cache, new, strict=True)), kept
