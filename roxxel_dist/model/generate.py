"""Text from a model, as token ids.

The built-in Transformer reads the prompts once (prefill), a long one by all devices, and then one token at a time on
one device (decode), with a cache of earlier tokens. Any other model reads the whole text again for each token.

The next token is the likeliest one (greedy), or drawn from the likeliest ones at a temperature.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh, replicate
from roxxel_dist.model.attention.kv_cache import Cache
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.process.exit_codes import UserError

MOST_INT, MOST_FLOAT = np.iinfo(np.int32).max, float(np.finfo(np.float32).max)
NO_TOKEN = -1
STOP_STEP = 8
"""Stop ids are padded to a multiple of so many, so that other ones do not recompile a program."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. A token must pass both limits; the likeliest one always does. Raises ValueError for a
    value that breaks its rule."""

    temperature: float = 0.8
    """0 always takes the likeliest token; 1 draws from the model's distribution."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest of the likeliest tokens that have this probability together, at this temperature (Holtzman
    et al., "The curious case of neural text degeneration", 2020); 1 for all."""

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature!r}: it must be 0 (greedy) or more")
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise UserError(f"top_k is {self.top_k!r}: it must be at least 1, or 0 for all tokens; a whole number")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p!r}: it must be above 0 and at most 1, which is all tokens")


class SamplingInputs(NamedTuple):
    """A `Sampling` as inputs of a compiled program, so that other values do not recompile it."""

    temperature: Any
    """float32[]"""
    top_k: Any
    """int32[]"""
    top_p: Any
    """float32[]"""
    seed_B: Any
    """int32[B]: of each row's draws."""
    end_E: Any
    """int32[E]: the tokens that end a row; those below 0 are none."""
    known_V: Any
    """bool[V]: the tokens to choose from; None for all."""


def known_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray | None:
    """bool[V]: which ids of a vocabulary are among `ids`; None if all are."""
    known_V = np.zeros(vocab_size, bool)
    known_V[[number for number in ids if number < vocab_size]] = True
    return None if known_V.all() else known_V


