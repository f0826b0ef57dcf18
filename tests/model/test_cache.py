"""Tokens read one after another, with a cache, give what a pass over the whole text gives."""

import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import transformer

from roxxel_dist.cluster.mesh import make_mesh, phase_mesh, replicate
from roxxel_dist.model import generate as generation
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.generate import Sampling, generate, generate_rows
from roxxel_dist.model.transformer import Transformer

LENGTH = 24
SHAPE = {"dim": 32, "num_blocks": 2, "vocab_size": 50, "max_context": 32, "head_size": 8, "rope_dim": 8}
WINDOW = {"sliding_window": True, "context_window": 5}
MLA = {"mla": True, "down_dim_q": 12, "down_dim_kv": 10}
VARIANTS = [
    {"kv_heads": 2},
    {"use_moe": True, "use_swiglu": False},
    {**WINDOW, "no_sink": True, "pos_encoding": "absolute"},
    {**MLA},
    {**MLA, **WINDOW, "no_sink": True, "pos_encoding": "learned", "norm_type": "layernorm"},
]
PAIRS = [
    {"pos_encoding": position, **attention, **window, **sink, "weight_tying": tying}
    for position, attention, window, sink, tying in itertools.product(
        ["rotary", "absolute", "learned", "none"],
        [{}, {"kv_heads": 1}, MLA],
        [{}, WINDOW],
        [{}, {"no_sink": True}],
        [True, False],
    )
]


@nnx.jit
def read(model, tokens, cache, segments=None, positions=None):
    return model(tokens, segments, positions, cache=cache)


def build(**fields):
    return transformer(**{**SHAPE, **fields})


@nnx.jit
def read_whole(model, tokens):
    return model(tokens)


def tokens():
    return np.random.default_rng(0).integers(0, 50, (3, LENGTH), np.int32)


def check_incremental(model, cuts):
    """In pieces that end at each of `cuts`, and one by one behind the last of them."""
    text, cache = tokens(), model.empty_cache(3)
    expected, found, start = read_whole(model, text), [], 0
    for end in [*cuts, *range(cuts[-1] + 1, LENGTH + 1)]:
        logits, cache = read(model, text[:, start:end], cache)
        found.append(logits)
        start = end
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=1e-5)
    assert np.array_equal(cache.length_B, [LENGTH] * 3)


@pytest.mark.parametrize(
    ("fields", "cuts"),
    [
        (VARIANTS[1] | {"num_blocks": 1}, [23]),
        (VARIANTS[4] | {"num_blocks": 1}, [3, 6]),
        *(pytest.param(fields, [3, 12], marks=pytest.mark.long) for fields in VARIANTS),
    ],
)
def test_it_is_the_whole_pass(fields, cuts):
    """Shorter than the window, then longer, then one by one."""
    check_incremental(build(**fields), cuts)


@pytest.mark.long
@pytest.mark.parametrize("first", [1, 2, 4, 5, 6, 23])
def test_prefills_around_the_size_of_a_window(first):
    check_incremental(build(**VARIANTS[3]), [first])


@pytest.mark.long
@pytest.mark.parametrize("fields", PAIRS, ids=str)
def test_every_pair_of_variants(fields):
    check_incremental(build(**fields), [7])


def test_what_a_cache_holds():
    configs = [ModelConfig(**SHAPE | fields) for fields in ({"kv_heads": 2}, WINDOW, MLA)]
    plain, window, latent = (
        jax.eval_shape(lambda config=config: Transformer(config, nnx.Rngs(0)).empty_cache(3)) for config in configs
    )
    assert [a.shape for a in plain.layers[1]] == [(3, 32, 2, 8)] * 2
    assert [a.shape for a in window.layers[1]] == [(3, 5, 4, 8)] * 2, "no more than the window"
    assert [a.shape for a in latent.layers[1]] == [(3, 32, 10), (3, 32, 8)], "latents and rotary keys alone"
    assert len(plain.layers) == 2


@pytest.mark.parametrize(
    "fields", [*(pytest.param(one, marks=pytest.mark.long) for one in ({}, {**MLA, **WINDOW})), VARIANTS[4]]
)
def test_rows_of_different_lengths(fields):
    """Padding behind the end of a prompt is not kept, also where it would take the slots of a window."""
    model, text = build(**fields, num_blocks=1), tokens()
    counts = np.array([2, 12, 7], np.int32)
    padded = np.where(np.arange(12) < counts[:, None], text[:, :12], np.int32(49))
    logits, cache = read(model, padded, model.empty_cache(3)._replace(count_B=jax.device_put(counts)))
    logits, expected = map(np.asarray, (logits, read_whole(model, text)))
    assert np.array_equal(cache.length_B, counts)
    for row, count in enumerate(counts):
        np.testing.assert_allclose(logits[row, :count], expected[row, :count], atol=1e-5)
    for i in range(6):
        step = np.take_along_axis(text, counts[:, None] + i, axis=1)
        logits, cache = read(model, step, cache)
        for row, count in enumerate(counts):
            np.testing.assert_allclose(np.asarray(logits)[row, 0], expected[row, count + i], atol=1e-5)


