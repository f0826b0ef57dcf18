"""What of a corpus is read, and what is counted or refused: nothing is lost without a word."""

import json
import os
import re
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roxxel_dist.corpus.build import build
from roxxel_dist.corpus.documents import TEXT_FILES
from roxxel_dist.corpus.find import find_corpus
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import command_line


def corpus(folder, *more, include=TEXT_FILES, exclude=(), out="out"):
    return find_corpus([folder, *more], include, exclude, folder.parent / out)


def made(tmp_path, *names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "c"


def names_of(found):
    return [file.name for file in found.files]


def linked(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


LINKS = {
    "a folder outside": ({"c/linked": "../real"}, ["a.txt", "linked/r.txt", "linked/sub/s.txt"], []),
    "the same, twice": (
        {"c/l1": "../real", "c/l2": "../real"},
        ["a.txt", "l1/r.txt", "l1/sub/s.txt"],
        ["1 links to a folder that is read: l2"],
    ),
    "a folder inside, before its name": (
        {"c/aa": "b", "c/b/t.txt": None},
        ["a.txt", "b/t.txt"],
        ["1 links to a folder that is read: aa"],
    ),
    "itself": ({"c/me": "."}, ["a.txt"], ["1 links to a folder around it: me"]),
    "above": ({"c/up": ".."}, ["a.txt"], ["1 links to a folder around it: up"]),
    "a circle outside": (
        {"c/linked": "../real", "real/back": "../c", "real/sub/up": ".."},
        ["a.txt", "linked/r.txt", "linked/sub/s.txt"],
        ["1 links to a folder that is read: back", "1 links to a folder around it: up"],
    ),
    "links to links": ({"c/l1": "l2", "c/l2": "../real"}, ["a.txt", "l1/r.txt", "l1/sub/s.txt"], ["l2"]),
    "a file twice": ({"c/b.txt": "a.txt"}, ["a.txt"], ["1 second names of a file: b.txt"]),
    "a file outside twice": (
        {"c/x/f.txt": "../../real/r.txt", "c/y/g.txt": "../../real/r.txt"},
        ["a.txt", "x/f.txt"],
        ["1 second names of a file: g.txt"],
    ),
    "a hidden folder": ({"c/shown": ".git", "c/.git/h.txt": None}, ["a.txt", "shown/h.txt"], ["1 hidden: .git"]),
    "a broken one of another kind": ({"c/lib.so": "/nowhere"}, ["a.txt"], ["1 broken links: lib.so"]),
    "a broken one that was a folder": ({"c/texts": "/nowhere/texts"}, ["a.txt"], ["1 broken links: texts"]),
    "into the data set": ({"c/built": "../out", "out/o.txt": None}, ["a.txt"], []),
}


@pytest.mark.parametrize("name", LINKS)
def test_links(tmp_path, name):
    links, read, left_out = LINKS[name]
    folder = made(tmp_path, "c/a.txt", "real/r.txt", "real/sub/s.txt")
    for link, target in links.items():
        made(tmp_path, link) if target is None else linked(tmp_path / link, target)
    found = corpus(folder)
    assert names_of(found) == read
    assert len(found.left_out) == len(left_out)
    assert all(one in str(found) for one in left_out), str(found)


@pytest.mark.parametrize(
    ("links", "shown"),
    [
        (["c/gone.txt"], "gone.txt is a link to /nowhere, which is not there: fetch"),
        (["c/gone.txt", "c/sub/x.jsonl"], "gone.txt is a link to /nowhere, which is not there (2 links are broken)"),
        (["c/sub/loop.md"], "loop.md is a link to loop.md, which leads back to itself: fetch"),
    ],
)
def test_a_broken_link_to_a_text_is_an_error(tmp_path, links, shown):
    folder = made(tmp_path, "c/a.txt")
    for link in links:
        linked(tmp_path / link, "loop.md" if "loop" in link else "/nowhere")
    with pytest.raises(UserError, match=re.escape(shown)) as error:
        corpus(folder)
    first = os.path.basename(links[0])
    assert f"exclude={first}" in str(error.value)
    with command_line(), pytest.raises(UserError, match=f"--exclude {first}"):
        corpus(folder)
    assert names_of(corpus(folder, exclude=["gone*", "loop*", "x.jsonl"])) == ["a.txt"]


def test_what_is_no_file(tmp_path):
    folder = made(tmp_path, "c/a.txt")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(folder)  # an address is short
        listening.bind("s.txt")
        os.chdir(here)
    assert corpus(folder).left_out == ("2 that are no files (pipes, devices): pipe.txt, s.txt",)
    with pytest.raises(UserError, match=r"pipe\.txt is a pipe or a device"):
        corpus(folder / "pipe.txt")


def test_letters_of_endings(tmp_path):
    """.TXT and .JSONL are what they are in small letters; patterns of the user's are as written."""
    folder = made(tmp_path, "c/A.TXT", "c/b.Md", "c/c.R")
    (folder / "d.JSONL").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}))
    found = corpus(folder)
    assert [(file.name, file.kind) for file in found.files] == [
        ("A.TXT", "text"), ("b.Md", "text"), ("c.R", "text"), ("d.JSONL", "jsonl"),
    ]  # fmt: skip
    assert names_of(corpus(folder, include=["*.md", "*.TXT"])) == ["A.TXT"]
    data = build(folder / "d.JSONL", tmp_path / "out", tokenizer="byte", progress=False)
    assert [bytes(one.tolist()).decode() for one in data] == ["one", "two"]


