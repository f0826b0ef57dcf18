"""The format ROXXEL03: what is written comes back, and whatever is changed in a file is noticed."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from roxxel_dist.data.files.format import DTYPES
from roxxel_dist.data.files.shard import Shard, ShardWriter, WriteOptions

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=12)


def documents_of(dtype, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [np.frombuffer(rng.bytes(length * np.dtype(dtype).itemsize), dtype) for length in lengths]


def write_shard(path, documents, config):
    writer = ShardWriter(path, config)
    for document in documents:
        writer.add(document)
    return writer.finish()


def ordinary(path: Path, block_size=64) -> list[np.ndarray]:
    documents = documents_of("<u2", [30, 0, 100, 7, 260, 1])
    write_shard(path, documents, WriteOptions(dtype=np.dtype("<u2"), separator=9, block_size=block_size))
    return documents


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    lengths=LENGTHS,
    block_size=st.integers(1, 300),
    separator=st.sampled_from([None, 0, 7]),
)
def test_what_is_written_comes_back(tmp_path_factory, dtype, lengths, block_size, separator):
    path = tmp_path_factory.mktemp("shard") / "a.rox"
    documents = documents_of(dtype, lengths)
    config = WriteOptions(dtype=np.dtype(dtype), separator=separator, block_size=block_size)
    metadata = write_shard(path, documents, config)
    tail = [] if separator is None else [np.array([separator], dtype)]
    expected = np.concatenate([part for document in documents for part in (document, *tail)])

    shard = Shard.open(path)
    shard.verify()
    assert shard.metadata == metadata
    assert shard.tokens.dtype.str == dtype
    assert shard.tokens.tobytes() == expected.tobytes()
    assert shard.document_ends.tolist() == np.cumsum([length + len(tail) for length in lengths]).tolist()
    assert not shard.tokens.flags.writeable
    assert not shard.document_ends.flags.writeable
    assert np.load(path).tobytes() == expected.tobytes()
    if len(expected):
        assert np.load(path, mmap_mode="r").dtype.str == dtype
    assert os.listdir(path.parent) == ["a.rox"]


def test_the_bytes_are_those_of_the_documentation(tmp_path):
    path = tmp_path / "a.rox"
    config = WriteOptions(dtype=np.dtype("<u2"), separator=9, block_size=8, vocab_size=500, tokenizer_fingerprint="f")
    write_shard(path, [np.array([1, 2, 3], "<u2"), np.array([258], "<u2")], config)
    data = path.read_bytes()
    assert data[:10] == b"\x93NUMPY\x01\x00" + struct.pack("<H", 4086)
    tokens = struct.pack("<6H", 1, 2, 3, 9, 258, 9)
    assert data[4096:4112] == tokens + bytes(4)
    assert data[4112:4128] == struct.pack("<2q", 4, 6)
    sums = [xxhash.xxh3_64_intdigest(tokens[:8]), xxhash.xxh3_64_intdigest(tokens[8:])]
    assert data[4128:4144] == struct.pack("<2Q", *sums)
    footer = struct.unpack("<q8s6q3Q8s", data[-96:])
    meta = data[4144:-96]
    assert footer[:8] == (6, b"<u2".ljust(8, b"\0"), 8, 2, 4112, 4128, 4144, len(meta))
    assert footer[8] == xxhash.xxh3_64_intdigest(data[4112:4128])
    assert footer[9] == xxhash.xxh3_64_intdigest(data[4128:4144])
    assert footer[10] == xxhash.xxh3_64_intdigest(meta + data[-96:-16])
    assert footer[11] == b"ROXXEL03"
    found = json.loads(meta)
    assert len(found.pop("chain")) == 32
    assert found == {
        "documents": 2,
        "first_document": 0,
        "first_token": 0,
        "index": 0,
        "separator": 9,
        "tokenizer_fingerprint": "f",
        "tokens": 6,
        "vocab_size": 500,
    }


def test_the_same_documents_give_the_same_bytes(tmp_path):
    ordinary(tmp_path / "a.rox")
    ordinary(tmp_path / "b.rox")
    assert (tmp_path / "a.rox").read_bytes() == (tmp_path / "b.rox").read_bytes()


def test_a_file_of_any_shorter_or_greater_length_is_refused(tmp_path):
    path, cut = tmp_path / "a.rox", tmp_path / "cut.rox"
    ordinary(path)
    data = path.read_bytes()
    lengths = [
        *range(0, 300, 13),
        4095,
        4096,
        4191,
        4192,
        *range(4200, len(data), 41),
        *range(len(data) - 100, len(data)),
    ]
    for length in lengths:
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.rox"):
            Shard.open(cut)
    for more in (b"\0", data[-96:], data):
        cut.write_bytes(data + more)
        with pytest.raises(ValueError, match=r"cut\.rox"):
            Shard.open(cut)


def test_bytes_missing_from_the_middle_are_noticed_on_opening(tmp_path):
    path = tmp_path / "a.rox"
    ordinary(path)
    data = path.read_bytes()
    path.write_bytes(data[:4200] + data[4216:])
    with pytest.raises(ValueError, match=r"a\.rox: the file has .* bytes, but its footer says"):
        Shard.open(path)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    path = tmp_path / "a.rox"
    ordinary(path)
    intact = path.read_bytes()
    places = [*range(0, 4096, 97), *range(4096, len(intact))]
    for at in places:
        flip(path, at)
        with pytest.raises(ValueError, match=r"a\.rox"):
            Shard.open(path).verify()
        flip(path, at)
    assert path.read_bytes() == intact
    Shard.open(path).verify()


def test_damage_is_attributed_to_its_block_and_document(tmp_path):
    path = tmp_path / "a.rox"
    documents = ordinary(path, block_size=64)  # 32 tokens a block
    ends = np.cumsum([len(document) + 1 for document in documents])
    for token in range(0, int(ends[-1]), 5):
        flip(path, 4096 + 2 * token)
        block = token // 32
        first, last = block * 32, min(block * 32 + 32, int(ends[-1])) - 1
        low, high = np.searchsorted(ends, [first, last], side="right")
        where = f"document {low}" if low == high else f"documents {low} to {high}"
        with pytest.raises(
            ValueError, match=rf"a\.rox: block {block} \(tokens {first} to {last}, {where}\) is damaged; 1 of"
        ):
            Shard.open(path).verify()
        flip(path, 4096 + 2 * token)
    flip(path, 4096)
    flip(path, 4096 + 700)
    with pytest.raises(ValueError, match=r"block 0 .* 2 of 13 blocks"):
        Shard.open(path).verify()


def test_a_file_changed_or_cut_while_it_is_open_is_noticed_by_verify(tmp_path):
    path = tmp_path / "a.rox"
    ordinary(path)
    shard = Shard.open(path)
    flip(path, 4500)
    with pytest.raises(ValueError, match="block"):
        shard.verify()
    os.truncate(path, 4300)
    with pytest.raises(ValueError, match="4300 bytes now"):
        shard.verify()


def test_other_kinds_of_files_are_refused_by_name(tmp_path):
    path = tmp_path / "a.rox"
    np.save(path.with_suffix(".npy"), np.arange(5000, dtype=np.uint16))
    path.with_suffix(".npy").rename(path)
    with pytest.raises(ValueError, match=r"a\.rox: not a complete \.rox file"):
        Shard.open(path)
    path.write_bytes(bytes(5000) + struct.pack("<qq8s8s", 1, 10, b"uint16", b"ROXXEL02"))
    with pytest.raises(ValueError, match=r"a\.rox: a file of the older format ROXXEL02"):
        Shard.open(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.rox: the file is empty"):
        Shard.open(path)


@given(st.data())
def test_random_footers_are_refused_and_nothing_worse(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.rox"
    ordinary(path)
    good = path.read_bytes()
    fields = list(struct.unpack("<q8s6q3Q8s", good[-96:]))
    for at in data.draw(st.sets(st.sampled_from([0, 2, 3, 4, 5, 6, 7]), min_size=1)):
        fields[at] = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda value, old=fields[at]: value != old))
    # With a right checksum over the wrong numbers: the sizes themselves have to be refused.
    meta = good[fields[6] if 0 <= fields[6] <= len(good) else 0 :][: max(0, min(fields[7], 1000))]
    body = struct.pack("<q8s6q2Q", *fields[:10])
    signature = xxhash.xxh3_64_intdigest(meta + body)
    path.write_bytes(good[:-96] + body + struct.pack("<Q", signature) + b"ROXXEL03")
    with pytest.raises(ValueError, match=r"a\.rox"):
        Shard.open(path).verify()


def test_large_documents_are_written_in_whole_blocks(tmp_path):
    path = tmp_path / "a.rox"
    documents = documents_of("<u4", [1_000_003, 5, 700_001])
    write_shard(path, documents, WriteOptions(dtype=np.dtype("<u4"), separator=None, block_size=4097))
    shard = Shard.open(path)
    shard.verify()
    assert np.array_equal(shard.tokens, np.concatenate(documents))
    assert len(shard.checksums) == -(-shard.tokens.nbytes // 4097)


@pytest.mark.parametrize("step", [1, 2])
def test_a_huge_document_takes_little_memory(tmp_path, step):
    """It is mapped, and written in pieces, whether its tokens are neighbours or have to be gathered."""
    np.save(tmp_path / "huge.npy", np.arange(8_000_000 * step, dtype=np.uint32).astype("<u2"))
    document = np.load(tmp_path / "huge.npy", mmap_mode="r")[::step]
    assert document.nbytes == 16_000_000
    tracemalloc.start()
    try:
        write_shard(tmp_path / "a.rox", [document, document], WriteOptions(dtype=np.dtype("<u2"), separator=3))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    shard = Shard.open(tmp_path / "a.rox")
    shard.verify()
    assert shard.document_ends.tolist() == [8_000_001, 16_000_002]
    for start in (0, 8_000_001):
        assert np.array_equal(shard.tokens[start : start + 8_000_000], document)
        assert shard.tokens[start + 8_000_000] == 3


def test_a_block_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block_size=0"):
        WriteOptions(dtype=np.dtype("u1"), block_size=0)