@pytest.mark.parametrize("cuts", [(8, 16), pytest.param((9, 14), marks=pytest.mark.long)])
def test_documents_in_a_cached_row_stay_apart(cuts):
    model, text = build(**WINDOW, pos_encoding="learned", num_blocks=1), tokens()
    segments = np.broadcast_to(np.repeat(np.arange(2, dtype=np.int32), 12), text.shape)
    places = np.broadcast_to(np.arange(24, dtype=np.int32) % 12, text.shape)
    whole = nnx.jit(lambda m, *batch: (m(*batch), m(batch[0])))
    expected, of_one_document = map(np.asarray, whole(model, text, segments, places))
    found, cache = [], model.empty_cache(3)
    for start, end in itertools.pairwise((0, *cuts, 24)):
        part = (x[:, start:end] for x in (text, segments, places))
        words, *rest = part
        logits, cache = read(model, words, cache, *rest)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=1e-5)
    assert np.abs(expected - of_one_document).max() > 1e-3


class Plain(nnx.Module):
    """A Transformer that `generate` does not know for one, and so runs without a cache."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens):
        return self.model(tokens)


@pytest.mark.parametrize("fields", [{"dropout_rate": 0.5, "num_blocks": 1}, {**MLA, **WINDOW}])
@pytest.mark.parametrize(
    ("prompt", "temperature"),
    [([*range(50), *range(26)], 1.0), ([3, 1, 4], 0.0)],
    ids=["long prompt", "greedy"],
)
@pytest.mark.long  # what a cache gives is compared above; texts are compared by test_generator
def test_text_is_the_same_with_and_without(fields, prompt, temperature):
    model = build(**fields, max_context=96)
    one, other = (
        generate(m, prompt, 20, max_context=96, temperature=temperature, seed=5) for m in (model, Plain(model))
    )
    assert one == other
    assert len(one) == 20


@pytest.mark.long  # the same of a Generator is in test_generator.py
def test_prefill_and_decoding_are_compiled_once():
    model = build(max_context=96, num_blocks=1)
    generate(model, [1], 3, max_context=96)
    sizes = generation._prefill._cache_size(), generation._decode._cache_size()
    for length, count, temperature in ((7, 1, 0.0), (40, 31, 0.5), (64, 32, 1.0)):
        generate(model, list(range(40)) + [1] * (length - 40) if length > 40 else [2] * length, count,
                 max_context=96, temperature=temperature, seed=count, stop_ids=[count])  # fmt: skip
    assert (generation._prefill._cache_size(), generation._decode._cache_size()) == sizes


def test_more_context_than_the_model_has():
    with pytest.raises(ValueError, match="max_context is 33: the model reads at most 32 tokens"):
        generate(build(), [1], 5, max_context=33)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({**WINDOW, "no_sink": True, "num_blocks": 1}, 1),
        ({**MLA, "pos_encoding": "learned", "num_blocks": 1}, 3),
        *(
            (fields, prompts)
            for fields in ({"kv_heads": 2}, {**WINDOW, "no_sink": True}, {**MLA, "pos_encoding": "learned"})
            for prompts in (1, 3)
        ),
    ],
)
def test_a_long_prompt_is_read_by_all_devices(fields, prompts, monkeypatch):
    """Prompts of 20 and fewer tokens on 8 devices, 1 row or 4, and what is written after them on one."""
    model, rng = build(**fields), np.random.default_rng(0)
    texts = [rng.integers(0, 50, 20 - 3 * i).tolist() for i in range(prompts)]
    options = {"max_context": 32, "sampling": Sampling(temperature=0), "seeds": [0] * prompts}
    alone = generate_rows(model, texts, 8, **options)
    read = []
    monkeypatch.setattr(generation, "LONG_PROMPT", 16)
    monkeypatch.setattr(generation, "replicate", lambda *args: read.append(args[1]) or replicate(*args))
    assert generate_rows(model, texts, 8, **options) == alone
    assert [mesh.shape["tokens"] for mesh in read] == [8 if prompts == 1 else 2]


@pytest.mark.long
def test_the_memory_of_a_long_prompt():
    """No mask of all pairs of tokens, and on 8 devices a part of what one takes."""
    length = 4096
    shape = ModelConfig(**SHAPE | {"max_context": length, "vocab_size": 50})
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0))))
    inputs = generation.sampling_inputs(Sampling(), [0], ())

    def temporaries(mesh):
        everywhere = NamedSharding(mesh, P())
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
        tokens, lengths = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1, length), (1,)))
        with jax.set_mesh(mesh):
            lowered = generation._prefill.lower(graphdef, placed, tokens, lengths, inputs)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one = temporaries(make_mesh(1))
    assert one < length**2
    assert temporaries(phase_mesh(make_mesh(), 1)) < one / 3
