"""Text from a model: greedy or at a temperature."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WINDOW_STEP = 64


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
    """Continue `prompt`; one compiled program for all lengths within the same multiple of 64 tokens.

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
    needed = -(-(len(kept) + max_new_tokens) // WINDOW_STEP) * WINDOW_STEP
    window = np.zeros((1, min(max_context, needed)), np.int32)
    window[0, : len(kept)] = kept
    model.eval()
    graphdef, state = nnx.split(model)
    out = _continue(
        graphdef, state, window, np.int32(len(kept)), np.int32(max_new_tokens), np.float32(temperature), np.int32(seed)
    )
    model.train()
    new = np.asarray(out)[0, len(kept) : len(kept) + max_new_tokens].tolist()
    return new[: new.index(eos_id)] if eos_id in new else new


@partial(jax.jit, static_argnums=0)
def _continue(graphdef: Any, state: Any, window: Any, start: Any, count: Any, temperature: Any, seed: Any) -> jax.Array:
    """Fill int32[1, C] from position `start` on. Runs the whole window for each token: there is no cache."""
    key = jax.random.key(seed)

    def add(i: jax.Array, tokens: jax.Array) -> jax.Array:
        # Inside the loop, and of copies: NNX objects do not cross jax's trace levels, and a layer may count its draws.
        model = nnx.merge(graphdef, state, copy=True)
        logits = jax.lax.dynamic_index_in_dim(model(tokens)[0], i - 1, keepdims=False).astype(jnp.float32)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32)
        return jax.lax.dynamic_update_slice(tokens, token[None, None], (0, i))

    return jax.lax.fori_loop(start, start + count, add, jnp.asarray(window))