def test_equal_contents_are_read_and_counted(tmp_path):
    folder = made(tmp_path, "c/a.txt")
    for name in ("b.txt", "z.md"):
        (folder / name).write_text((folder / "a.txt").read_text())
    os.link(folder / "a.txt", folder / "hard.txt")
    found = corpus(folder)
    assert len(found.files) == 4
    assert "; 3 with the content of another file, read again: b.txt, hard.txt, z.md" in str(found)


def test_one_folder_or_file_given_twice_is_read_once(tmp_path):
    folder = made(tmp_path, "c/a.txt", "c/sub/b.txt")
    found = corpus(folder, folder, folder / "a.txt", folder / "sub")
    assert names_of(found) == ["a.txt", "sub/b.txt"]
    assert found.left_out == ("4 second names of a file: a.txt, b.txt",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: (c / "empty").mkdir(), "there is no file to read. Name"),
        (lambda c: made(c.parent, "c/.a.txt", "c/.b/x"), "there is no file to read (left out: 2 hidden: .a.txt, .b)"),
        (lambda c: made(c.parent, "c/__pycache__/a.py"), "(left out: 1 of installed packages or caches: __pycache__)"),
        (lambda c: linked(c / "up", ".."), "(left out: 1 links to a folder around it: up)"),
        (lambda c: linked(c / "texts", "/nowhere"), "(left out: 1 broken links: texts)"),
        (lambda c: os.mkfifo(c / "a.txt"), "(left out: 1 that are no files (pipes, devices): a.txt)"),
        (lambda c: made(c.parent, "c/a.log"), "no file there matches the patterns (left out: 1 of other kinds: .log)"),
        (lambda c: (c / "a.txt").touch(), "nothing to build from: 1 file is empty: name"),
    ],
)
def test_the_reason_where_nothing_is_read(tmp_path, make, message):
    (tmp_path / "c").mkdir()
    make(tmp_path / "c")
    with pytest.raises(UserError, match=re.escape(message)):
        corpus(tmp_path / "c")


