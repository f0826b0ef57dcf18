"""`data build`: from folders of text to a data set, the same every time, complete or not at all."""

import gzip
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from small_disks import mounted_disk

from roxxel_dist.cli import main
from roxxel_dist.cli.data import data_table
from roxxel_dist.corpus.append import append
from roxxel_dist.corpus.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import is_tokens
from roxxel_dist.data.tokenizer.tokenizer import EOS, train_tokenizer
from roxxel_dist.process.exit_codes import UserError

FILES = {
    "b.txt": "beta\nbeta beta\n" * 30,
    "a.md": "# alpha\n",
    "sub/c.py": f"print('{EOS}')\n",
    "sub/deep/d.txt": "naïve 東京\n",
}
LEFT_OUT = {
    "empty.txt": b"",
    "latin.txt": b"caf\xe9 au lait",
    ".hidden.txt": b"hidden",
    ".git/x.txt": b"hidden",
    "__pycache__/x.py": b"cache",
    "site-packages/x.py": b"installed",
    "picture.png": b"png",
}
ORDER = ["a.md", "b.txt", "sub/c.py", "sub/deep/d.txt"]


@pytest.fixture
def texts(tmp_path):
    root = tmp_path / "texts"
    for name, data in (FILES | LEFT_OUT).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("kind", "dtype"), [("bpe", "uint16"), ("byte", "uint16"), ("char", "uint8")])
def test_one_file_is_one_document(texts, tmp_path, kind, dtype):
    out = tmp_path / "out"
    ds = build(texts, out, tokenizer=kind, vocab_size=300 if kind == "bpe" else None, progress=False)
    tokenizer = ds.tokenizer
    assert tokenizer is not None
    assert [tokenizer.decode(document.tolist()) for document in ds] == [FILES[name] for name in ORDER]
    assert tokenizer.kind == kind
    assert ds.dtype == dtype
    assert ds.vocab_size == tokenizer.vocab_size
    assert ds.tokenizer_fingerprint == tokenizer.fingerprint
    tokens = ds.shards[0].tokens
    assert np.count_nonzero(tokens == tokenizer.eos_id) == 4
    assert tokens[-1] == tokenizer.eos_id
    assert sorted(os.listdir(out)) == ["build.json", "shard_00000.rox", "tokenizer.json"]
    ds.verify()


def test_the_same_texts_give_the_same_files(texts, tmp_path):
    outs = [tmp_path / name for name in ("one", "two", "three")]
    build(texts, outs[0], vocab_size=280, progress=False)
    build(str(texts), str(outs[1]), vocab_size=280, workers=1, progress=False)
    texts.rename(tmp_path / "moved")
    build([tmp_path / "moved"], outs[2], vocab_size=280, progress=False)
    assert snapshot(outs[0]) == snapshot(outs[1]) == snapshot(outs[2])


def test_a_second_build_returns_the_first(texts, tmp_path, capsys):
    out = tmp_path / "out"
    first = build(texts, out, tokenizer="byte")
    said = capsys.readouterr()
    assert said.out == ""
    assert "4 text files" in said.err
    assert "1 empty, 1 not UTF-8" in said.err
    assert "100 %" in said.err
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    second = build(texts, out, tokenizer="byte")
    assert "already holds this data set" in capsys.readouterr().err
    assert second.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    build(texts, out, tokenizer="byte", progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "build.json"])
def test_files_that_no_build_made_are_never_replaced(texts, tmp_path, file, val_fraction, overwrite):
    """As in the folder of a run, or of a model of Hugging Face."""
    out = tmp_path / "out"
    out.mkdir()
    (out / file).write_text("of the user")
    with pytest.raises(ValueError, match=f"has {file} and no shards: choose another folder"):
        build(texts, out, tokenizer="byte", progress=False, val_fraction=val_fraction, overwrite=overwrite)
    assert snapshot(out) == {file: b"of the user"}


