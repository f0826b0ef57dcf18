"""`Roxxel.write`: dtypes, separators, refusals, replacing and appending."""

import os
import resource
import signal

import numpy as np
import pytest

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.format import DTYPES
from roxxel_dist.data.files.writer import WriteOptions, write_shards


def write(tmp_path, items, **options):
    ds = Roxxel(tmp_path / "a.rox")
    ds.write(items, **options)
    return ds


def test_text_and_bytes_are_uint8(tmp_path):
    ds = write(tmp_path, ["naïve", b"raw\xff", bytearray(b"x"), ""])
    assert ds.dtype == np.uint8
    assert [document.tobytes() for document in ds] == ["naïve".encode(), b"raw\xff", b"x", b""]
    assert ds.shards[0].tokens.tobytes() == "naïve".encode() + b"\0raw\xff\0x\0\0"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_arrays_keep_their_dtype(tmp_path, dtype):
    assert write(tmp_path, [np.array([1, 2, 3], dtype)]).dtype.str == dtype


def test_big_endian_arrays_are_stored_little_endian(tmp_path):
    ds = write(tmp_path, [np.array([1, 515], ">u2")])
    assert ds.dtype.str == "<u2"
    assert ds[0].tolist() == [1, 515]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "|u1"), (257, "<u2"), (50257, "<u2"), (65536, "<u2"), (151000, "<u4")]
)
def test_a_vocabulary_chooses_the_smallest_dtype(tmp_path, vocab_size, dtype):
    ds = write(tmp_path, [np.array([0, vocab_size - 1], np.int64)], vocab_size=vocab_size)
    assert ds.dtype.str == dtype
    assert ds.vocab_size == vocab_size
    assert ds[0].tolist() == [0, vocab_size - 1]


def test_a_separator_is_one_element_of_the_dtype(tmp_path):
    rows = [np.array([5, 6], np.int32), np.array([7], np.int32)]
    for separator, element in (
        (b"\x00", 0),
        ("\n", 10),
        (70000, 70000),
        (-1, -1),
        (b"\x01\x00\x01\x00", 65537),
        (3.0, 3),
    ):
        ds = write(tmp_path, rows, separator=separator)
        assert ds.shards[0].tokens.tolist() == [5, 6, element, 7, element]
        assert [row.tolist() for row in ds] == [[5, 6], [7]]
    ds = write(tmp_path, rows, separator=None)
    assert ds.shards[0].tokens.tolist() == [5, 6, 7]
    assert [row.tolist() for row in ds] == [[5, 6], [7]]
    ds = write(tmp_path, [np.array([0.5])], separator=b"\x00")
    assert ds.shards[0].tokens.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("separator", [b"ab", b"", "abc", 70000, -1, 1.5, True, [1]])
def test_what_is_not_one_element_is_no_separator(tmp_path, separator):
    with pytest.raises(ValueError, match="separator="):
        write(tmp_path, [np.array([1], np.uint16) if separator != b"ab" else b"x"], separator=separator)
    assert os.listdir(tmp_path) == []


def test_items_are_converted_where_nothing_is_lost(tmp_path):
    ds = write(tmp_path, [np.array([1, 2], np.uint16), np.array([65535], np.int64), [3, 4], b"a", np.array([5.0])])
    assert ds.dtype == np.uint16
    assert [document.tolist() for document in ds] == [[1, 2], [65535], [3, 4], [97], [5]]
    ds = write(tmp_path, [np.array([np.nan, 0.5], np.float64)], dtype=np.float32)
    assert ds.dtype == np.float32


@pytest.mark.parametrize(
    ("items", "options"),
    [
        ([np.array([1], np.uint16), np.array([70000])], {}),
        ([np.array([1], np.uint16), np.array([-1])], {}),
        ([np.array([1], np.uint16), np.array([0.5])], {}),
        ([np.array([1], np.uint16), np.array([np.nan])], {}),
        ([np.array([1], np.uint16), np.array([np.inf])], {}),
        ([b"", np.array([2**53 + 1])], {"dtype": np.float64}),
        ([b"", np.array([0.1])], {"dtype": np.float32}),
        ([b"", np.array([1e300])], {"dtype": np.float32}),
        ([b"", np.array([2**64 - 1], np.uint64)], {"dtype": np.int64}),
        ([[1], [9]], {"vocab_size": 9}),
        ([[1], [-1]], {"vocab_size": 9}),
        ([b"", np.zeros((2, 2))], {}),
        ([b"", np.array(["a"])], {}),
        ([b"", np.array([True])], {}),
        ([b"", np.array([1j])], {}),
        ([b"", 5], {}),
    ],
)
def test_what_would_lose_something_is_refused_and_nothing_is_left(tmp_path, items, options):
    with pytest.raises(ValueError, match="document 1 "):
        write(tmp_path, items, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "complex64"}, "dtype=complex64"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, [b"x"], **options)
    assert os.listdir(tmp_path) == []


