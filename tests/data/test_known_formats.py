"""A token file is read correctly, or refused with its format and the fix; nothing is guessed in silence."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import tarfile

import numpy as np
import pytest

from roxxel_dist import Roxxel
from roxxel_dist.cli import main
from roxxel_dist.process.exit_codes import UserError

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 50257, 20000)
LARGE = RNG.integers(0, 128256, 20000)
TINY = ["--model", "runs:build", "--dim", "8", "--max_context", "8", "--batch_size", "1", "--max_steps", "1"]


def llmc(magic, version, ids):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(ids)
    return head.tobytes() + ids.tobytes()


def archive(write):
    memory = io.BytesIO()
    write(memory)
    return memory.getvalue()


def tar():
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as file:
        file.addfile(tarfile.TarInfo("x"), io.BytesIO())
    return memory.getvalue()


def safetensors(data):
    head = json.dumps({"w": {"dtype": "U16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(head)) + head + data


TOKENS = IDS.astype("<u2").tobytes()
REFUSED = {
    "NumPy": (archive(lambda file: np.save(file, IDS)), r"a NumPy array .*: name it \.npy"),
    "npz": (archive(lambda file: np.savez(file, ids=IDS)), r"a zip archive, such as \.npz .*numpy\.save"),
    "gzip": (gzip.compress(TOKENS), "compressed with gzip .*gunzip"),
    "bzip2": (bz2.compress(TOKENS), "compressed with bzip2 .*bunzip2"),
    "xz": (lzma.compress(TOKENS), "compressed with xz .*unxz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + TOKENS, "compressed with zstd .*unzstd"),
    "Parquet": (b"PAR1" + TOKENS + b"PAR1", "a Parquet file"),
    "Arrow": (b"ARROW1\x00\x00" + TOKENS, "an Arrow file"),
    "Arrow stream": (b"\xff\xff\xff\xff\x80\x00\x00\x00\x10\x00\x00\x00" + TOKENS, "an Arrow stream"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + TOKENS, "an HDF5 file"),
    "pickle 5": (pickle.dumps(IDS, protocol=5), "a Python pickle"),
    "pickle 2": (pickle.dumps({"ids": IDS}, protocol=2), "a Python pickle"),
    "torch": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + TOKENS, r"torch\.save"),
    "safetensors": (safetensors(TOKENS), "a safetensors file"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + TOKENS, "a GGUF file"),
    "Megatron index": (b"MMIDIDX\x00\x00" + TOKENS, r"the index of a Megatron pair .*name it \.idx"),
    "ELF": (b"\x7fELF\x02\x01\x01" + TOKENS, "a program or a library"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + TOKENS, "a PNG picture"),
    "tar": (tar(), "a tar archive"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html>\n<html><body>404: there is no such file here, sorry</body></html>\n", "is text"),
    "text": ("ein süßer Text\n".encode() * 500, r"is text .*name it \.txt"),
    "JSON lines": (b'{"text": "one document"}\n' * 9, "is text"),
    "llm.c weights": (llmc(20240326, 3, IDS.astype("<u2")), r"a file of llm\.c with weights"),
    "llm.c tokenizer": (llmc(20240328, 2, IDS.astype("<u2")), r"a file of llm\.c with a tokenizer"),
}


@pytest.mark.parametrize("ending", [".bin", ".npy", ".rox"])
def test_another_format_is_refused_by_its_name(tmp_path, ending):
    path = tmp_path / f"tokens{ending}"
    for name, (data, message) in REFUSED.items():
        if name == "NumPy" and ending != ".bin":
            continue  # a NumPy array is .npy, and a .rox file begins with the same header
        path.write_bytes(data)
        with pytest.raises(UserError) as refused:
            Roxxel(path)
        assert re.search(message, str(refused.value)), name
        assert str(refused.value).startswith(f"{path}: "), name
        assert "\n" not in str(refused.value), name


@pytest.mark.parametrize(
    ("magic", "version", "ids"), [(20240520, 1, IDS.astype("<u2")), (20240801, 7, LARGE.astype("<u4"))]
)
def test_files_of_llm_c_say_their_dtype(tmp_path, magic, version, ids):
    path = tmp_path / "train.bin"
    path.write_bytes(llmc(magic, version, ids))
    with Roxxel(path) as data:
        assert (data.num_tokens, data.dtype) == (len(ids), ids.dtype)
        assert np.array_equal(data[0], ids)
    for other in ("uint16", "uint32"):
        if other != ids.dtype:
            with pytest.raises(UserError, match=f"dtype={other} was given, and the file has {ids.dtype}"):
                Roxxel(path, dtype=other)
    path.write_bytes(llmc(magic, version, ids)[:-2])
    with pytest.raises(UserError, match=r"its llm\.c header says version"):
        Roxxel(path)
    path.write_bytes(llmc(magic, version + 1, ids))
    with pytest.raises(UserError, match=f"it has to be version {version}"):
        Roxxel(path)


HEADERLESS = {
    "uint16": (IDS.astype("<u2"), None),
    "uint32, ids above 65,536": (LARGE.astype("<u4"), "uint32"),
    "uint32, ids below 65,536": (IDS.astype("<u4"), "uint32"),
    "int32": (IDS.astype("<i4"), "uint32"),
    "uint64": (IDS.astype("<u8"), "uint64"),
    "all alike": (np.full(20000, 7, "<u2"), None),
    "bytes in uint16": (RNG.integers(0, 256, 20000).astype("<u2"), None),
    "every second is the separator": (np.stack([IDS, 0 * IDS + 50256], 1).reshape(-1).astype("<u2"), None),
    "two ids": (RNG.integers(0, 2, 20000).astype("<u2"), None),
}


@pytest.mark.parametrize("name", HEADERLESS)
def test_wide_numbers_are_not_read_as_uint16(tmp_path, name):
    ids, wider = HEADERLESS[name]
    path = tmp_path / "train.bin"
    ids.tofile(path)
    if wider is None:
        assert np.array_equal(Roxxel(path)[0], ids)
        return
    with pytest.raises(UserError, match=f"they look like {wider}.*the option data_dtype {wider} of train"):
        Roxxel(path)
    assert np.array_equal(Roxxel(path, dtype=wider)[0], ids.astype(wider))
    assert Roxxel(path, dtype="uint16").num_tokens == ids.nbytes // 2, "a person may insist"


PLANNED = {
    "told": (LARGE.astype("<u4"), ["--vocab_size", "128256", "--data_dtype", "uint32"], None),
    "not told": (LARGE.astype("<u4"), ["--vocab_size", "128256"], "they look like uint32.*data_dtype uint32"),
    "a large vocabulary": (IDS.astype("<u2"), ["--vocab_size", "128256"], "has no ids of a vocabulary of 128256"),
    "a large vocabulary, told": (IDS.astype("<u2"), ["--vocab_size", "128256", "--data_dtype", "uint16"], None),
    "beyond": (IDS.astype("<u2"), ["--vocab_size", "1000"], r"train\.bin: token 0 is the id \d+, .* ids 0 to 999"),
    "negative": (-IDS.astype("<i4"), ["--vocab_size", "50257", "--data_dtype", "int32"], "is the id -"),
    "the wrong one": (IDS.astype("<u2"), ["--vocab_size", "50257", "--data_dtype", "uint32"], "another dtype"),
    "no dtype": (IDS.astype("<u2"), ["--vocab_size", "50257", "--data_dtype", "float"], "data_dtype"),
    "a size of uint16": (IDS[:101].astype("<u2"), ["--vocab_size", "50257", "--data_dtype", "uint32"], "_dtype uint16"),
    "odd": (np.arange(4001, dtype="u1"), ["--vocab_size", "50257"], "4001 bytes, which is not a multiple of"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name == "a large vocabulary, told" else ()) for name in PLANNED],
)
def test_a_run_is_told_the_dtype(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids, words, message = PLANNED[name]
    ids.tofile("train.bin")
    code = main(["plan", "--data_path", "train.bin", *TINY, *words])
    printed = capsys.readouterr()
    if message is None:
        assert code == 0, printed.err
        assert "Traceback" not in printed.err
        return
    assert code == 2
    assert re.search(message, printed.err), printed.err


@pytest.mark.long
def test_a_run_remembers_the_dtype(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LARGE[:2000].astype("<u4").tofile("train.bin")
    words = ["--vocab_size", "128256", "--data_dtype", "uint32", "--eval_iters", "1", "--sample", "off"]
    assert main(["train", "--data_path", "train.bin", "--run_dir", "run", *TINY, *words]) == 0
    assert "data_dtype: uint32" in (tmp_path / "run" / "config.yaml").read_text()
    assert main(["eval", "run"]) == 0
    assert main(["data", "build", "train.bin", "--out", "set", "--dtype", "uint32", "--vocab_size", "128256"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--data_path", "set"]) == 0, "the shards have the same dtype"


def test_ids_that_were_saved_in_too_small_a_type(tmp_path, capsys):
    np.save(tmp_path / "ids.npy", IDS.astype("<i2"))
    assert main(["plan", "--data_path", str(tmp_path / "ids.npy"), "--vocab_size", "50257", *TINY]) == 2
    assert "no id is negative, so they were saved in too small a type" in capsys.readouterr().err


def test_what_is_guessed_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    IDS.astype("<u2").tofile("rnd.bin")
    assert main(["data", "build", "rnd.bin", "--out", "set"]) == 0
    assert "rnd.bin has no header: its tokens are read as uint16 (dtype)" in capsys.readouterr().err
    assert main(["plan", "--data_path", "rnd.bin", "--vocab_size", "50257", *TINY]) == 0
    assert "rnd.bin has no header: its tokens are read as uint16 (data_dtype)" in capsys.readouterr().err
    assert main(["data", "info", "rnd.bin"]) == 0
    assert "uint16, because no other was given" in capsys.readouterr().out


def test_tokens_of_olmo_are_read_as_the_message_says(tmp_path):
    path = tmp_path / "part-0.npy"
    LARGE.astype("<u4").tofile(path)
    with pytest.raises(UserError, match=r"no \.npy header.*name it part-0\.bin and give their dtype"):
        Roxxel(path)
    assert np.array_equal(Roxxel(path.rename(path.with_suffix(".bin")), dtype="uint32")[0], LARGE)


def test_a_shard_without_its_end_is_no_numpy_array(tmp_path):
    Roxxel(tmp_path / "a.rox").write([IDS])
    data = (tmp_path / "a.rox").read_bytes()
    (tmp_path / "a.rox").write_bytes(data[:-10])
    with pytest.raises(UserError, match=r"not a complete \.rox file"):
        Roxxel(tmp_path / "a.rox")