@pytest.mark.parametrize("change", ["text", "name", "setting", "appended", "tokenizer", "damaged"])
def test_another_corpus_in_out_is_refused_and_replaced_on_request(texts, tmp_path, change):
    out, options = tmp_path / "out", {"tokenizer": "byte", "progress": False}
    first = build(texts, out, **options, max_shard_bytes=400)
    assert len(first.shards) > 1
    options["max_shard_bytes"] = 10**6 if change == "setting" else 400
    if change == "text":
        (texts / "a.md").write_text("# Alpha\n")
    elif change == "name":
        (texts / "a.md").rename(texts / "aa.md")
    elif change == "appended":
        first.write([[1, 2]], append=True, separator=256)
    elif change == "tokenizer":
        train_tokenizer("char", ["x"]).save(out / "tokenizer.json")
    elif change == "damaged":
        os.truncate(out / "shard_00001.rox", 5000)
    (out / "note").write_text("mine")
    before = snapshot(out)
    with pytest.raises(ValueError, match=r"out holds another data set \(build\.json.*overwrite=True"):
        build(texts, out, **options)
    assert snapshot(out) == before
    ds = build(texts, out, **options, overwrite=True)
    ds.verify()
    fresh = build(texts, tmp_path / "fresh", **options)
    assert ds.fingerprint == fresh.fingerprint
    assert snapshot(out) == snapshot(tmp_path / "fresh") | {"note": b"mine"}


def test_include_and_exclude(texts, tmp_path):
    def built(**options):
        ds = build(texts, tmp_path / "out", tokenizer="byte", progress=False, overwrite=True, **options)
        return [bytes(document.tolist()).decode() for document in ds]

    def names(*some):
        return [FILES[name] for name in some]

    assert built(include=["*.txt"]) == names("b.txt", "sub/deep/d.txt")
    assert built(exclude=["sub/*"]) == names("a.md", "b.txt")
    assert built(exclude=["deep"]) == names("a.md", "b.txt", "sub/c.py")
    assert built(exclude=["sub/deep/*", "*.md"]) == names("b.txt", "sub/c.py")
    assert built(include=["*.png"]) == ["png"]


def test_files_that_are_named_are_taken_whatever_they_are_called(texts, tmp_path):
    named = [texts / "picture.png", texts / "a.md", texts, texts / "b.txt"]
    ds = build(named, tmp_path / "out", tokenizer="byte", progress=False)
    everything = ["png", *(FILES[name] for name in ORDER)]
    assert [bytes(document.tolist()).decode() for document in ds] == everything, "each file once, where it came first"


def test_out_inside_the_folder_is_not_read(texts):
    first = build(texts, texts / "out", tokenizer="byte", progress=False)
    assert build(texts, texts / "out", tokenizer="byte", progress=False).fingerprint == first.fingerprint
    assert len(first) == 4


def test_a_ready_made_tokenizer(texts, tmp_path):
    made = train_tokenizer("bpe", FILES.values(), 290)
    made.save(tmp_path / "tokenizer.json")
    for number, way in enumerate([tmp_path / "tokenizer.json", str(tmp_path)]):
        ds = build(texts, tmp_path / f"out{number}", tokenizer=way, progress=False)
        assert ds.tokenizer_fingerprint == made.fingerprint
        assert ds[1].tolist() == made.encode(FILES["b.txt"])
    with pytest.raises(ValueError, match="vocab_size=999"):
        build(texts, tmp_path / "out", tokenizer=tmp_path, vocab_size=999, progress=False)


def test_what_no_pattern_takes_is_told(texts, tmp_path, capsys):
    """A file that is named is not counted among those that are left out."""
    for name in ("a.log", "sub/b.log", "notes", "x.a1", "x.a2", "x.a3", ".c.log", "excluded/d.log"):
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_text("left out")
    named = [texts, texts / "x.a3"]
    build(named, tmp_path / "out", tokenizer="byte", exclude=["excluded", "*.a2"])
    said = capsys.readouterr().err
    told = (
        "left out: 1 empty, 1 not UTF-8, 5 of other kinds: .log, .a1, .png, no ending, 3 hidden: .c.log, .git, "
        ".hidden.txt, 2 of installed packages or caches: __pycache__, site-packages, 2 excluded: excluded, x.a2)"
    )
    assert f"5 text files, 503 B ({told}\n" in said
    build(named, tmp_path / "out", tokenizer="byte", include=["*.log"], overwrite=True)
    assert "10 of other kinds: .txt, .a1, .a2, .md, ..., 3 hidden" in capsys.readouterr().err


