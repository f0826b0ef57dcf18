"""Files of other systems: their tokens and documents, every way to name them, and no damage that goes unnoticed."""

import os
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusing import refusing_by_name

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import find_shards, is_tokens
from roxxel_dist.data.files.foreign import INDEX_DTYPES, ForeignFile, open_foreign
from roxxel_dist.data.files.slices import open_files

TOKENS = np.random.default_rng(3).integers(1, 30_000, 5000)


def write_old(path, tokens, block_size=4096):
    """A ROXXEL02 file: the last block is padded, as its writer did."""
    raw = tokens.tobytes()
    raw += bytes(-len(raw) % block_size)
    ends = np.arange(block_size, len(raw) + 1, block_size, dtype="<i8")
    name = tokens.dtype.name.encode().ljust(8, b"\0")
    path.write_bytes(raw + ends.tobytes() + struct.pack("<qq8s8s", len(ends), len(raw), name, b"ROXXEL02"))


def write_megatron(prefix, documents, dtype="<u2", extra=b""):
    """A Megatron pair; a document is a list of sequences."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")]) * np.dtype(dtype).itemsize
    begins = np.cumsum([0, *map(len, documents)], dtype="<i8")
    code = next(number for number, name in INDEX_DTYPES.items() if np.dtype(name) == np.dtype(dtype))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(begins))
    prefix.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + pointers.astype("<i8").tobytes() + begins.tobytes() + extra
    )
    prefix.with_suffix(".bin").write_bytes(b"".join(map(np.ndarray.tobytes, sequences)))


def write_all(folder, dtype="<u2"):
    """One file of each kind with the same tokens."""
    tokens = TOKENS.astype(dtype)
    write_old(folder / "old.rox", tokens)
    np.save(folder / "plain.npy", tokens)
    tokens.tofile(folder / "raw.bin")
    write_megatron(folder / "pair", [[tokens[:700], tokens[700:900]], [tokens[900:901]], [], [tokens[901:]]], dtype)
    return tokens


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "|u1"])
@pytest.mark.parametrize("name", ["old.rox", "plain.npy", "raw.bin", "pair.bin", "pair.idx", "pair"])
def test_each_kind_is_read_in_place(tmp_path, name, dtype):
    tokens = write_all(tmp_path, dtype)
    with Roxxel(tmp_path / name, dtype=dtype if name == "raw.bin" else None) as ds:
        assert ds.dtype == np.dtype(dtype)
        everything = ds.read(np.array([0]), ds.num_tokens)[0]
        assert np.array_equal(everything[:5000], tokens)
        assert not everything[5000:].any()
        assert ds.num_tokens == (
            5000 if name != "old.rox" else -(-5000 * tokens.itemsize // 4096) * 4096 // tokens.itemsize
        )
        assert ds.vocab_size is None
        assert ds.tokenizer is None
        assert not ds[0].flags.writeable
        assert [len(document) for document in ds] == ([900, 1, 0, 4099] if "pair" in name else [ds.num_tokens])
        assert np.array_equal(np.concatenate(list(ds)), everything)
        offsets = np.array([0, 17, 4000])
        assert np.array_equal(ds.read(offsets, 900), np.stack([tokens[o : o + 900] for o in offsets]))
        assert ds.estimate_steps(10, 5) > 50
        train, held_out = ds.split(0.1)
        assert train.num_tokens + held_out.num_tokens == ds.num_tokens
        assert held_out.num_tokens > 0
        ds.verify()


def test_files_of_one_kind_are_one_data_set(tmp_path):
    parts = [TOKENS[:1000], TOKENS[1000:1500], TOKENS[1500:]]
    for number, part in enumerate(parts):
        part.astype(np.uint16).tofile(tmp_path / f"part_{number}.bin")
        np.save(tmp_path / f"array_{number}.npy", part)
        write_megatron(tmp_path / f"pair_{number}", [[part]])
        write_old(tmp_path / f"old_{number}.rox", part)
    for source, dtype in [
        ("part_*.bin", "u2"),
        ("array_", "i8"),
        ("array_*", "i8"),
        ("pair_", "u2"),
        ("pair_?.idx", "u2"),
    ]:
        with Roxxel(tmp_path / source) as ds:
            assert len(ds.shards) == len(ds) == 3
            assert ds.dtype == dtype
            assert [document.tolist() for document in ds] == [part.tolist() for part in parts]
            assert ds.ranges == ((0, 1000), (1000, 500), (1500, 3500))
    with Roxxel([tmp_path / "array_2.npy", tmp_path / "array_0.npy"]) as ds:
        assert [len(document) for document in ds] == [3500, 1000]
    with Roxxel(tmp_path) as ds:
        assert [shard.path.name for shard in ds.shards] == ["old_0.rox", "old_1.rox", "old_2.rox"]


def test_naming_what_is_tokens(tmp_path):
    write_all(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "nano").mkdir()
    (tmp_path / "code").mkdir()
    for folder in ("nano", "code"):
        TOKENS.astype("u2").tofile(tmp_path / folder / "a.bin")
    (tmp_path / "code" / "a.py").write_text("code")
    yes = [
        "old.rox",
        "plain.npy",
        "raw.bin",
        "pair.idx",
        "pair",
        "pair.bin",
        "*.npy",
        "none.rox",
        "none_*",
        "nano",
        ".",
    ]
    assert [name for name in yes if not is_tokens(tmp_path / name)] == []
    assert is_tokens([tmp_path / "old.rox", str(tmp_path / "raw.bin")])
    no = ["text.txt", "none", "text", "code", "*.txt"]
    assert [name for name in no if is_tokens(tmp_path / name)] == []
    assert not is_tokens([tmp_path / "old.rox", tmp_path / "text.txt"])
    assert find_shards(tmp_path / "nano") == [tmp_path / "nano" / "a.bin"]


def test_training_and_validation_files_are_not_mixed(tmp_path):
    for name in ("train", "val"):
        TOKENS.astype("u2").tofile(tmp_path / f"{name}.bin")
    with pytest.raises(ValueError, match=r"train on and to validate with: name .*train\.bin or .*val\.bin"):
        Roxxel(tmp_path)
    assert is_tokens(tmp_path)
    assert Roxxel(tmp_path / "train.bin").num_tokens == 5000
    for name in ("train", "val"):
        Roxxel(tmp_path / "both" / name / "x.rox").write([[1, 2]])
    with pytest.raises(ValueError, match="both holds data to train on"):
        Roxxel(tmp_path / "both")


@pytest.mark.parametrize("others", [("raw.bin",), ("pair.bin",), ("old.rox",), ("new.rox",)])
def test_kinds_are_not_mixed(tmp_path, others):
    write_all(tmp_path)
    Roxxel(tmp_path / "new.rox").write([TOKENS.astype("u2")])
    with pytest.raises(ValueError, match=rf"{others[0]} is a .* file, .*plain\.npy a npy file: not one data set"):
        Roxxel([tmp_path / "plain.npy", *(tmp_path / name for name in others)])


def test_dtypes_are_not_mixed(tmp_path):
    np.save(tmp_path / "a_0.npy", TOKENS.astype("u2"))
    np.save(tmp_path / "a_1.npy", TOKENS.astype("i4"))
    with pytest.raises(ValueError, match=r"a_1\.npy has dtype int32, .*a_0\.npy has uint16"):
        Roxxel(tmp_path / "a_*.npy")
    with pytest.raises(ValueError, match=r"a_1\.npy: dtype=uint16 was given, and the file has int32"):
        Roxxel(tmp_path / "a_1.npy", dtype="uint16")
    Roxxel(tmp_path / "b.rox").write([[1, 2]], dtype="u4")
    with pytest.raises(ValueError, match=r"b\.rox: dtype=uint16 was given, and the file has uint32"):
        Roxxel(tmp_path / "b.rox", dtype="uint16")


def test_the_fingerprint_follows_the_contents(tmp_path):
    def fingerprint(name, tokens, dtype=None):
        tokens.tofile(tmp_path / name)
        return Roxxel(tmp_path / name, dtype=dtype).fingerprint

    tokens = TOKENS.astype("u2")
    first = fingerprint("a.bin", tokens)
    assert fingerprint("b.bin", tokens) == first
    assert fingerprint("b.bin", tokens, "i2") != first
    assert fingerprint("b.bin", tokens[:-1]) != first
    for place in (0, 4999):
        changed = tokens.copy()
        changed[place] ^= 1
        assert fingerprint("b.bin", changed) != first


def test_foreign_files_are_not_written_to(tmp_path):
    write_all(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("old.rox", "plain.npy", "raw.bin", "pair"):
        for append in (False, True):
            with pytest.raises(ValueError, match=rf"{name.split('.')[0]}.*can only be read"):
                Roxxel(tmp_path / name).write([[1]], append=append)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_changed_its_size_is_noticed(tmp_path):
    write_all(tmp_path)
    for name in ("old.rox", "plain.npy", "raw.bin", "pair.bin"):
        ds = Roxxel(tmp_path / name)
        with (tmp_path / name).open("ab") as file:
            file.write(b"\0\0")
        with pytest.raises(ValueError, match="bytes now"):
            ds.verify()


def llmc(tokens, magic=20240520, version=1, count=None):
    head = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return head.ljust(1024, b"\0") + tokens.astype("<u2").tobytes()


def test_a_file_of_llm_c_is_read_behind_its_header(tmp_path):
    path = tmp_path / "train_000001.bin"
    path.write_bytes(llmc(TOKENS))
    assert open_foreign(path).kind == "llm.c"
    with Roxxel(path) as ds:
        assert ds.dtype == np.uint16
        assert np.array_equal(ds[0], TOKENS)
        assert np.array_equal(ds.read(np.array([3, 4000]), 900), np.stack([TOKENS[3:903], TOKENS[4000:4900]]))
        ds.verify()
    with pytest.raises(ValueError, match=r"train_000001\.bin: dtype=int32 was given, and the file has uint16"):
        Roxxel(path, dtype="int32")
    path.write_bytes(llmc(TOKENS, magic=20240521))
    assert Roxxel(path).num_tokens == 512 + 5000


DAMAGED = {
    "short.bin": (llmc(TOKENS)[:-1], r"11023 bytes, but its llm\.c header says version 1 and 5000 tokens"),
    "long.bin": (llmc(TOKENS) + b"\0\0", r"11026 bytes, .* 11024 bytes"),
    "new.bin": (llmc(TOKENS, version=2), "says version 2"),
    "none.bin": (llmc(TOKENS[:0]), "at least 1 token"),
    "minus.bin": (llmc(TOKENS, count=-1), "at least 1 token"),
    "head.bin": (llmc(TOKENS)[:11], "11 bytes, but its llm"),
    "odd.bin": (b"abc", r"not a multiple of the 2 bytes of uint16"),
    "empty.bin": (b"", "is empty"),
    "really.bin": (b"\x93NUMPY\x01\x00", r"the file is a NumPy array"),
    "cut.npy": (b"\x93NUMPY\x01\x00", r"not a \.npy file"),
    "text.npy": (b"hello" * 30, r"has no \.npy header"),
    "short.rox": (b"ROXXEL02", "too short"),
    "alone.idx": (b"MMIDIDX", r"alone\.bin: missing"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path, name):
    data, message = DAMAGED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as raised:
        Roxxel(tmp_path / name)
    assert str(tmp_path / name.split(".")[0]) in str(raised.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), "u2"), r"shape \(3, 4\).*reshape\(-1\)"),
        (np.array(5), r"shape \(\)"),
        (np.zeros(5, ">u2"), "dtype >u2"),
        (np.zeros(5, "c8"), "dtype <c8"),
        (np.array(["a"]), "dtype <U1"),
        (np.zeros(0, "u2"), "the array is empty"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=rf"a\.npy.*{message}"):
        Roxxel(tmp_path / "a.npy")


def damage_index(tmp_path, where, kind, value):
    path = tmp_path / "pair.idx"
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, where, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("where", "kind", "value", "message"),
    [
        (0, "<B", 0, r"pair\.idx: not a Megatron index"),
        (9, "<Q", 2, r"pair\.idx: not a Megatron index of version 1 .*version 2"),
        (17, "<B", 6, "dtype number 6"),
        (18, "<Q", 5, "was truncated or is damaged"),
        (18, "<Q", 2**60, "was truncated or is damaged"),
        (26, "<Q", 0, "was truncated or is damaged"),
        (34 + 12, "<i", 7, "the sequences of pair.idx reach from byte 0 to"),
        (34 + 16, "<q", 2, "the sequences of pair.idx reach from byte 2 to"),
        (34 + 48, "<q", 1, "the document indices run from 1 to 4"),
        (34, "<i", 999, "do not follow each other"),
        (34 + 4, "<i", -1, "do not follow each other"),
        (34 + 56, "<q", 4000, "the document indices fall"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, where, kind, value, message):
    write_all(tmp_path)
    damage_index(tmp_path, where, kind, value)
    with pytest.raises(ValueError, match=message):
        list(Roxxel(tmp_path / "pair"))


def test_an_index_with_modes_is_read(tmp_path):
    write_megatron(tmp_path / "pair", [[[1, 2]], [[3]]], extra=b"\0\0")
    assert [document.tolist() for document in Roxxel(tmp_path / "pair")] == [[1, 2], [3]]


def test_opening_is_independent_of_the_size(tmp_path):
    for name, size in (("small.bin", 1 << 20), ("large.bin", 1 << 40)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        opened = open_foreign(tmp_path / name)
        assert len(opened.tokens) == size // 2
        before = os.times()
        open_foreign(tmp_path / name)
        after = os.times()
        assert after.user + after.system - before.user - before.system < 1.0


def read_all(path):
    opened = open_files([path])[0]
    assert isinstance(opened, ForeignFile)
    opened.verify()
    ds = Roxxel(path)
    assert sum(map(len, ds)) <= ds.num_tokens
    ds.split(0.3)
    return int(opened.tokens.sum())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["old.rox", "plain.npy", "raw.bin", "pair.bin", "pair.idx"]))
def test_no_damage_raises_anything_but_value_error(tmp_path, data, name):
    write_all(tmp_path)
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    head, tail = min(len(content), 200), len(content)
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.one_of(st.integers(0, head - 1), st.integers(max(0, tail - 80), tail - 1)))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(tail), st.integers(0, tail)))
    path.write_bytes(content[:cut] + data.draw(st.binary(max_size=9)))
    with refusing_by_name(tmp_path):
        read_all(path if name != "pair.idx" else tmp_path / "pair.bin")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=300),
    name=st.sampled_from(["x.npy", "x.bin", "x.idx", "x.rox"]),
    magic=st.sampled_from(
        [
            (b"", b""),
            (llmc(TOKENS[:0])[:8], b""),
            (b"\x93NUMPY\x01\x00", b""),
            (b"MMIDIDX\0\0", b""),
            (b"", b"ROXXEL02"),
        ]
    ),
)
def test_random_bytes_raise_nothing_but_value_error(tmp_path, content, name, magic):
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "x.bin").write_bytes(bytes(64))
    (tmp_path / name).write_bytes(magic[0] + content + magic[1])
    with refusing_by_name(tmp_path):
        Roxxel(tmp_path / name).verify()
