"""Random keys whose noise is always the same, and that are remembered: so that keys are compared, and not noise.

A layout may draw its noise in another way and be right: each micro-batch, each virtual shard and each device that adds
its own index to the key draws anew. So every draw from such a key gives the same constant bits, and the numbers of all
layouts are comparable. What was drawn is counted instead: the elements that a step draws from one stream by different
keys. A layout that draws fewer uses the same noise twice; one that draws more has copies with noise of their own.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from roxxel_dist.model.split import Leaves

KEY_WORDS = 2
"""Of a threefry key; the word behind them is the number of the stream, which derived keys keep."""
THREEFRY = "threefry2x32"

_drawn: set[tuple[tuple[int, ...], int]] = set()
_lock = threading.Lock()


def _plain(words: Any) -> jax.Array:
    return jax.random.wrap_key_data(words[..., :KEY_WORDS], impl=THREEFRY)


def _with_stream(key: jax.Array, stream: Any) -> jax.Array:
    data = jax.random.key_data(key)
    return jnp.concatenate([data, jnp.broadcast_to(stream, (*data.shape[:-1], 1))], axis=-1)


def _seed(seed: Any) -> jax.Array:
    return _with_stream(jax.random.key(seed, impl=THREEFRY), jnp.zeros((1,), jnp.uint32))


def _split(words: Any, shape: tuple[int, ...]) -> jax.Array:
    return _with_stream(jax.random.split(_plain(words), shape), words[KEY_WORDS:])


def _fold_in(words: Any, data: Any) -> jax.Array:
    return _with_stream(jax.random.fold_in(_plain(words), data), words[KEY_WORDS:])


def _random_bits(words: Any, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """A quarter of the range: a uniform number is 0.25, so dropout keeps what it keeps with a probability above it."""
    jax.debug.callback(_remember, words, math.prod(shape))
    return jnp.full(shape, 1 << (bit_width - 2), jnp.dtype(f"uint{bit_width}"))


def _remember(words: Any, size: Any) -> None:
    with _lock:
        _drawn.add((tuple(np.asarray(words).tolist()), int(size)))


COUNTED: Any = define_prng_impl(
    key_shape=(KEY_WORDS + 1,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="roxxel_counted",
    tag="counted",
)
"""The implementation of such keys."""


def is_key(leaf: Any) -> bool:
    """Whether an array, or its shape, is of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def counted_keys(rest: Leaves) -> dict[str, np.ndarray]:
    """name -> uint32[..., 3], the data of counted keys, for each array of keys in the state of a module.

    The number of the stream is its place in the order of names.
    """
    found: dict[str, np.ndarray] = {}
    for number, name in enumerate(sorted(name for name, leaf in rest.items() if is_key(leaf))):
        words = np.asarray(jax.random.key_data(rest[name]))[..., :KEY_WORDS]
        stream = np.broadcast_to(np.uint32(number), (*words.shape[:-1], 1))
        found[name] = np.concatenate([words, stream], axis=-1)
    return found


def wrap(words: Any) -> jax.Array:
    """Counted keys of their data."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl=COUNTED)


def forget() -> None:
    """Begin to count anew."""
    jax.effects_barrier()
    with _lock:
        _drawn.clear()


def drawn(names: Mapping[str, Any]) -> dict[str, int]:
    """name of a stream -> elements drawn by different keys since `forget`; a key counts once for each size."""
    jax.effects_barrier()
    order, totals = sorted(names), dict.fromkeys(names, 0)
    with _lock:
        for words, size in _drawn:
            if words[-1] < len(order):
                totals[order[words[-1]]] += size
    return totals