def sampling_inputs(
    sampling: Sampling, seeds: Sequence[int], stop_ids: Collection[int], known_V: np.ndarray | None = None
) -> SamplingInputs:
    """The options of a batch of rows. Raises ValueError for a seed that is out of bounds."""
    for seed in seeds:
        if not isinstance(seed, Integral) or not 0 <= seed <= MOST_INT:
            raise UserError(f"seed is {seed!r}: it must be at least 0 and below 2^31, a whole number")
    # Values above the range of the types have the same effect as the largest value.
    temperature, top_k = min(sampling.temperature, MOST_FLOAT), min(sampling.top_k, MOST_INT)
    end_E = np.full(STOP_STEP * max(1, -(-len(stop_ids) // STOP_STEP)), NO_TOKEN, np.int32)
    end_E[: len(stop_ids)] = sorted(stop_ids)
    numbers = np.float32(temperature), np.int32(top_k), np.float32(sampling.top_p)
    return SamplingInputs(*numbers, np.asarray(seeds, np.int32), end_E, known_V)


def sample(logits_BxV: jax.Array, place_B: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """int32[B]: the token for a place in the text of each row. A row's draws depend only on its seed and its places."""
    logits_BxV = logits_BxV.astype(jnp.float32)
    if inputs.known_V is not None:
        logits_BxV = jnp.where(inputs.known_V, logits_BxV, -jnp.inf)
    scaled_BxV = logits_BxV / jnp.maximum(inputs.temperature, 1e-6)
    # Sorting a large vocabulary costs as much as a small model: only if a limit is set.
    limited = (inputs.temperature > 0) & ((inputs.top_k > 0) | (inputs.top_p < 1))
    scaled_BxV = jax.lax.cond(limited, top_k_top_p_filter, lambda scaled_BxV, _: scaled_BxV, scaled_BxV, inputs)
    keys_B = jax.vmap(lambda seed, place: jax.random.fold_in(jax.random.key(seed), place))(inputs.seed_B, place_B)
    drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BxV)
    return jnp.where(inputs.temperature > 0, drawn_B, jnp.argmax(logits_BxV, axis=1)).astype(jnp.int32)


def top_k_top_p_filter(scaled_BxV: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """The logits of the tokens within top_k and top_p; those of the others are minus infinity."""
    order_BxV = jnp.argsort(-scaled_BxV, axis=1, stable=True)
    sorted_BxV = jnp.take_along_axis(scaled_BxV, order_BxV, axis=1)
    rank_V = jnp.arange(scaled_BxV.shape[1])
    within_BxV = jnp.broadcast_to((rank_V < inputs.top_k) | (inputs.top_k == 0), scaled_BxV.shape)
    # Probabilities after top_k, normalized over the remaining tokens.
    probability_BxV = jax.nn.softmax(jnp.where(within_BxV, sorted_BxV, -jnp.inf), axis=1)
    before_BxV = jnp.cumsum(probability_BxV, axis=1) - probability_BxV
    within_BxV &= (before_BxV < inputs.top_p) | (rank_V == 0)
    rows_Bx1 = jnp.arange(scaled_BxV.shape[0])[:, None]
    kept_BxV = jnp.zeros(scaled_BxV.shape, bool).at[rows_Bx1, order_BxV].set(within_BxV, unique_indices=True)
    return jnp.where(kept_BxV, scaled_BxV, -jnp.inf)


WINDOW_STEP = 64
LONG_PROMPT = 1024
"""Tokens. Longer prompts are read by all devices of this process, as training cuts long rows."""


def generate(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_context: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    known_V: np.ndarray | None = None,
) -> list[int]:
    """Continue one prompt with `generate_rows`."""
    sampling = Sampling(temperature=temperature)
    options: Any = {"max_context": max_context, "stop_ids": stop_ids, "known_V": known_V}
    return generate_rows(model, [prompt], max_new_tokens, sampling=sampling, seeds=[seed], **options)[0]


def generate_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    max_context: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop_ids: Collection[int] = (),
    known_V: np.ndarray | None = None,
) -> list[list[int]]:
    """Continue several prompts; each result is the same as for that prompt alone.

    For each number of rows, rounded up to a power of 2, a Transformer compiles one program to decode any length, and
    one to prefill for each multiple of 64 tokens. Another model compiles one for each multiple of 64 tokens of prompt
    and answer together.

    Args:
        model: an NNX module, int32[B, L] tokens to [B, L, vocabulary] logits; it is not changed.
        prompts: token ids, at least one each. Of a prompt that leaves no room for a new token, only the last
            max_context - 1 ids are read.
        max_new_tokens: at most this many are added to each, and no more than fit into max_context behind the prompt.
        max_context: tokens that the model reads at most, prompt and answer together.
        sampling: how tokens are chosen.
        seeds: of the draws, one for each prompt.
        stop_ids: a row stops before the first of these tokens.
        known_V: bool[V], the tokens to choose from, as `known_ids` gives them; None for all.

    Returns:
        Only the new ids.

    Raises:
        ValueError: an argument breaks its rule.
    """
    kept = _check(model, prompts, max_new_tokens, max_context)
    if not kept:
        return []
    room = [min(max_new_tokens, max_context - len(row)) for row in kept]
    graphdef, state = _evaluating(model)
    if not isinstance(model, Transformer):
        rows = [
            _uncached(graphdef, state, row, count, max_context, sampling_inputs(sampling, [seed], stop_ids, known_V))
            for row, count, seed in zip(kept, room, seeds, strict=True)
        ]
    else:
        options = partial(sampling_inputs, sampling, stop_ids=stop_ids, known_V=known_V)
        with mesh_of(state):
            running, options = _begin(graphdef, state, kept, max_context, seeds, options)
            until_B = np.zeros(running.done_B.shape, np.int32)
            until_B[: len(room)] = room
            new_BxC = np.asarray(_decode(graphdef, state, running, until_B, options).new_BxC)
        rows = [row[:count].tolist() for row, count in zip(new_BxC, room, strict=False)]
    ends = [next((i for i, token in enumerate(row) if token in stop_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def stream(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_context: int,
    sampling: Sampling,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    known_V: np.ndarray | None = None,
) -> Iterator[int]:
    """The ids that `generate_rows` adds to one prompt, each as soon as it is computed. Same arguments and errors.

    A model that is not a Transformer yields them when all are computed.
    """
    (kept,) = _check(model, [prompt], max_new_tokens, max_context)
    if not isinstance(model, Transformer):
        options: Any = {"max_context": max_context, "sampling": sampling, "seeds": [seed]}
        options |= {"stop_ids": stop_ids, "known_V": known_V}
        yield from generate_rows(model, [prompt], max_new_tokens, **options)[0]
        return
    graphdef, state = _evaluating(model)
    options = partial(sampling_inputs, sampling, stop_ids=stop_ids, known_V=known_V)
    with mesh_of(state):
        running, inputs = _begin(graphdef, state, [kept], max_context, [seed], options)
    for i in range(min(max_new_tokens, max_context - len(kept))):
        if i:
            with mesh_of(state):
                running = _decode(graphdef, state, running, np.full(1, i + 1, np.int32), inputs)
        token = int(running.token_B[0])
        if token in stop_ids:
            return
        yield token


def _check(model: Any, prompts: Sequence[Sequence[int]], count: int, max_context: int) -> list[list[int]]:
    """The part of each prompt that is read."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise UserError("the prompt is empty: give at least one token, such as the end-of-text token")
    if not isinstance(count, Integral) or count < 1:
        raise UserError(f"max_new_tokens is {count!r}: it must be at least 1, a whole number")
    if max_context < 2:
        raise UserError(f"max_context is {max_context}: a prompt and a new token are 2 tokens at least")
    size = model.config.vocab_size if isinstance(model, Transformer) else None
    if size and (wrong := [token for prompt in prompts for token in prompt if not 0 <= token < size]):
        raise UserError(f"the prompt has the id {wrong[0]}: the ids of the model are 0 to {size - 1}")
    if isinstance(model, Transformer) and max_context > model.config.max_context:
        raise UserError(f"max_context is {max_context}: the model reads at most {model.config.max_context} tokens")
    return [list(prompt)[-(max_context - 1) :] for prompt in prompts]


def _evaluating(model: Any) -> tuple[Any, Any]:
    """(graph definition, state) of a model with dropout off, with the same arrays."""
    twin = nnx.merge(*nnx.split(model))
    twin.eval()
    return nnx.split(twin)


class Running(NamedTuple):
    """The state of generation: B prompts, and some new tokens after each of them."""

    drawn: jax.Array
    """int32[]: new tokens of each row, including the last, which the model has not read yet."""
    token_B: jax.Array
    """The last of them."""
    done_B: jax.Array
    """Whether a row has ended."""
    new_BxC: jax.Array
    """int32: all of them; C is max_context."""
    cache: Cache


def _begin(
    graphdef: Any,
    state: Any,
    prompts: list[list[int]],
    limit: int,
    seeds: Sequence[int],
    options_for: Callable[[Sequence[int]], SamplingInputs],
) -> tuple[Running, SamplingInputs]:
    """Read the prompts, and draw the first token of each; the options are those for the seeds of all rows.

    Rows are padded to a power of 2; padding rows start as done.
    """
    count = 1 << (len(prompts) - 1).bit_length()
    longest = max(map(len, prompts))
    rows = np.zeros((count, min(limit, -(-longest // WINDOW_STEP) * WINDOW_STEP)), np.int32)
    lengths = np.zeros(count, np.int32)  # a padding row reads one token, because it must read something
    for i, prompt in enumerate(prompts):
        rows[i, : len(prompt)], lengths[i] = prompt, len(prompt)
    options = options_for([*seeds, *[0] * (count - len(prompts))])
    mesh = _mesh_for(state, *rows.shape)
    if mesh is None:
        return _prefill(graphdef, state, rows, lengths, options), options
    [home] = jax.tree.leaves(state)[0].devices()
    with jax.set_mesh(mesh):
        running = _prefill(graphdef, replicate(state, mesh), rows, lengths, options)
    return jax.device_put(running, home), options


def _mesh_for(state: Any, rows: int, length: int) -> Mesh | None:
    """The devices that read a long prompt, if the model lies on one of several of its kind; else None.

    All hold the whole model while they read.
    """
    places = _places(state)
    if length <= LONG_PROMPT or len(places) != 1:
        return None
    devices = jax.local_devices(backend=next(iter(places)).platform)
    return phase_mesh(make_mesh(devices=devices), rows) if len(devices) > 1 else None


def mesh_of(state: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh that a model is divided over, if it is: its layers then find their devices, as in training."""
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            mesh: Any = sharding.mesh
            return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def _places(state: Any) -> set[Any]:
    """The devices that a model lies on."""
    return {device for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) for device in leaf.devices()}


@partial(jax.jit, static_argnums=0)
def _prefill(graphdef: Any, state: Any, prompt_BxL: Any, length_B: Any, inputs: SamplingInputs) -> Running:
    """The state after the first `length_B` tokens of each row."""
    model = nnx.merge(graphdef, state, copy=True)
    read_B = jnp.maximum(length_B, 1)
    batch = prompt_BxL.shape[0]
    empty = model.empty_cache(batch)._replace(count_B=read_B)
    x_BxLxD, _, cache = model.states(prompt_BxL, cache=empty, is_empty=True)
    last_Bx1xD = jnp.take_along_axis(x_BxLxD, (read_B - 1)[:, None, None], axis=1)
    token_B = sample(model.logits(last_Bx1xD)[:, 0], read_B, inputs)
    new_BxC = jnp.full((batch, model.config.max_context), NO_TOKEN, jnp.int32).at[:, 0].set(token_B)
    return Running(
        jnp.int32(1), token_B, (length_B == 0) | jnp.isin(token_B, inputs.end_E), new_BxC, cache._replace(count_B=None)
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(graphdef: Any, state: Any, running: Running, until_B: Any, inputs: SamplingInputs) -> Running:
    """The state with `until_B` new tokens in each row, or fewer in one that has ended; others there do not count."""

    def add(running: Running) -> Running:
        drawn, token_B, done_B, new_BxC, cache = running
        # Merge copies inside the loop: NNX objects cannot cross jax's trace levels, and a layer may count its draws.
        model = nnx.merge(graphdef, state, copy=True)
        # A row that has filled max_context reads its last place again, and none beyond it.
        cache = cache._replace(length_B=jnp.minimum(cache.length_B, model.config.max_context - 1))
        logits_Bx1xV, cache = model(token_B[:, None], cache=cache)
        token_B = sample(logits_Bx1xV[:, 0], cache.length_B, inputs)
        done_B |= jnp.isin(token_B, inputs.end_E)
        return Running(drawn + 1, token_B, done_B, new_BxC.at[:, drawn].set(token_B), cache)

    return jax.lax.while_loop(lambda running: ((running.drawn < until_B) & ~running.done_B).any(), add, running)


def _uncached(
    graphdef: Any, state: Any, prompt: list[int], count: int, limit: int, inputs: SamplingInputs
) -> list[int]:
    length = len(prompt) + count
    window = np.zeros((1, min(limit, -(-length // WINDOW_STEP) * WINDOW_STEP)), np.int32)
    window[0, : len(prompt)] = prompt
    places = _places(state)
    # A model of the user's own may name the axes of a mesh, as in training.
    with jax.set_mesh(make_mesh(devices=[*places])) if len(places) == 1 else mesh_of(state):
        out = _continue(graphdef, state, window, np.int32(len(prompt)), np.int32(count), inputs)
    return np.asarray(out)[0, len(prompt) : length].tolist()


@partial(jax.jit, static_argnums=0)
def _continue(graphdef: Any, state: Any, window: Any, start: Any, count: Any, inputs: SamplingInputs) -> jax.Array:
    """Fill int32[1, C] from position `start` on. Runs the whole window for each token: there is no cache."""

    def add(i: jax.Array, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state, copy=True)
        logits_1xV = jax.lax.dynamic_index_in_dim(model(tokens)[0], i - 1)
        token_1 = sample(logits_1xV, i[None], inputs)
        return jax.lax.dynamic_update_slice(tokens, token_1[:, None], (0, i))

    return jax.lax.fori_loop(start, start + count, add, jnp.asarray(window))
