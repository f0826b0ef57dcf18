"""Several files appear together or not at all, wherever their writer is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roxxel_dist.corpus.build import build
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.atomic_dir import finish_interrupted, publish, staging_folder
from roxxel_dist.process.durable import make_folder, write_file
from roxxel_dist.process.file_lock import take_lock
from roxxel_dist.settings.config import Config

OLD = [b"old-one", b"old-two", b"old-three"]
NEW = [b"new-1", b"new-2"]

# One process after another, each a fork of this one, gets a signal just before its n-th change of a folder.
WRITERS = """
import os, signal, sys
from roxxel_dist.data.dataset import Roxxel
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where who has started the tests ignores it
top, mode, number, old = sys.argv[1], sys.argv[2], int(sys.argv[3]), [text.encode() for text in sys.argv[4:]]
def write(data, left):
    def hook(event, args):
        nonlocal left
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)
    sys.addaudithook(hook)
    data.write([b"new-1", b"new-2"], max_shard_bytes=6, append=mode == "append")
for left in range(1, 40):
    data = Roxxel(f"{top}/{left}/a_*.rox")
    if mode != "new":
        data.write(old, max_shard_bytes=8)
    if not (child := os.fork()):
        try:
            write(data, left)
        except KeyboardInterrupt:
            os._exit(130)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code)
    if code == 0:
        break
"""


def write_and_interrupt(top, mode, number=signal.SIGKILL):
    """(number, exit code) of writers in `top/1`, `top/2`, ...: each gets a signal one change later, the last none."""
    command = [sys.executable, "-c", WRITERS, str(top), mode, str(int(number)), *(text.decode() for text in OLD)]
    said = subprocess.run(command, timeout=120, check=True, stdout=subprocess.PIPE, text=True).stdout
    return list(enumerate(map(int, said.split()), 1))


def contents(pattern):
    return [document.tobytes() for document in Roxxel(pattern)]


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_a_writer_killed_anywhere_leaves_the_old_or_the_new(tmp_path, mode):
    after = OLD + NEW if mode == "append" else NEW
    seen = []
    for left, code in write_and_interrupt(tmp_path, mode):
        folder = tmp_path / str(left)
        pattern = folder / "a_*.rox"
        seen.append(contents(pattern))
        assert seen[-1] in (OLD, after)
        Roxxel(pattern).verify()
        Roxxel(pattern).write([b"again"])
        assert os.listdir(folder) == ["a_00000.rox"], "nothing of a killed writer stays behind"
        assert code in (0, -signal.SIGKILL)
    assert code == 0
    assert seen == sorted(seen, key=[OLD, after].index), "once it is new it stays new"
    assert seen.count(OLD) >= 2
    assert seen.count(after) >= 4


def test_ctrl_c_anywhere_leaves_the_old_or_the_new_and_no_rest(tmp_path):
    found = []
    for left, code in write_and_interrupt(tmp_path, "replace", signal.SIGINT):
        folder = tmp_path / str(left)
        shards = 3 if (old := contents(folder) == OLD) else 2
        assert sorted(os.listdir(folder)) == [f"a_{number:05d}.rox" for number in range(shards)]
        assert old or contents(folder) == NEW
        assert code in (0, 130)
        found.append(old)
    assert code == 0
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


def test_a_first_write_killed_anywhere_leaves_nothing_or_all(tmp_path):
    found = set()
    for left, code in write_and_interrupt(tmp_path, "new"):
        pattern = tmp_path / str(left) / "a_*.rox"
        ds = Roxxel(pattern)
        there = "no file yet" not in repr(ds)
        found.add(there)
        assert not there or contents(pattern) == NEW
        assert code in (0, -signal.SIGKILL)
    assert code == 0
    assert found == {False, True}


def test_a_second_writer_is_refused(tmp_path):
    with staging_folder(tmp_path, "x") as staged:
        (staged / "kept").write_bytes(b"1")
        with (
            pytest.raises(ValueError, match=rf"pid {os.getpid()} on host .* is writing x"),
            staging_folder(tmp_path, "x"),
        ):
            pass
        with staging_folder(tmp_path, "y"):
            pass
        assert (staged / "kept").read_bytes() == b"1"
    assert os.listdir(tmp_path) == []


def test_what_is_not_published_is_gone(tmp_path):
    def write():
        with staging_folder(tmp_path / "a" / "b", "x") as staged:
            (staged / "f").write_bytes(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []


def test_publishing_replaces_and_removes(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"old")
    with staging_folder(tmp_path, "x") as staged:
        for name in ("a", "d"):
            (staged / name).write_bytes(b"new")
        publish(staged, ["a", "b"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new", "c": b"old", "d": b"new"}


def test_a_writer_that_does_not_get_on_is_waited_for_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("roxxel_dist.data.files.atomic_dir.FINISH_LIMIT_S", 0.2)
    staged = tmp_path / ".x.writing"
    staged.mkdir()
    (staged / "commit.json").write_text('{"remove": []}')
    lock = take_lock(tmp_path / ".x.lock")
    with pytest.raises(ValueError, match=rf"pid {os.getpid()} on host .* has held \.x\.writing"):
        finish_interrupted(tmp_path)
    os.close(lock)
    finish_interrupted(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_whole_or_not(tmp_path):
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "folder", b"x")
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"]


@pytest.fixture
def disk(monkeypatch):
    """What is brought to the disk and what is renamed, in order: ("fsync" | "rename", the name at that time)."""
    done, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(descriptor):
        done.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def spy_replace(source, target):
        done.append(("rename", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    monkeypatch.setattr(Path, "replace", spy_replace)
    return done


def test_a_config_is_on_the_disk_before_its_name_and_the_name_with_its_folder(tmp_path, disk):
    folder = tmp_path / "runs" / "one"
    make_folder(folder)
    assert disk == [("fsync", "runs"), ("fsync", tmp_path.name)], "the names of new folders are brought to the disk"
    disk.clear()
    Config().save_yaml(folder / "config.yaml")
    (kind, temporary), *rest = disk
    assert kind == "fsync"
    assert temporary.startswith(".config.yaml.")
    assert str(os.getpid()) not in temporary, "a container on the same disk may have the same process id"
    assert rest == [("rename", "config.yaml"), ("fsync", "one")]


def test_the_tokenizer_of_a_data_set_is_on_the_disk_before_the_data_set_is_there(tmp_path, disk):
    (tmp_path / "a.txt").write_text("one two three " * 20)
    build(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", progress=False).close()
    names = [name for kind, name in disk if kind == "fsync"]
    staged = disk.index(("rename", "commit.json"))
    renamed = [number for number, entry in enumerate(disk) if entry == ("rename", "tokenizer.json") and number < staged]
    assert len(renamed) == 2, "once where it was made and once where the data set is put together"
    assert sum(name.startswith(".tokenizer.json.") for name in names) == 2