@pytest.mark.parametrize(
    ("names", "read", "left_out"),
    [
        pytest.param(
            ["t/shard_00000.rox", "t/tokenizer.json", "t/build.json", "t/tokenizer_config.json", "t/notes.json"],
            ["a.txt", "t/notes.json"],
            ("4 of data sets, which are built alone: build.json, shard_00000.rox, tokenizer.json, ",),
            id="ours",
        ),
        pytest.param(
            ["d/state.json", "d/dataset_info.json", "d/data-00000-of-00001.arrow", "d/more.txt"],
            ["a.txt", "d/more.txt"],
            ("3 of data sets, which are built alone: data-00000-of-00001.arrow, dataset_info.json, state.json",),
            id="of datasets",
        ),
        pytest.param(["d/dataset_dict.json"], ["a.txt"], ("1 of data sets, ",), id="several of datasets"),
        pytest.param(
            ["m/tokenizer.json", "m/state.json"], ["a.txt", "m/state.json", "m/tokenizer.json"], (), id="none"
        ),
        pytest.param(["x.arrow"], ["a.txt"], ("1 of other kinds: .arrow",), id="arrow alone"),
    ],
)
def test_a_data_set_in_a_corpus_is_no_text(tmp_path, names, read, left_out):
    """Its tokenizer alone would be thousands of words of JSON."""
    found = corpus(made(tmp_path, "c/a.txt", *(f"c/{name}" for name in names)))
    assert names_of(found) == read
    assert len(found.left_out) == len(left_out)
    assert all(one.startswith(wanted) for one, wanted in zip(found.left_out, left_out, strict=True))


def test_what_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    """As a file that cannot be read is; a build would go on without the folder."""
    folder, listdir = made(tmp_path, "c/a.txt", "c/sub/b.txt"), os.listdir

    def refusing(path):
        if os.path.basename(path) == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(PermissionError, match="sub"):
        corpus(folder)
    assert names_of(corpus(folder, exclude=["sub"])) == ["a.txt"]


def test_a_folder_deeper_than_pythons_stack(tmp_path):
    deep = tmp_path / "c"
    for _ in range(150):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "a.txt").write_text("deep")
    assert len(corpus(tmp_path / "c").files) == 1


# -- documents


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_empty_texts_are_counted(tmp_path, capsys, kind, val_fraction):
    texts = ["one", "", None, "two", "three", "four", "", "five"]
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    build(tmp_path / f"a.{kind}", tmp_path / "out", tokenizer="byte", val_fraction=val_fraction)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "left out: 3 empty or missing texts"
    assert sum("empty" in line for line in said) == 1


def test_a_byte_order_mark_alone_is_an_empty_text(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "b.txt").write_text("b")
    data = build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", tokenizer="byte")
    assert len(data) == 1
    assert "left out: 1 empty or missing texts" in capsys.readouterr().err


def test_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: 2 columns are called 'text'"):
        build(tmp_path / "a.parquet", tmp_path / "out", progress=False)


# -- token files


@pytest.mark.parametrize("ending", [".npy", ".bin", ".rox", ".idx"])
@pytest.mark.parametrize("how", ["folder", "pattern", "prefix"])
def test_a_broken_link_to_tokens_is_an_error(tmp_path, ending, how):
    """Between two whole files no chain would notice."""
    kept = ".bin" if ending == ".idx" else ending
    for name in ("a", "c"):
        if kept == ".rox":
            continue
        np.save(tmp_path / f"{name}.npy", np.arange(9, dtype=np.uint16)) if kept == ".npy" else np.arange(
            9, dtype=np.uint16
        ).tofile(tmp_path / f"{name}.bin")
    linked(tmp_path / f"b{ending}", "/nowhere")
    path = {"folder": tmp_path, "pattern": tmp_path / f"*{ending}", "prefix": tmp_path / "b"}[how]
    with pytest.raises(UserError, match=rf"b\{ending} is a link to /nowhere, which is not there"):
        Roxxel(path if how == "folder" else str(path))


def test_what_is_beside_tokens_is_counted(tmp_path, capsys):
    folder = tmp_path / "tokens"
    folder.mkdir()
    Roxxel(folder).write([[1, 2, 3]])
    for name in ("tokenizer_config.json", "b.npy", ".hidden.npy"):
        (folder / name).write_bytes(b"x")
    (folder / "more").mkdir()
    build(folder, tmp_path / "out").close()
    assert "left out: 2 files or folders beside these: b.npy, more\n" in capsys.readouterr().err
    (folder / "b.npy").unlink()
    (folder / "more").rmdir()
    build(folder, tmp_path / "again").close()
    assert "left out" not in capsys.readouterr().err
