"""Which document each token of a row is of, against a loop over the documents."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.shard import Shard


def naive(documents, offset, length):
    """Segments and positions of one window, token by token.

    Args:
        documents: the lengths of all documents, separators included.
        offset: the window's first token.
        length: its tokens.
    """
    document = [number for number, size in enumerate(documents) for _ in range(size)][offset : offset + length]
    segments, positions = [0], [0]
    for before, now in pairwise(document):
        segments.append(segments[-1] + (now != before))
        positions.append(0 if now != before else positions[-1] + 1)
    return segments, positions


def check(data, documents, offsets, length):
    segments, positions = data.segments(np.array(offsets), length)
    assert segments.dtype == positions.dtype == np.int32
    assert segments.shape == positions.shape == (len(offsets), length)
    for row, offset in enumerate(offsets):
        expected = naive(documents, offset, length)
        assert (segments[row].tolist(), positions[row].tolist()) == expected


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any),
    separator=st.sampled_from([None, 0]),
    limit=st.sampled_from([None, 40, 200]),
    length=st.integers(1, 60),
    drawn=st.randoms(use_true_random=False),
)
def test_every_row_is_what_a_loop_says(tmp_path_factory, lengths, separator, limit, length, drawn):
    folder = tmp_path_factory.mktemp("packed")
    with Roxxel(folder / "a_*.rox") as data:
        data.write(
            [np.ones(size, np.uint16) for size in lengths], separator=separator, dtype=np.uint16, max_shard_bytes=limit
        )
        documents = [size + (separator is not None) for size in lengths]
        inside = [at for start, size in data.ranges for at in range(start, start + size - length + 1)]
        if inside:
            check(data, documents, drawn.choices(inside, k=20), length)


def test_a_split_cuts_no_document_in_two_numbers(tmp_path):
    """What `split` leaves of a document is the document, on either side of the cut."""
    data = Roxxel(tmp_path / "a.rox")
    data.write([np.ones(1000, np.uint16), np.ones(9, np.uint16), np.ones(2000, np.uint16)])
    for half in data.split(0.5):
        for start, size in half.ranges:
            check(half, [1001, 10, 2001], [start, start + size - 50], 50)
            with pytest.raises(ValueError, match=f"a window of 50 tokens at token {start + size - 49} is not within"):
                half.segments(np.array([start, start + size - 49]), 50)


def test_files_without_documents_are_one(tmp_path):
    tokens = np.arange(500, dtype=np.uint16)
    np.save(tmp_path / "plain.npy", tokens)
    tokens.tofile(tmp_path / "raw.bin")
    for name in ("plain.npy", "raw.bin"):
        with Roxxel(tmp_path / name) as data:
            segments, positions = data.segments(np.array([0, 7]), 400)
            assert not segments.any()
            assert (positions == np.arange(400)).all()


def test_written_again_it_has_the_new_documents(tmp_path):
    data = Roxxel(tmp_path / "a.rox")
    for lengths in ([30, 30], [10, 50]):
        data.write([np.ones(length, np.uint16) for length in lengths], separator=None)
        check(data, lengths, [0, 5], 55)


def test_no_row_at_all(tmp_path):
    data = Roxxel(tmp_path / "a.rox")
    data.write([np.ones(30, np.uint16)])
    assert [found.shape for found in data.segments(np.array([], np.int64), 5)] == [(0, 5), (0, 5)]
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        data.segments(np.array([0]), 0)


@pytest.mark.parametrize("ends", [[30, 20, 10], [10, 20, 25], [0, 0, 0], [2**60, 20, 30]])
def test_damaged_ends_are_an_error_that_names_the_file(tmp_path, ends):
    """Where a row shows it: their checksum is looked at by `verify` alone."""
    path = tmp_path / "a.rox"
    Roxxel(path).write([np.ones(10, np.uint16)] * 3, separator=None)
    with path.open("r+b") as file:
        file.seek(Shard.open(path).layout.ends_offset)
        file.write(np.array(ends, "<i8").tobytes())
    with Roxxel(path) as data, pytest.raises(ValueError, match=r"a\.rox: the document ends are damaged"):
        data.segments(np.array([0, 0, 15]), 15)


def test_only_the_ends_in_the_window_are_looked_at(tmp_path):
    """A damaged end far away is no business of this window's: there is no scan."""
    path = tmp_path / "a.rox"
    Roxxel(path).write([np.ones(9, np.uint16)] * 5000)
    with path.open("r+b") as file:
        file.seek(Shard.open(path).layout.ends_offset + 8 * 1003)
        file.write(np.array([-1], "<i8").tobytes())
    with Roxxel(path) as data:
        check(data, [10] * 5000, [0, 17, 40_000], 95)
