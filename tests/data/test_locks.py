"""The lock of a data folder: one writer at a time, from its first look to its last change; readers take none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roxxel_dist import Roxxel
from roxxel_dist.corpus.append import append
from roxxel_dist.corpus.build import build
from roxxel_dist.data.files.writer import BUILD_FILE
from roxxel_dist.process.file_lock import LOCK, FolderIsHeld, release_lock, take_lock

WRITERS = {
    "write": lambda top: Roxxel(top / "set").write([np.arange(5, dtype="<u2")], separator=256),
    "write append": lambda top: Roxxel(top / "set").write([np.arange(5, dtype="<u2")], separator=256, append=True),
    "write a pattern": lambda top: Roxxel(top / "set" / "shard_*.rox").write([b"x"]),
    "write a prefix": lambda top: Roxxel(top / "set" / "more").write([b"x"]),
    "append": lambda top: append(top / "more.txt", top / "set", progress=False),
    "build": lambda top: build(top / "more.txt", top / "set", tokenizer="byte", overwrite=True, progress=False),
    "build splits": lambda top: build(
        [top / f"{i}.txt" for i in range(20)], top / "set", tokenizer="byte", overwrite=True, val_fraction=0.5,
        progress=False,
    ),
}  # fmt: skip
# A writer whose first document takes as long as the test wants: it stands in the middle of its work.
HOLDER = """
import sys
from pathlib import Path
from roxxel_dist import Roxxel
import numpy as np
def documents():
    print("begun", flush=True)
    sys.stdin.readline()
    yield np.arange(7, dtype="<u2")
Roxxel(sys.argv[1]).write(documents(), separator=256, append=True)
"""


@pytest.fixture
def top(tmp_path):
    (tmp_path / "old.txt").write_text("old text\n" * 20)
    (tmp_path / "more.txt").write_text("more text\n" * 10)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    build(tmp_path / "old.txt", tmp_path / "set", tokenizer="byte", progress=False).close()
    return tmp_path


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK and path.is_file()}


def test_a_second_writer_is_refused_whatever_the_two_are(top):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(top / "set")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "begun\n"
        before = files(top / "set")
        said = rf"pid {first.pid} .* is writing a data set in .*set: wait for its end"
        for second in WRITERS.values():
            with pytest.raises(FolderIsHeld, match=said):
                second(top)
        assert files(top / "set") == before
        with Roxxel(top / "set") as data:  # a reader needs no lock
            assert data.num_tokens == 181
        first.communicate("\n")
    assert first.returncode == 0
    assert Roxxel(top / "set").num_tokens == 189
    WRITERS["write"](top)  # the lock is free again
    assert not (top / "set" / LOCK).exists()


@pytest.mark.parametrize("first", WRITERS)
def test_every_writer_takes_the_lock_before_it_looks(top, first):
    lock = take_lock(top / "set" / LOCK)
    before = files(top / "set")
    with pytest.raises(FolderIsHeld, match=r"set: wait for its end"):
        WRITERS[first](top)
    assert files(top / "set") == before
    release_lock(lock)


def test_an_append_within_the_documents_of_a_write_is_refused(top):
    def documents():
        yield np.arange(100, dtype="<u2")
        with pytest.raises(FolderIsHeld, match="this process is writing a data set"):
            append(top / "more.txt", top / "set", progress=False)
        yield np.arange(50, dtype="<u2")

    count = Roxxel(top / "set").num_tokens
    Roxxel(top / "set").write(documents(), separator=256, append=True)
    assert Roxxel(top / "set").num_tokens == count + 152
    with append(top / "more.txt", top / "set", progress=False) as data:
        assert data.num_tokens == count + 152 + 101
        data.verify()


def test_a_killed_writer_frees_the_lock(top):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(top / "set")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "begun\n"
        os.kill(first.pid, signal.SIGKILL)
    with append(top / "more.txt", top / "set", progress=False) as data:
        assert data.num_tokens == 181 + 101
    assert sorted(os.listdir(top / "set")) == ["build.json", "shard_00000.rox", "shard_00001.rox", "tokenizer.json"]


def test_files_of_one_folder_are_made_at_the_same_time(tmp_path):
    def documents():
        Roxxel(tmp_path / "b.rox").write([b"b"])
        yield b"a"

    Roxxel(tmp_path / "a.rox").write(documents())
    assert sorted(os.listdir(tmp_path)) == ["a.rox", "b.rox"]


def test_a_file_takes_its_place_under_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("roxxel_dist.data.files.writer.FINISH_LIMIT_S", 0.2)
    lock = take_lock(tmp_path / LOCK)
    with pytest.raises(FolderIsHeld):
        Roxxel(tmp_path / "a.rox").write([b"a"])
    release_lock(lock)
    assert os.listdir(tmp_path) == [LOCK]


def test_a_rewritten_folder_forgets_what_was_appended(top):
    append(top / "more.txt", top / "set", progress=False).close()
    Roxxel(top / "set").write([np.arange(3, dtype="<u2")], separator=256)
    assert not (top / "set" / BUILD_FILE).exists(), "it says that more.txt is in shards that are no more"
    with pytest.raises(ValueError, match=r"has no build\.json of `data build`"):
        append(top / "more.txt", top / "set", progress=False)


def test_a_built_set_that_nobody_may_write_is_found_built(top):
    with build(Path(top / "old.txt"), top / "set", tokenizer="byte", progress=False):
        assert LOCK not in os.listdir(top / "set"), "who only looks changes nothing"