@pytest.mark.parametrize("fraction", [0, 0.5])
@pytest.mark.parametrize("inputs", ["text", "tokens"])
def test_a_folder_is_not_both_read_and_filled(texts, tmp_path, inputs, fraction):
    """It would be read with the tokenizer and the record of the build before; nothing is touched."""
    if inputs == "tokens":
        texts = tmp_path / "tokens"
        Roxxel(f"{texts}/").write([[1, 2], [3]])
    texts.rename(tmp_path / "train")
    texts, before = tmp_path / "train", sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(texts)
    out = tmp_path if fraction else tmp_path / "link"
    with pytest.raises(ValueError, match=r"train would be read and filled by one build, .* such as .*train/tokens"):
        build(texts, out, tokenizer="byte", val_fraction=fraction, overwrite=True, progress=False)
    assert sorted(set(tmp_path.rglob("*")) - {tmp_path / "link"}) == before


def test_out_around_the_folder_that_is_read(texts, tmp_path):
    """Nothing is written into the folder, so the next build finds the same."""
    for _ in range(2):
        assert len(build(texts, tmp_path, tokenizer="byte", progress=False)) == 4
    assert sorted(os.listdir(tmp_path)) == ["build.json", "shard_00000.rox", "texts", "tokenizer.json"]


def test_a_long_document_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("roxxel_dist.corpus.documents.PIECE_CHARACTERS", 300)
    monkeypatch.setattr("roxxel_dist.corpus.encode.BATCH_CHARACTERS", 1000)
    texts = ["".join(f"line {number} of text {text}\n" for number in range(300)) for text in "abc"]
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    ds = build(tmp_path, tmp_path / "out", vocab_size=300, progress=False)
    assert ds.tokenizer is not None
    assert [document.tolist() for document in ds] == [ds.tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"paths": "nowhere"}, FileNotFoundError, "nowhere: no such file or folder"),
        ({"include": ["*.xyz"]}, ValueError, "no file there matches"),
        ({"include": ["empty.txt", "latin.txt"]}, ValueError, "1 file is empty, 1 file is not UTF-8 text"),
        ({"tokenizer": "nothing.json"}, FileNotFoundError, "tokenizer=nothing.json: neither a kind"),
        ({"tokenizer": "bpe", "vocab_size": 100}, ValueError, "vocab_size=100"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes=0"),
        ({"workers": 0}, ValueError, "workers=0"),
        ({"out": "texts/a.md"}, ValueError, "is a file"),
        ({"out": "texts/a.md/out"}, ValueError, "cannot be written"),
        ({"out": "/proc/out"}, ValueError, "the folder /proc/out cannot be written"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(texts, tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    given = {"paths": "texts", "out": "new/out", "tokenizer": "byte"} | options
    with pytest.raises(error, match=message):
        build(given.pop("paths"), given.pop("out"), **given, progress=False)
    assert os.listdir(tmp_path) == ["texts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "vocab_size=256: a bpe tokenizer has at least 257 ids"),
        ({"tokenizer": "byte", "vocab_size": 10}, "vocab_size=10: a byte tokenizer has at least 257 ids"),
        ({"out": "/proc/out"}, "the folder /proc/out cannot be written"),
        ({"out": "texts/a.md"}, "is a file"),
        ({"out": "model"}, "model has tokenizer.json and no shards"),
    ],
)
def test_what_no_build_can_do_is_refused_before_the_texts_are_read(
    texts, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("of the user")
    with pytest.raises(UserError, match=message):
        build("texts", **{"out": "new/out", **options})
    assert capsys.readouterr() == ("", "")
    assert sorted(os.listdir(tmp_path)) == ["model", "texts"]
    assert os.listdir(tmp_path / "model") == ["tokenizer.json"]


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ({"max_shard_bytes": 400}, False), ({"text_key": "body"}, False), ({"vocab_size": 300}, False),
        ("longer", False), ("shorter", False), ("one less", False), ("other letters", True), ("one of latin 1", True),
    ],
)  # fmt: skip
def test_another_data_set_in_out_is_refused_before_the_texts_are_read(tmp_path, capsys, change, is_read, val_fraction):
    """As far as settings and the sizes of files say it: what has the same ones is read, and compared."""
    texts, options = tmp_path / "in", {"tokenizer": "byte", "val_fraction": val_fraction}
    texts.mkdir()
    last = texts / "z.txt"
    last.write_text("the last one")
    for name in "abcdef":
        (texts / f"{name}.txt").write_text(f"{name} " * 70)
    build(texts, tmp_path / "out", **options, progress=False)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    if isinstance(change, dict):
        options |= change
    elif change == "one less":
        last.unlink()
    else:
        name = "zz.txt" if change == "one of latin 1" else "z.txt"
        text = {"longer": "the last one!", "shorter": "the", "other letters": "THE LAST ONE"}.get(change, "caf\xe9")
        (texts / name).write_bytes(text.encode("latin-1" if change == "one of latin 1" else "utf-8"))
    is_same = change == "one of latin 1"  # it is not read: the same data set
    with nullcontext() if is_same else pytest.raises(ValueError, match=r"out holds another data set"):
        build(texts, tmp_path / "out", **options)
    assert ("text files" in capsys.readouterr().err) == is_read
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")} == before


# Gets a signal when it opens a certain file to write.
BUILD = """
import os, sys
from roxxel_dist.corpus.build import build
texts, out, name, number = sys.argv[1:]
def hook(event, args):
    if event == "open" and args[2] & os.O_WRONLY and os.path.basename(args[0]).startswith(name):
        os.kill(os.getpid(), int(number))
sys.addaudithook(hook)
build(texts, out, tokenizer="byte", max_shard_bytes=600)
"""


def moments():
    """Each file, and each signal; a few of them are quick enough for every time."""
    quick = [("shard_00001.rox", signal.SIGINT), (".build.json", signal.SIGKILL), (".commit.json", signal.SIGKILL)]
    for name in ("shard_00001.rox", ".tokenizer.json", ".build.json", ".commit.json"):
        for number in (signal.SIGINT, signal.SIGKILL):
            yield pytest.param(name, number, marks=() if (name, number) in quick else pytest.mark.long)


@pytest.mark.parametrize(("name", "number"), list(moments()))
def test_an_interrupted_build_leaves_no_data_set_and_can_be_repeated(texts, tmp_path, name, number):
    out = tmp_path / "out"
    command = [sys.executable, "-c", BUILD, texts, out, name, str(int(number))]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert number == signal.SIGKILL or "KeyboardInterrupt" in ended.stderr
    assert out.exists() == (number == signal.SIGKILL)
    assert [path.name for path in out.glob("*") if not path.name.startswith(".")] == []
    ds = build(texts, out, tokenizer="byte", max_shard_bytes=600, progress=False)
    assert len(ds) == 4
    assert len(ds.shards) == 3
    assert len(os.listdir(out)) == 5, "three shards, the tokenizer, the record, and nothing of the first attempt"


def test_every_file_is_on_the_disk_before_the_build_is_committed(texts, tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    monkeypatch.setattr(os, "fsync", recorded)
    build(texts, tmp_path / "out", tokenizer="byte", max_shard_bytes=600, progress=False)
    commit = next(at for at, (_, name) in enumerate(synced) if name.startswith(".commit.json"))
    before = {number for number, _ in synced[:commit]}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.stat().st_ino not in before} == set()
    assert synced[commit - 1][1] == ".build.writing", "and the names of the files"
    assert "out" in [name for _, name in synced[commit:]]


def test_info_is_a_table_for_people(texts, tmp_path):
    ds = build(texts, tmp_path / "out", vocab_size=300, progress=False)
    lines = dict(line.split(None, 1) for line in data_table(ds).splitlines())
    assert lines["shards"].startswith("1 ")
    assert lines["tokens"] == f"{ds.num_tokens:,}"
    assert lines["documents"] == f"4 (mean {ds.num_tokens / 4:.1f} tokens)"
    assert lines["dtype"] == "uint16"
    assert lines["vocabulary"] == f"{ds.vocab_size} ids"
    assert lines["tokenizer"] == f"bpe, {ds.tokenizer_fingerprint}"
    assert lines["bytes"] == f"{os.path.getsize(tmp_path / 'out/shard_00000.rox'):,} on disk"
    assert lines["begins"] == repr(FILES["a.md"])


def test_info_without_a_tokenizer(tmp_path):
    ds = Roxxel(tmp_path / "a.rox")
    ds.write(["naïve " * 100])
    assert f"begins       {('naïve ' * 100)[:200]!r}" in data_table(ds)
    ds.write([np.arange(99, dtype=np.int32)])
    assert "begins       0 1 2 3 " in data_table(ds)
    assert "(no document)" in data_table(ds.split(0)[1])


def test_the_wrong_tokenizer_beside_the_shards_is_noticed(texts, tmp_path):
    build(texts, tmp_path / "out", tokenizer="byte", progress=False)
    train_tokenizer("char", ["abc"]).save(tmp_path / "out" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json: its fingerprint is"):
        _ = Roxxel(tmp_path / "out").tokenizer


def test_a_byte_order_mark_is_no_token(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\n')
    for name in ("a.txt", "b.jsonl"):
        with build(tmp_path / name, tmp_path / f"out-{name}", tokenizer="char", progress=False) as data:
            assert data.num_tokens == 4
            assert data.tokenizer.vocab_size == 4


def test_compressed_text_is_named(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text"))
    with pytest.raises(ValueError, match=r"a\.txt\.gz: compressed text is not read: unpack it first"):
        build(tmp_path / "a.txt.gz", tmp_path / "out", progress=False)


def test_one_file_and_a_vocabulary_that_the_text_does_not_yield(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three")
    with build(tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe", vocab_size=4000) as data:
        size = data.tokenizer.vocab_size
    said = capsys.readouterr().err
    assert "1 text file, " in said
    assert f"vocab_size=4000: the text yields {size} ids, and no more" in said


def test_a_full_disk_is_named_with_the_folder(tmp_path):
    (tmp_path / "text.txt").write_text("some words of a text\n" * 20_000)
    with mounted_disk(tmp_path / "disk", "100k") as disk:
        with pytest.raises(OSError, match=r"No space left on device: '.*/disk/data'"):
            build(tmp_path / "text.txt", disk / "data", tokenizer="byte", progress=False)
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("shard", "record", "message"),
    [
        (None, None, "build.json of a data set and no shard: copy its .rox files again, or"),
        ("shard_00000.rox.part", None, r"again \(shard_00000.rox.part is an unfinished copy\)"),
        (".shard_00000.rox.Ab3d", "", r"again \(.shard_00000.rox.Ab3d is an unfinished copy\)"),
        (None, "", "build.json of a data set and no shard"),
        ("shard_00000.rox.md", '{"name": "of another program"}', None),
    ],
)
def test_half_a_copy_of_a_data_set_is_no_text(texts, tmp_path, capsys, shard, record, message):
    """Neither alone, nor within a folder of texts."""
    out = texts / "sub" / "set"
    build(texts, out, tokenizer="byte", progress=False).close()
    (out / "shard_00000.rox").rename(out / shard) if shard else (out / "shard_00000.rox").unlink()
    if record is not None:
        (out / "build.json").write_text(record)
    assert is_tokens(out) is (message is not None)
    if message is not None:
        for words in (["data", "info"], ["train", "--data_path"], ["data", "build", "--out", str(tmp_path / "n")]):
            assert main([*words, str(out)]) == 2
            assert re.search(f"set: it has .*{message}", capsys.readouterr().err)
        with build(texts, tmp_path / "all", tokenizer="byte", progress=False) as dataset:
            assert dataset.documents == len(ORDER)


@pytest.mark.parametrize("added", ["", "build", "write"])
def test_a_missing_last_shard_is_noticed(tmp_path, capsys, added):
    """Each shard follows the one before it, but none says that another follows."""
    data = tmp_path / "data"
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 100)
    build([tmp_path / f"{i}.txt" for i in range(5)], data, tokenizer="byte", max_shard_bytes=800, progress=False)
    if added == "build":
        append(tmp_path / "5.txt", data, progress=False)
    elif added == "write":
        with Roxxel(data) as dataset:
            dataset.write([np.ones(9, np.uint16)], append=True)
    with Roxxel(data) as dataset:
        paths, whole = [shard.path for shard in dataset.shards], dataset.fingerprint
    away = paths[-2 if added == "write" else -1 :]
    for path in away:
        path.rename(f"{path}.part")
    built = whole if added != "write" else ".*"
    message = f"fingerprint {built}, and the .* shards here .* is missing .{away[0].name}.part is an unfinished"
    with pytest.raises(UserError, match=message):
        Roxxel(data)
    with pytest.raises(UserError, match=message):
        append(tmp_path / "5.txt", data, progress=False)
    assert main(["data", "verify", str(data)]) == 1
    assert main(["train", "--data_path", str(data), "--run_dir", str(tmp_path / "run")]) == 2
    assert re.search(message, capsys.readouterr().err)
    with Roxxel(sorted(data.glob("*.rox"))) as named:
        assert named.num_tokens, "shards that are named are a data set"
