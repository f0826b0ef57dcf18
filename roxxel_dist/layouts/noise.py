"""Random keys whose noise is switched on and off: so that a step is compared without noise, and then with it.

Without it every draw from such a key gives the same constant bits, so what differs is not the noise. What was drawn is
remembered: the elements that a step draws from one stream by different keys. Each micro-batch and each virtual shard
draws anew, by keys of its own, so there only this number is compared: a layout that draws fewer uses the same noise
twice; one that draws more has copies with noise of their own.

Where one call has the whole batch, noise must be the same on any devices, and the step is run again with it: all of it,
or that of some streams. A key has the switch in itself, so one compiled program serves all of these runs.
"""

import math
import threading
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from roxxel_dist.model.split import Leaves

KEY_WORDS = 2
"""Of a threefry key. Behind them are the switch (0: constant bits) and the number of the stream, which derived keys
keep."""
SWITCH = 2
THREEFRY = "threefry2x32"

_drawn: set[tuple[tuple[int, ...], int]] = set()
_lock = threading.Lock()


def _plain(words: Any) -> jax.Array:
    return jax.random.wrap_key_data(words[..., :KEY_WORDS], impl=THREEFRY)


def _with_rest(key: jax.Array, rest: Any) -> jax.Array:
    data = jax.random.key_data(key)
    return jnp.concatenate([data, jnp.broadcast_to(rest, (*data.shape[:-1], 2))], axis=-1)


def _seed(seed: Any) -> jax.Array:
    return _with_rest(jax.random.key(seed, impl=THREEFRY), jnp.zeros((2,), jnp.uint32))


def _split(words: Any, shape: tuple[int, ...]) -> jax.Array:
    return _with_rest(jax.random.split(_plain(words), shape), words[KEY_WORDS:])


def _fold_in(words: Any, data: Any) -> jax.Array:
    return _with_rest(jax.random.fold_in(_plain(words), data), words[KEY_WORDS:])


def _random_bits(words: Any, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """The constant is a quarter of the range: as a uniform number 0.25, so dropout keeps what it keeps more often."""
    jax.debug.callback(_remember, words, math.prod(shape))
    dtype = jnp.dtype(f"uint{bit_width}")
    noise = jax.random.bits(_plain(words), shape, dtype)
    return jnp.where(words[SWITCH] != 0, noise, jnp.full(shape, 1 << (bit_width - 2), dtype))


def _remember(words: Any, size: Any) -> None:
    with _lock:
        _drawn.add((tuple(np.asarray(words).tolist()), int(size)))


COUNTED: Any = define_prng_impl(
    key_shape=(KEY_WORDS + 2,),
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
    """name -> uint32[..., 4], the data of counted keys, for each array of keys in the state of a module; without noise.

    The number of the stream is its place in the order of names.
    """
    found: dict[str, np.ndarray] = {}
    for number, name in enumerate(sorted(name for name, leaf in rest.items() if is_key(leaf))):
        words = np.asarray(jax.random.key_data(rest[name]))[..., :KEY_WORDS]
        end = np.broadcast_to(np.array([0, number], np.uint32), (*words.shape[:-1], 2))
        found[name] = np.concatenate([words, end], axis=-1)
    return found


def other_kinds(rest: Leaves) -> list[str]:
    """The kinds of random numbers of a module that are not compared: those of keys that are not threefry's."""
    return sorted({str(jax.random.key_impl(leaf)) for leaf in rest.values() if is_key(leaf)} - {THREEFRY})


def switch_on(words: np.ndarray) -> np.ndarray:
    """The data of the same counted keys, switched on."""
    changed = words.copy()
    changed[..., SWITCH] = 1
    return changed


def wrap(words: Any) -> jax.Array:
    """Counted keys of their data."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl=COUNTED)


def reset_draws() -> None:
    """Begin to count anew."""
    jax.effects_barrier()
    with _lock:
        _drawn.clear()


def count_draws(names: Collection[str]) -> dict[str, int]:
    """name of a stream -> elements drawn by different keys since `reset_draws`; a key counts once for each size."""
    jax.effects_barrier()
    order, totals = sorted(names), dict.fromkeys(names, 0)
    with _lock:
        for words, size in _drawn:
            if words[-1] < len(order):
                totals[order[words[-1]]] += size
    return totals
