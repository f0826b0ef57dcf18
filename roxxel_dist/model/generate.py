"""Text from a model: greedy or at a temperature.

The built-in Transformer reads the prompt once (prefill) and then one token at a time (decode), with a cache of what it
has read. Any other model reads the whole text again for each token.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.model.cache import Cache
from roxxel_dist.model.transformer import Transformer

WINDOW_STEP = 64
NO_TOKEN = -1


def generate(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_context: int,
    temperature: float = 0.8,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[int]:
    """Continue `prompt`.

    Compiled once: a Transformer's decoding for all lengths, its prefill for all prompts within the same multiple of 64
    tokens, and for another model one program for all lengths of prompt and answer within such a multiple.

    Args:
        model: an NNX module, int32[1, L] tokens to [1, L, vocabulary] logits.
        prompt: token ids, at least one; only as many of the last ones are read as leave room in the context.
        max_new_tokens: at most this many are added, fewer where `max_context` ends first.
        max_context: tokens that the model reads at most, prompt and answer together.
        temperature: 0 always takes the likeliest token; 1 draws from the model's distribution.
        seed: of the draws.
        eos_id: stop before this token.

    Returns:
        The new ids alone.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token, such as the end-of-text token")
    if max_new_tokens < 1 or max_new_tokens >= max_context:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: it must be at least 1 and below max_context ({max_context})"
        )
    if not 0 <= seed < 1 << 31:
        raise ValueError(f"seed is {seed}: it must be at least 0 and below 2^31")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be 0 (greedy) or more")
    kept = list(prompt)[-(max_context - max_new_tokens) :]
    options = np.float32(temperature), np.int32(seed)
    model.eval()
    graphdef, state = nnx.split(model)
    if isinstance(model, Transformer):
        if max_context > model.config.max_context:
            raise ValueError(f"max_context is {max_context}: the model reads at most {model.config.max_context} tokens")
        logits, cache = _prefill(graphdef, state, _padded(kept, len(kept), max_context), np.int32(len(kept)))
        end = np.int32(NO_TOKEN if eos_id is None else eos_id)
        out = _decode(graphdef, state, logits, cache, np.int32(max_new_tokens), end, *options)
        new = np.asarray(out)[:max_new_tokens].tolist()
    else:
        window = _padded(kept, len(kept) + max_new_tokens, max_context)
        out = _continue(graphdef, state, window, np.int32(len(kept)), np.int32(max_new_tokens), *options)
        new = np.asarray(out)[0, len(kept) : len(kept) + max_new_tokens].tolist()
    model.train()
    return new[: new.index(eos_id)] if eos_id in new else new


def _padded(tokens: Sequence[int], length: int, limit: int) -> np.ndarray:
    """int32[1, C] that begins with `tokens`; C is `length` rounded up to a multiple of 64, at most `limit`."""
    row = np.zeros((1, min(limit, -(-length // WINDOW_STEP) * WINDOW_STEP)), np.int32)
    row[0, : len(tokens)] = tokens
    return row


def _draw(logits_V: jax.Array, place: jax.Array, temperature: jax.Array, seed: jax.Array) -> jax.Array:
    """int32[]: the token for a place in the text."""
    logits_V = logits_V.astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(seed), place)
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)


@partial(jax.jit, static_argnums=0)
def _prefill(graphdef: Any, state: Any, prompt_1xL: Any, count: Any) -> tuple[jax.Array, Cache]:
    """The logits [vocabulary] behind the first `count` tokens, and a cache with these."""
    model = nnx.merge(graphdef, state, copy=True)
    x_1xLxD, _, cache = model.states(prompt_1xL, cache=model.empty_cache()._replace(count_B=count[None]))
    return model.logits(jax.lax.dynamic_slice_in_dim(x_1xLxD, count - 1, 1, axis=1))[0, 0], cache


@partial(jax.jit, static_argnums=0)
def _decode(
    graphdef: Any, state: Any, logits: Any, cache: Cache, count: Any, end: Any, temperature: Any, seed: Any
) -> jax.Array:
    """int32[max_context] that begins with `count` new tokens, or fewer, the last of them `end`."""
    start, limit = cache.length_B[0], nnx.merge(graphdef, state, copy=True).config.max_context
    first = _draw(logits, start, temperature, seed)

    def add(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, token, cache, new = carry
        # Inside the loop, and of copies: NNX objects do not cross jax's trace levels, and a layer may count its draws.
        logits, cache = nnx.merge(graphdef, state, copy=True)(token[None, None], cache=cache)
        token = _draw(logits[0, 0], start + i, temperature, seed)
        return i + 1, token, cache, new.at[i].set(token)

    new = jnp.full(limit, NO_TOKEN, jnp.int32).at[0].set(first)
    loop = (jnp.int32(1), first, cache, new)
    return jax.lax.while_loop(lambda carry: (carry[0] < count) & (carry[1] != end), add, loop)[3]


@partial(jax.jit, static_argnums=0)
def _continue(graphdef: Any, state: Any, window: Any, start: Any, count: Any, temperature: Any, seed: Any) -> jax.Array:
    """Fill int32[1, C] from position `start` on. Runs the whole window for each token: there is no cache."""

    def add(i: jax.Array, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state, copy=True)
        logits = jax.lax.dynamic_index_in_dim(model(tokens)[0], i - 1, keepdims=False)
        token = _draw(logits, i, temperature, seed)
        return jax.lax.dynamic_update_slice(tokens, token[None, None], (0, i))

    return jax.lax.fori_loop(start, start + count, add, jnp.asarray(window))
