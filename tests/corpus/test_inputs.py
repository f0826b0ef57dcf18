"""What `data build` reads besides text files, how it shares the work, and what it says about damage."""

import gzip
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusing import refusing_by_name

from roxxel_dist.corpus.build import build
from roxxel_dist.corpus.documents import read_arrow, read_json_lines, read_parquet, saved_data_set
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.writer import write_shards
from roxxel_dist.data.tokenizer.tokenizer import train_tokenizer

TEXTS = [f"text {number}: " + "naïve 東京 words\n" * (number % 7) for number in range(90)]


def write_json_lines(path, texts=TEXTS, key="text"):
    lines = [json.dumps({"id": number, key: text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(texts)]
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_parquet(path, texts=TEXTS, key="text", kind=None):
    pq.write_table(pa.table({"id": range(len(texts)), key: pa.array(texts, kind)}), path, row_group_size=20)


def write_saved(folder, texts=TEXTS):
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, some in zip(names, (texts[:50], texts[50:]), strict=True):
        table = pa.table({"text": some})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


WRITERS = {
    "a.jsonl": write_json_lines,
    "a.jsonl.gz": write_json_lines,
    "a.json.gz": write_json_lines,
    "a.parquet": write_parquet,
    "saved": write_saved,
}


def texts_of(ds):
    return [bytes(document.tolist()).decode() for document in ds]


def built(path, out, **options):
    return build(path, out, **{"tokenizer": "byte", "progress": False} | options)


@pytest.mark.parametrize("name", WRITERS)
def test_many_documents_a_file(tmp_path, name):
    WRITERS[name](tmp_path / "in" / name) if name == "saved" else None
    (tmp_path / "in").mkdir(exist_ok=True)
    if name != "saved":
        WRITERS[name](tmp_path / "in" / name)
    ds = built(tmp_path / "in" / name, tmp_path / "one")
    assert texts_of(ds) == TEXTS
    ds.verify()
    if name != "saved":
        assert built(tmp_path / "in", tmp_path / "two").fingerprint == ds.fingerprint, "found in its folder too"
    before = (tmp_path / "one" / "build.json").stat().st_mtime_ns
    built(tmp_path / "in" / name, tmp_path / "one")
    assert (tmp_path / "one" / "build.json").stat().st_mtime_ns == before, "nothing to do"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_empty_and_missing_texts_are_left_out_and_keys_are_chosen(tmp_path, name):
    WRITERS[name](tmp_path / name, ["one", "", None, "two"], "body")
    assert texts_of(built(tmp_path / name, tmp_path / "out", text_key="body")) == ["one", "two"]


def test_kinds_of_text_can_be_mixed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.txt").write_text("three")
    write_json_lines(tmp_path / "in" / "a.jsonl", ["one"])
    write_parquet(tmp_path / "in" / "b.parquet", ["two"], kind=pa.large_string())
    assert texts_of(built(tmp_path / "in", tmp_path / "out")) == ["one", "two", "three"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_link_is_read_by_its_own_name(tmp_path, name):
    """As in the cache of a hub, whose files are called by their digests."""
    (tmp_path / "in").mkdir()
    WRITERS[name](tmp_path / name, ["one", "two"])
    (tmp_path / name).rename(tmp_path / "0123abcd")
    (tmp_path / "in" / name).symlink_to(tmp_path / "0123abcd")
    assert texts_of(built(tmp_path / "in", tmp_path / "out")) == ["one", "two"]


def test_a_saved_file_of_arrow_can_be_named(tmp_path):
    write_saved(tmp_path / "saved")
    files = [tmp_path / "saved" / f"data-{number:05d}-of-00002.arrow" for number in (1, 0)]
    assert texts_of(built(files, tmp_path / "out")) == TEXTS[50:] + TEXTS[:50]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy"])
def test_a_source_that_is_cut_between_two_reads_is_an_error(tmp_path, monkeypatch, name):
    """Its tokens would be zeros in the new data set, and their checksums right."""
    path, tokens = tmp_path / name, np.arange(1, 3000, dtype=np.uint16)
    if name == "a.npy":
        np.save(path, tokens)
    else:
        write_json_lines(path, ["some words"] * 300)
    size = os.path.getsize(path)

    def cut_and_write(*words, **options):
        os.truncate(path, size - 1000)
        return write_shards(*words, **options)

    monkeypatch.setattr("roxxel_dist.corpus.build.write_shards", cut_and_write)
    with pytest.raises(ValueError, match=rf"{name}( changed while| was truncated while|, line \d+: not JSON)"):
        built(path, tmp_path / "out")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("bpe", 3), ("char", 2), *(pytest.param(*one, marks=pytest.mark.long) for one in (("bpe", 2), ("char", 3)))],
)
def test_workers_change_nothing(tmp_path, monkeypatch, kind, workers):
    monkeypatch.setattr("roxxel_dist.corpus.encode.BATCH_CHARACTERS", 700)
    write_json_lines(tmp_path / "a.jsonl")
    options = {"tokenizer": kind, "vocab_size": 300 if kind == "bpe" else None, "max_shard_bytes": 2000}
    built(tmp_path / "a.jsonl", tmp_path / "one", workers=1, **options)
    monkeypatch.setattr("roxxel_dist.corpus.build.PARALLEL_BYTES", 0)
    ds = built(tmp_path / "a.jsonl", tmp_path / "out", workers=workers, **options)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert [ds.tokenizer.decode(document.tolist()) for document in ds] == TEXTS


def test_a_mistake_in_a_helper_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("roxxel_dist.corpus.build.PARALLEL_BYTES", 0)
    train_tokenizer("char", ["abc"]).save(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(ValueError, match="1 characters are not in the vocabulary"):
        built(tmp_path / "a.txt", tmp_path / "out", tokenizer=tmp_path, workers=2)
    assert not (tmp_path / "out").exists()


def test_the_bar_of_a_training_is_on_stderr_alone(tmp_path, monkeypatch, capfd):
    """The library writes newlines to stdout, where a helper process answers and the caller's own output goes."""
    write_json_lines(tmp_path / "a.jsonl")
    options = {"tokenizer": "bpe", "vocab_size": 300, "progress": True}
    here = built(tmp_path / "a.jsonl", tmp_path / "one", **options, workers=1)
    monkeypatch.setattr("roxxel_dist.corpus.build.PARALLEL_BYTES", 0)
    for workers in (1, 2):
        ds = built(tmp_path / "a.jsonl", tmp_path / f"out{workers}", **options, workers=workers)
        assert ds.fingerprint == here.fingerprint
    assert capfd.readouterr().out == ""


KILLED = """
import os, sys
import roxxel_dist.corpus.build
from roxxel_dist.corpus.build import build
def hook(event, args):
    if event == "open" and args[2] & os.O_WRONLY and str(args[0]).endswith(sys.argv[4]):
        os.kill(os.getpid(), 9)
sys.addaudithook(hook)
build(sys.argv[1], sys.argv[2], vocab_size=300, max_shard_bytes=700, val_fraction=float(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("fraction", "killed_at", "finished"),
    [
        (0.0, "parts/shard_00002.rox", [2]),
        pytest.param(0.4, "train/shard_00001.rox", [1], marks=pytest.mark.long),
        (0.4, "val/shard_00001.rox", [3, 1]),
    ],
)
def test_a_killed_build_goes_on(tmp_path, capsys, fraction, killed_at, finished):
    write_json_lines(tmp_path / "a.jsonl")
    options = {"tokenizer": "bpe", "vocab_size": 300, "max_shard_bytes": 700, "val_fraction": fraction}
    command = [sys.executable, "-c", KILLED, tmp_path / "a.jsonl", tmp_path / "out", str(fraction), killed_at]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == []
    capsys.readouterr()
    ds = built(tmp_path / "a.jsonl", tmp_path / "out", **options, progress=True)
    said = capsys.readouterr().err
    assert [int(line.split()[2]) for line in said.splitlines() if line.startswith("continuing after")] == finished
    assert "training" not in said
    fresh = built(tmp_path / "a.jsonl", tmp_path / "fresh", **options)
    ds.verify()
    assert ds.fingerprint == fresh.fingerprint
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "fresh"))
    if fraction:
        assert Roxxel(tmp_path / "out/val").fingerprint == Roxxel(tmp_path / "fresh/val").fingerprint


KILLED_BETWEEN = """
import os, sys
import roxxel_dist.corpus.build
publish, left = roxxel_dist.corpus.build.publish, [int(sys.argv[3])]
def counted(*given):
    if not left[0]:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    publish(*given)
roxxel_dist.corpus.build.publish = counted
overwrite = sys.argv[4] == "overwrite"
roxxel_dist.corpus.build.build(
    sys.argv[1], sys.argv[2], vocab_size=300, max_shard_bytes=700, val_fraction=0.4, overwrite=overwrite
)
"""


@pytest.mark.parametrize(
    ("published", "earlier"),
    [
        *((0, "overwrite"), (1, "nothing")),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((0, "nothing"), (1, "overwrite"))),
    ],
)
def test_a_build_killed_between_its_halves_is_finished(tmp_path, capsys, published, earlier):
    """The half that is there is kept; the other is made without the word to replace anything of another build."""
    out = tmp_path / "out"
    options = {"tokenizer": "bpe", "vocab_size": 300, "max_shard_bytes": 700, "val_fraction": 0.4}
    write_json_lines(tmp_path / "a.jsonl", [text + "!" for text in TEXTS])
    if earlier == "overwrite":
        built(tmp_path / "a.jsonl", out, **options | {"vocab_size": 290})
    write_json_lines(tmp_path / "a.jsonl")
    command = [sys.executable, "-c", KILLED_BETWEEN, tmp_path / "a.jsonl", out, str(published), earlier]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode == -signal.SIGKILL
    fresh = built(tmp_path / "a.jsonl", tmp_path / "fresh", **options)
    if published:
        assert Roxxel(out / "val").fingerprint == Roxxel(tmp_path / "fresh/val").fingerprint
    val = {path: path.stat().st_mtime_ns for path in out.glob("val/[!.]*")}
    if earlier == "overwrite":
        with pytest.raises(ValueError, match=rf"holds another data set \({'train' if published else ''}"):
            built(tmp_path / "a.jsonl", out, **options)
    capsys.readouterr()
    ds = built(tmp_path / "a.jsonl", out, **options, overwrite=earlier == "overwrite", progress=True)
    assert "training" not in capsys.readouterr().err, "the tokenizer was there"
    if published:
        assert {path: path.stat().st_mtime_ns for path in out.glob("val/[!.]*")} == val
    assert ds.fingerprint == fresh.fingerprint
    for half in ("train", "val"):
        files, expected = (
            {path.name: path.read_bytes() for path in (top / half).iterdir()} for top in (out, tmp_path / "fresh")
        )
        assert files == expected
    assert sorted(os.listdir(out)) == ["train", "val"]


def test_a_killed_build_of_something_else_is_forgotten(tmp_path, capsys):
    write_json_lines(tmp_path / "a.jsonl")
    command = [sys.executable, "-c", KILLED, tmp_path / "a.jsonl", tmp_path / "out", "0", "shard_00002.rox"]
    subprocess.run(command, stderr=subprocess.DEVNULL, timeout=120, check=False)
    write_json_lines(tmp_path / "a.jsonl", ["other"])
    assert texts_of(built(tmp_path / "a.jsonl", tmp_path / "out", progress=True)) == ["other"]
    assert "continuing" not in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "out")) == ["build.json", "shard_00000.rox", "tokenizer.json"]


def test_held_out_documents(tmp_path, capsys):
    write_json_lines(tmp_path / "a.jsonl")
    train = built(tmp_path / "a.jsonl", tmp_path / "out", val_fraction=0.3)
    val = Roxxel(tmp_path / "out" / "val")
    assert sorted(texts_of(train) + texts_of(val)) == sorted(TEXTS)
    assert 10 < len(val) < 45
    assert train.tokenizer_fingerprint == val.tokenizer_fingerprint
    assert texts_of(val) == [text for text in TEXTS if text in set(texts_of(val))], "in their order"
    longer = built(tmp_path / "a.jsonl", tmp_path / "again", val_fraction=0.3, tokenizer="char")
    assert [longer.tokenizer.decode(document) for document in longer] == texts_of(train), "whatever the tokenizer"
    built(tmp_path / "a.jsonl", tmp_path / "out", val_fraction=0.3, progress=True)
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(ValueError, match="out holds another data set"):
        built(tmp_path / "a.jsonl", tmp_path / "out")
    whole = built(tmp_path / "a.jsonl", tmp_path / "out", overwrite=True)
    assert texts_of(whole) == TEXTS
    assert [path for half in ("train", "val") for path in (tmp_path / "out" / half).glob("*.rox")] == []
    with pytest.raises(ValueError, match=r"no document is left for val"):
        built(tmp_path / "a.jsonl", tmp_path / "none", val_fraction=1e-9)
    assert not (tmp_path / "none").exists()


def test_documents_without_end_of_text(tmp_path):
    write_json_lines(tmp_path / "a.jsonl", ["ab", "c"])
    ds = built(tmp_path / "a.jsonl", tmp_path / "out", eos=False)
    assert ds.shards[0].tokens.tolist() == [97, 98, 99]
    assert texts_of(ds) == ["ab", "c"]


# -- tokens


def test_tokens_are_converted(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, 5000)
    np.save(tmp_path / "a.npy", tokens)
    tokens.astype("u4").tofile(tmp_path / "b.bin")
    Roxxel(tmp_path / "c.rox").write([tokens[:9], tokens[9:]], separator=7, dtype="i4")
    for name, options in (("a.npy", {}), ("b.bin", {"dtype": "uint32"}), ("c.rox", {})):
        ds = built(tmp_path / name, tmp_path / name[0], vocab_size=300, **options)
        assert ds.dtype == np.uint16
        assert ds.vocab_size == 300
        assert ds.tokenizer is None
        assert np.array_equal(np.concatenate(list(ds)), tokens)
        ds.verify()
    assert [len(document) for document in ds] == [9, 4991]
    assert built(tmp_path / "a.npy", tmp_path / "same").dtype == np.int64
    with pytest.raises(ValueError, match=r"vocab_size=200 they are 0 to 199"):
        built(tmp_path / "a.npy", tmp_path / "small", vocab_size=200)
    with pytest.raises(ValueError, match=r"val_fraction=0\.5: no document is left"):
        built(tmp_path / "a.npy", tmp_path / "half", val_fraction=0.5)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a\.npy holds tokens and .*t\.txt text"):
        built([tmp_path / "t.txt", tmp_path / "a.npy"], tmp_path / "both")
    assert not (tmp_path / "small").exists()


def test_tokens_with_the_tokenizer_that_made_them(tmp_path):
    made = train_tokenizer("byte", [])
    made.save(tmp_path / "tokenizer.json")
    np.array(made.encode("hello"), "u2").tofile(tmp_path / "a.bin")
    ds = built(tmp_path / "a.bin", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert ds.tokenizer.decode(ds[0].tolist()) == "hello"
    assert ds.vocab_size == 257


# -- damage


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"a\.jsonl, line 3: not JSON"),
        (b"\xff\xfe", r"a\.jsonl, line 3: not JSON"),
        (b"[" * 100_000, r"a\.jsonl, line 3: not JSON"),
        (b"[1]", r"a\.jsonl, line 3: no 'text' \(it is no object\)"),
        (b'{"body": "a", "id": 1}', r"a\.jsonl, line 3: no 'text' \(it has body, id\)\. .*--text_key"),
        (b'{"text": 5}', r"a\.jsonl, line 3: 'text' is a int"),
        (b'{"text": "\\ud800"}', r"a\.jsonl, line 3: 'text' is not valid Unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        built(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_column_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body'; it has id, text"):
        built(tmp_path / "a.parquet", tmp_path / "out", text_key="body")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'id' is int64, not text"):
        built(tmp_path / "a.parquet", tmp_path / "out", text_key="id")


def test_saved_data_sets_that_cannot_be_read_are_named(tmp_path):
    write_saved(tmp_path / "dict" / "train")
    write_saved(tmp_path / "dict" / "test")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"dict holds several data sets \(test, train\): name one"):
        built(tmp_path / "dict", tmp_path / "out")
    one = tmp_path / "dict" / "train"
    (one / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: missing"):
        saved_data_set(one)
    (one / "state.json").write_text('{"_data_files": [], "_indices_files": [1]}')
    with pytest.raises(ValueError, match=r"state\.json: rows were selected"):
        saved_data_set(one)
    for wrong in ("[]", "{", '{"_data_files": 5}'):
        (one / "state.json").write_text(wrong)
        with pytest.raises(ValueError, match=r"state\.json: not what `datasets` saves"):
            saved_data_set(one)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"]))
def test_damage_raises_nothing_but_value_error(tmp_path, data, name):
    path = tmp_path / name
    if name == "a.arrow":
        if not path.exists():
            write_saved(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00002.arrow").rename(path)
            (tmp_path / "a.whole").write_bytes(path.read_bytes())
        path.write_bytes((tmp_path / "a.whole").read_bytes())
    else:
        WRITERS[name](path, TEXTS[:20])
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=5)))
    read = {"a.parquet": read_parquet, "a.arrow": read_arrow}.get(name, read_json_lines)
    with refusing_by_name(tmp_path):
        list(read(path, "text"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"]))
def test_random_bytes_raise_nothing_but_value_error(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    read = {"a.parquet": read_parquet, "a.arrow": read_arrow}.get(name, read_json_lines)
    with refusing_by_name(tmp_path):
        list(read(tmp_path / name, "text"))
