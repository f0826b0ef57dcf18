"""Rotary, absolute, learned and no positions."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import transformer
from plain_numpy import float64, turn

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import Rotary, rotate, sinusoids

SHAPE = {"dim": 32, "num_blocks": 1, "vocab_size": 50, "max_context": 64, "head_size": 8, "rope_dim": 8}
LENGTHS = [7, 1, 12]
ENCODINGS = ["rotary", "absolute", "learned", "none"]


def build(**fields):
    return transformer(**SHAPE | fields)


def run(model, *batch):
    return np.asarray(jitted(model, *batch))


@nnx.jit
def jitted(model, *batch):
    return model(*batch)


turned = jax.jit(rotate, static_argnums=2)


def test_rotary_is_plain_numpy():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 6)).astype(np.float32)
    places = np.array([[0, 1, 2, 3, 4], [900, 7, 7, 0, 31]], np.int32)
    for scale in (1.0, 3.0):
        found = np.asarray(turned(x, places, Rotary(scale=scale)))
        for row in range(2):
            for head in range(3):
                expected = turn(float64(x[row, :, head]), places[row], scale)
                np.testing.assert_allclose(found[row, :, head], expected, atol=1e-4 if places[row].max() > 99 else 1e-5)


def test_rotary_depends_on_the_distance_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    @jax.jit
    def scores(i, j):
        return (rotate(q, i[None], Rotary()) * rotate(k, j[None], Rotary())).sum()

    def score(i, j):
        return float(scores(np.int32(i), np.int32(j)))

    assert score(5, 3) == pytest.approx(score(25, 23), abs=1e-4)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-3)


def test_a_scale_stretches_positions():
    x, places = np.random.default_rng(0).normal(size=(1, 4, 2, 8)).astype(np.float32), np.arange(4, dtype=np.int32)
    np.testing.assert_allclose(turned(x, 4 * places, Rotary(scale=4.0)), turned(x, places, Rotary()), atol=1e-6)


def test_with_a_trained_context_only_long_waves_are_stretched():
    """Of waves of 6.3, 63 and 628 tokens, in a context that sees the second 2.5 times."""
    x, places = np.ones((1, 1, 1, 6), np.float32), np.array([30], np.int32)
    rotary = Rotary(theta=1000.0, scale=8.0, trained=round(2.5 * 2 * np.pi * 10))
    found = np.asarray(turned(x, places, rotary))[0, 0, 0, :3]
    for i, speed in enumerate([1, 0.1 * (0.5 + 0.5 / 8), 0.01 / 8]):
        assert found[i] == pytest.approx(np.cos(30 * speed) - np.sin(30 * speed), abs=1e-2), i


@pytest.mark.parametrize("dim", [8, 7])
def test_sinusoids_are_those_of_the_paper(dim):
    found = np.asarray(jax.jit(sinusoids, static_argnums=1)(np.array([[0, 1, 5], [40, 2, 0]], np.int32), dim))
    for row, places in enumerate([[0, 1, 5], [40, 2, 0]]):
        for column, place in enumerate(places):
            for i in range(dim):
                angle = place / 10_000 ** (2 * (i // 2) / dim)
                expected = np.sin(angle) if i % 2 == 0 else np.cos(angle)
                assert float(found[row, column, i]) == pytest.approx(expected, abs=1e-5)


def test_what_is_added_to_the_embedding():
    tokens, places = np.array([[3, 3, 9]], np.int32), np.array([[0, 5, 5]], np.int32)
    learned, absolute = build(pos_encoding="learned"), build(pos_encoding="absolute")
    found, waves = nnx.jit(lambda models: ([m.embed(tokens, places) for m in models], sinusoids(places, 32)))(
        [learned, absolute]
    )
    table, rows = float64(learned.embedding.embedding[...]), float64(learned.position.embedding[...])
    assert rows.shape == (64, 32)
    np.testing.assert_allclose(found[0][0], table[[3, 3, 9]] + rows[[0, 5, 5]], atol=1e-6)
    table = float64(absolute.embedding.embedding[...])
    expected = table[[3, 3, 9]] * 32**0.5 + float64(waves[0])
    np.testing.assert_allclose(found[1][0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("encoding", "mla"),
    [
        ("absolute", False),
        ("learned", True),
        *(
            pytest.param(encoding, mla, marks=pytest.mark.long)
            for mla in (False, True)
            for encoding in ENCODINGS
            if (encoding, mla) not in (("absolute", False), ("learned", True))
        ),
    ],
)
def test_a_packed_row_is_its_documents_apart(encoding, mla):
    model = build(pos_encoding=encoding, mla=mla)
    row = np.random.default_rng(0).integers(0, 50, (1, sum(LENGTHS)), np.int32)
    segments = np.repeat(np.arange(3, dtype=np.int32), LENGTHS)[None]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])[None]
    apart, ends = np.zeros((3, max(LENGTHS)), np.int32), np.cumsum(LENGTHS).tolist()
    for number, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
        apart[number, :length] = row[0, end - length : end]
    alone = run(model, apart)
    expected = np.concatenate([rows[:length] for rows, length in zip(alone, LENGTHS, strict=True)])
    np.testing.assert_allclose(run(model, row, segments, positions)[0], expected, atol=1e-4, rtol=1e-5)
    if encoding in ("absolute", "learned"):
        of_the_row = np.arange(sum(LENGTHS), dtype=np.int32)[None]
        assert np.abs(run(model, row, segments, of_the_row)[0] - expected).max() > 1e-2


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("rotary", True),
        ("none", False),
        *(pytest.param(encoding, True, marks=pytest.mark.long) for encoding in ("absolute", "learned")),
    ],
)
def test_order_of_what_came_before(encoding, told):
    """One layer: without positions, the last token knows what came before it but not in which order."""
    model, tokens = build(pos_encoding=encoding), np.array([[4, 8, 15, 16, 23]], np.int32)
    one, other = (run(model, x)[0, -1] for x in (tokens, tokens[:, [2, 0, 3, 1, 4]]))
    assert (np.abs(one - other).max() > 1e-3) == told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pos_encoding": "alibi"}, "pos_encoding is 'alibi': it must be one of rotary, absolute, learned, none"),
        ({"rope_scale_factor": 0.0}, "rope_scale_factor is 0.0: it must be above 0"),
        ({"rope_scale_factor": float("inf")}, "rope_scale_factor is inf"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0: it must be above 1"),
        ({"rope_trained_context": 0}, "rope_trained_context is 0: it must be at least 1"),
    ],
)
def test_what_is_no_position_is_told(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)
    ModelConfig(pos_encoding="none", rope_scale_factor=0.0)
