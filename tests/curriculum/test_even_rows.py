"""The rows of a validation: spread over the whole set, the same ones each time, none twice."""

import numpy as np
import pytest

from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.process.exit_codes import UserError

SETS = {
    "one shard": [(0, 100_000)],
    "a part of a shard": [(12_345, 80_000)],
    "many shards": [(5_000 * i, 4_000 + i) for i in range(20)],
    "shards shorter than a row": [(10 * i, 7) for i in range(500)] + [(9_000, 3_000)],
    "a large one": [(0, 1 << 50)],
}


def shape(batch_size, seq_len, **more):
    return Shape(steps=9, batch_size=batch_size, seq_len=seq_len, weights=(("code", 0.5), ("self", 0.5)), **more)


def offsets(spread):
    return np.concatenate([spread.rows(step).offset for step in range(spread.total_steps)])


def windows(ranges, length):
    return [start + i * length for start, tokens in ranges for i in range(tokens // length)]


@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("name", SETS)
def test_each_stretch_of_the_set_gives_one_row(name, steps):
    ranges, size, length = SETS[name], 8, 17
    spread = EvenRows(ranges, shape(size, length), steps)
    found = offsets(spread)
    assert (spread.total_steps, len(found)) == (steps, steps * size)
    assert (np.diff(found) >= length).all()
    for offset in found.tolist():
        assert any(start <= offset and offset + length <= start + tokens for start, tokens in ranges)
    # The n-th row lies in the n-th of as many stretches of equal length.
    before = np.cumsum([0, *(tokens // length for _, tokens in ranges)])
    where = np.searchsorted([start for start, _ in ranges], found, side="right") - 1
    number = before[where] + (found - np.array([start for start, _ in ranges])[where]) // length
    assert [int(n) * len(found) // int(before[-1]) for n in number] == pytest.approx(np.arange(len(found)), abs=1)
    assert (offsets(EvenRows(ranges, shape(size, length), steps)) == found).all()


@pytest.mark.parametrize("packing", ["rows", "documents"])
@pytest.mark.parametrize("name", [name for name in SETS if name != "a large one"])
def test_a_set_that_is_read_whole_is_read_once(name, packing):
    size, length = 1, 17
    spread = EvenRows(SETS[name], shape(size, length, packing=packing), 10**6)
    assert offsets(spread).tolist() == windows(SETS[name], length)
    assert {spread.rows(step).packed for step in range(3)} == {packing == "documents"}


def test_rows_are_not_all_beginnings_of_documents_of_equal_length():
    """Documents of 64 rows: rows at equal distances would hit the same place in each."""
    found = offsets(EvenRows([(0, 64 * 16 * 128)], shape(16, 16), 8))
    assert len(set((found // 16 % 64).tolist())) > 30


@pytest.mark.parametrize(
    ("tokens", "size", "length", "expected"),
    [(200, 8, 17, 17), (136, 8, 17, 17), (135, 8, 17, 8), (40, 8, 17, 4), (17, 8, 17, 2), (16, 8, 1024, 2)],
)
def test_rows_of_a_small_set_are_shorter(tokens, size, length, expected):
    spread = EvenRows([(3, tokens)], shape(size, length), 5)
    assert spread.shape(0) == (size, expected)
    assert spread.tokens(spread.total_steps) == spread.total_steps * size * expected <= tokens
    assert offsets(spread).min() >= 3


def test_a_set_without_a_batch_is_refused():
    with pytest.raises(UserError, match="15 tokens are held out, too few for a batch of 8 rows"):
        EvenRows([(0, 15)], shape(8, 17), 5)
