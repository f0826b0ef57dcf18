"""The key-value cache of attention, so that each new token costs the work of one token.

A cache has arrays of fixed shapes: `max_context` slots for each row, or `context_window` with a window. The token at
place p of its row is in slot p modulo the number of slots: with a window, a token takes the slot of the one that has
just left the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.model.attention.mask import Mask

LayerCache = tuple[jax.Array, ...]
"""The cached values of each token: arrays [B, slots, ...] of a cache, or [B, L, ...] of new tokens."""

EMPTY = 1 << 30
"""The place of an empty slot: after all tokens, so that the causal mask hides it."""


class Cache(NamedTuple):
    """The past of B rows of tokens. Rows may be of different lengths.

    A row holds at most `max_context` tokens: the caller must check, because lengths are not known while tracing.
    """

    length_B: jax.Array
    """int32 [B]: tokens read so far."""
    tokens: LayerCache
    """int32 [B, slots] each: the place in its row of the token in each slot, and its segment."""
    layers: tuple[LayerCache, ...]
    """For each block the entries of its attention: keys and values, or with mla latents and rotary keys."""
    count_B: jax.Array | None = None
    """int32 [B]: how many of the tokens that are read next are real; those after them are padding, and are not cached.
    None: all are real."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layer:
    """What a layer knows while it is traced: no array has it."""

    number: int = 0
    """Its number, or that of another one of its kind."""
    length: int | None = None
    """Tokens of a row, before its padding; None: it has none."""


FIRST = Layer()


class AttentionMetadata(NamedTuple):
    """The inputs of attention in every block, for the tokens that are being read."""

    position_L: jax.Array
    """int32 [L], or [B, L]: the positions."""
    mask_Bx1xLxS: jax.Array | None = None
    """bool: which of S keys each token may attend to. With a cache it is the complete mask; without one, attention adds
    the causal mask and the window. None: to the earlier ones of the tokens that are being read, within the window."""
    slot_BxL: jax.Array | None = None
    """int32: the cache slot of each token; the number of slots if it is not cached. None: no cache."""
    segments_BxL: jax.Array | None = None
    """int32, without a mask: attention stays among the tokens of a row that have the same number. None: a row is one
    text."""
    local_mask_Bx1xLxS: jax.Array | None = None
    """The complete mask of layers with a window, where other layers have none."""
    layer: Layer = FIRST
    """The layer that attends."""

    def mask(self, rule: Mask, window: int | None) -> Mask:
        """Which keys the tokens attend to in a layer with such a window; `rule`: how all layers score."""
        pairs = self.mask_Bx1xLxS
        if pairs is not None and window is not None and self.local_mask_Bx1xLxS is not None:
            pairs = self.local_mask_Bx1xLxS
        causal = pairs is None or self.slot_BxL is None  # with a cache, the pairs include causality
        segments = self.segments_BxL if pairs is None else None
        return replace(rule, window=window, causal=causal, segments=segments, pairs=pairs)


def empty_cache(batch: int, slots: int, shapes: Sequence[Sequence[tuple[int, ...]]], dtype: Any) -> Cache:
    """An empty cache of `batch` rows with so many slots. `shapes`: for each block, the shapes of a token's entries."""
    places = jnp.full((batch, slots), EMPTY, jnp.int32)
    layers = tuple(tuple(jnp.zeros((batch, slots, *shape), dtype) for shape in block) for block in shapes)
    return Cache(jnp.zeros(batch, jnp.int32), (places, jnp.zeros((batch, slots), jnp.int32)), layers)


def prepare(
    cache: Cache,
    length: int,
    segments_BxL: jax.Array | None,
    positions_BxL: jax.Array | None,
    window: int | None,
    *,
    local_window: int | None = None,
    is_empty: bool = False,
) -> tuple[AttentionMetadata, Cache]:
    """The metadata to read `length` more tokens of each row, and the cache after them, except for its layers.

    Of an empty cache they need no mask, which is [B, 1, L, slots]: they attend to each other alone, and padding comes
    after the real tokens.

    `window` is that of all layers. `local_window` is that of some, where others see all tokens.
    """
    batch, slots = cache.tokens[0].shape
    place_BxL = cache.length_B[:, None] + jnp.arange(length)
    end_B = cache.length_B + (length if cache.count_B is None else cache.count_B)
    # Of two tokens for one slot only the later is kept: the result of a scatter with duplicates is not defined.
    kept_BxL = (place_BxL < end_B[:, None]) & (place_BxL >= end_B[:, None] - slots)
    slot_BxL = jnp.where(kept_BxL, place_BxL % slots, slots)
    segment_BxL = jnp.zeros((batch, length), jnp.int32) if segments_BxL is None else segments_BxL
    (seen_place_BxS, seen_segment_BxS), tokens = update(cache.tokens, (place_BxL, segment_BxL), slot_BxL, window)
    back_BxLxS = place_BxL[:, :, None] - seen_place_BxS[:, None]
    mask_BxLxS = (back_BxLxS >= 0) & (segment_BxL[:, :, None] == seen_segment_BxS[:, None])
    if window is not None:
        mask_BxLxS &= back_BxLxS < window
    position_BxL = place_BxL if positions_BxL is None else positions_BxL
    after = Cache(end_B, tokens, cache.layers)
    if is_empty:
        return AttentionMetadata(position_BxL, slot_BxL=slot_BxL, segments_BxL=segments_BxL), after
    local = None if local_window is None else (mask_BxLxS & (back_BxLxS < local_window))[:, None]
    return AttentionMetadata(position_BxL, mask_BxLxS[:, None], slot_BxL, local_mask_Bx1xLxS=local), after


def update(
    cache: LayerCache, new: LayerCache, slot_BxL: jax.Array, window: int | None
) -> tuple[LayerCache, LayerCache]:
    """(the entries that the new tokens attend to, the cache with the new tokens in their slots)."""
    rows_Bx1 = jnp.arange(slot_BxL.shape[0])[:, None]
    kept = tuple(h.at[rows_Bx1, slot_BxL].set(n, mode="drop") for h, n in zip(cache, new, strict=True))
    if window is None or slot_BxL.shape[1] == 1:
        return kept, kept
    # Several tokens at once overwrite slots that the first of them still attend to.
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(cache, new, strict=True)), kept