def test_rewriting_replaces_all_shards(tmp_path):
    ds = Roxxel(tmp_path / "a_*.rox")
    ds.write([b"one", b"two", b"three"], max_shard_bytes=4)
    assert len(ds.shards) == 3
    ds.write([b"new"])
    assert [document.tobytes() for document in Roxxel(tmp_path / "a_*.rox")] == [b"new"]
    assert os.listdir(tmp_path) == ["a_00000.rox"]


def test_a_failed_rewrite_leaves_what_was_there(tmp_path):
    ds = Roxxel(tmp_path / "a_*.rox")
    ds.write([b"one", b"two"], max_shard_bytes=4)
    before = ds.fingerprint

    def broken():
        yield b"new"
        yield b"data"
        raise RuntimeError("the source broke")

    for items, error in ((broken(), RuntimeError), ([], ValueError)):
        with pytest.raises(error):
            ds.write(items, max_shard_bytes=4)
        assert Roxxel(tmp_path).fingerprint == ds.fingerprint == before
        assert sorted(os.listdir(tmp_path)) == ["a_00000.rox", "a_00001.rox"]


def test_appending_adds_shards_and_touches_none(tmp_path):
    ds = Roxxel(tmp_path / "a_*.rox")
    ds.write([[1, 2], [3]], append=True, vocab_size=9, tokenizer_fingerprint="t")  # nothing there: as a first write
    first = ds.shards[0].path.read_bytes()
    before = ds.shards[0].path.stat()
    ds.write([[4], [5]], append=True, max_shard_bytes=2)
    assert ds.shards[0].path.read_bytes() == first
    assert ds.shards[0].path.stat().st_mtime_ns == before.st_mtime_ns
    assert [document.tolist() for document in ds] == [[1, 2], [3], [4], [5]]
    assert [shard.metadata.first_document for shard in ds.shards] == [0, 2, 3]
    assert (ds.dtype, ds.vocab_size, ds.tokenizer_fingerprint) == (np.uint8, 9, "t")
    ds.write([], append=True)
    assert len(ds.shards) == 3
    ds.verify()


def test_appending_what_does_not_fit_is_refused(tmp_path):
    ds = Roxxel(tmp_path / "a_*.rox")
    ds.write([[1, 2]], vocab_size=9)
    for options, name in (
        ({"dtype": "u4"}, "dtype"),
        ({"vocab_size": 10}, "vocab_size"),
        ({"tokenizer_fingerprint": "x"}, "tok"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}.*a_00000"):
            ds.write([[1]], append=True, **options)
    with pytest.raises(ValueError, match="document 0 has ids from 9 to 9"):
        ds.write([[9]], append=True)
    assert len(Roxxel(tmp_path)) == 1


def test_one_file_holds_one_shard(tmp_path):
    ds = Roxxel(tmp_path / "a.rox")
    with pytest.raises(ValueError, match=r"a\.rox is one file.*a_\*\.rox"):
        ds.write([b"one", b"two"], max_shard_bytes=4)
    ds.write([b"one"], max_shard_bytes=4)
    with pytest.raises(ValueError, match=r"a\.rox is one file"):
        ds.write([b"two"], append=True)
    assert len(Roxxel(tmp_path / "a.rox")) == 1


def test_places_that_cannot_be_written_to_are_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot write there"):
        Roxxel(tmp_path / "file" / "a.rox").write([b"x"])
    with pytest.raises(ValueError, match="one `\\*` in the file name"):
        Roxxel(tmp_path / "a_*_*.rox").write([b"x"])
    with pytest.raises(ValueError, match="a list names no place"):
        Roxxel([tmp_path / "a.rox"]).write([b"x"])
    assert os.listdir(tmp_path) == ["file"]


def test_folders_are_made_and_taken_back(tmp_path):
    with pytest.raises(ValueError, match="no items"):
        Roxxel(tmp_path / "new" / "deep" / "a_*.rox").write([])
    assert os.listdir(tmp_path) == []
    Roxxel(f"{tmp_path}/new/deep/").write([b"x"])
    assert os.listdir(tmp_path / "new" / "deep") == ["shard_00000.rox"]


def test_a_damaged_or_empty_file_is_replaced_when_that_is_asked_for(tmp_path):
    path = tmp_path / "a.rox"
    for content in (b"", b"not a shard", bytes(6000)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"in a program Roxxel\(PATH, overwrite=True\)\.write"):
            Roxxel(path)
        data = Roxxel(path, overwrite=True)
        assert path.read_bytes() == content, "nothing is replaced before it is written"
        data.write([b"new"])
        assert [one.tobytes() for one in Roxxel(path)] == [b"new"]
        data.close()


def test_a_disk_that_is_full_leaves_no_shard_behind(tmp_path):
    """Closing an unfinished shard writes what is buffered, which fails again."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shards(tmp_path, "{:05d}.rox".format, [bytes(100_000)] * 40, WriteOptions(max_shard_bytes=10**9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []
