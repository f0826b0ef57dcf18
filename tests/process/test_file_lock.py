"""Locks that reach other hosts, and that never are two processes' at a time, though their files are removed."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.place.directory import RunDirectory
from roxxel_dist.process import file_lock
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import holder, is_held, take_lock, wait_for_lock
from roxxel_dist.sweep.study.journal import Journal

HOLDER = """
import sys
from pathlib import Path
from roxxel_dist.process.file_lock import take_lock
assert take_lock(Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""

# Goes into the same staging folder again and again, and fails where another one is in it.
ALONE = """
import os, sys
from pathlib import Path
from roxxel_dist.data.files.atomic_dir import publish, staging_folder
folder, times = Path(sys.argv[1]), 0
while times < 40:
    try:
        with staging_folder(folder, "x") as staged:
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            (staged / "file").write_bytes(b"1")
            if times % 2:
                publish(staged, [])
            os.unlink(folder / "inside")
            times += 1
    except ValueError as error:
        assert "another process" in str(error), error
"""


@pytest.fixture
def elsewhere(tmp_path):
    """(file, process that holds its lock until its stdin is closed)"""
    path = tmp_path / ".lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield path, process


def test_every_lock_is_on_a_regular_file_that_is_open_for_writing(tmp_path, monkeypatch):
    locked, flock = [], fcntl.flock

    def spy(descriptor, operation):
        if operation & fcntl.LOCK_EX:
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            locked.append((stat.S_ISREG(os.fstat(descriptor).st_mode), access))
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", spy)
    Roxxel(tmp_path / "data").write([b"one"])
    directory = RunDirectory(tmp_path / "run")
    directory.claim(resume=False)
    directory.release()
    with Journal(tmp_path / "study", print):
        pass
    assert len(locked) >= 3
    assert set(locked) == {(True, os.O_RDWR)}


def test_one_is_inside_at_a_time_though_each_removes_the_file_of_the_lock(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", ALONE, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_on_a_file_that_its_holder_removed_is_none(tmp_path):
    path = tmp_path / ".lock"
    first = take_lock(path)
    assert is_held(path, unknown=False)
    assert take_lock(path) is None
    path.unlink()
    second = take_lock(path)  # another file, which is not locked
    assert second is not None
    os.close(first)
    assert is_held(path, unknown=False)
    os.close(second)
    assert not is_held(path, unknown=True)


def test_who_holds_it_is_named_after_a_silence_and_the_wait_ends_with_him(elsewhere):
    path, process = elsewhere
    said = []

    def say(line):
        said.append(line)
        process.stdin.close()

    os.close(wait_for_lock(path, "waiting for {}".format, str, limit_s=60, silent_s=0.2, log=say))
    (line,) = said
    assert line.startswith(f"waiting for another process (pid {process.pid} on host ")


def test_the_wait_has_a_limit_from_the_last_progress_on(elsewhere):
    path, process = elsewhere
    steps = iter(range(8))
    with pytest.raises(ValueError, match=rf"^pid {process.pid} is stuck$"):
        wait_for_lock(
            path,
            str,
            lambda holder: f"pid {holder.split()[3]} is stuck",
            limit_s=0.3,
            silent_s=60,
            progress=lambda: next(steps, None),
        )
    assert next(steps, None) is None, "as long as there was progress it waited"


def test_a_holder_that_did_not_say_who_it_is_is_another_process(tmp_path):
    assert holder(tmp_path / "absent") == "another process"
    (tmp_path / "empty").touch()
    assert holder(tmp_path / "empty") == "another process"


@pytest.fixture
def shared():
    """A file whose lock a process of another user shares for so many seconds; (the file, that process)."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # below `tmp_path` no other user comes
    folder.chmod(0o755)
    started = []

    def share(seconds):
        path = folder / ".lock"
        file_lock.release_lock(file_lock.take_lock(path))
        other = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        started.append(subprocess.Popen(["flock", "-s", "-F", path, "sleep", str(seconds)], **other))
        with path.open("rb+") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return path, started[-1]
                fcntl.flock(file, fcntl.LOCK_UN)
                assert started[-1].poll() is None
                time.sleep(0.01)

    yield share
    for process in started:
        process.kill()
        process.wait()
    shutil.rmtree(folder)


def test_who_only_looks_keeps_nobody_from_writing(shared):
    path, _ = shared(0.5)
    lock = file_lock.take_lock(path)
    assert lock is not None, "it tries again"
    assert file_lock.is_held(path, unknown=False)
    file_lock.release_lock(lock)


def test_who_never_ends_to_look_is_named(shared, monkeypatch):
    monkeypatch.setattr(file_lock, "READERS_S", 0.2)
    path, process = shared(1000)
    with pytest.raises(UserError, match=f"is looked at by process {process.pid} for more than"):
        file_lock.take_lock(path)
    process.kill()
    process.wait()
    file_lock.release_lock(file_lock.take_lock(path))


def test_many_who_look_and_many_who_write(tmp_path):
    """Each writer gets it in turn, and never two."""
    path, inside, held = tmp_path / ".lock", [0], []
    end = threading.Event()

    def look():
        while not end.is_set():
            file_lock.is_held(path, unknown=False)

    def write():
        for _ in range(5):
            while (lock := file_lock.take_lock(path)) is None:
                time.sleep(0.001)
            inside[0] += 1
            held.append(inside[0])
            inside[0] -= 1
            file_lock.release_lock(lock)

    lookers = [threading.Thread(target=look) for _ in range(4)]
    writers = [threading.Thread(target=write) for _ in range(3)]
    for thread in (*lookers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    end.set()
    for thread in lookers:
        thread.join()
    assert held == [1] * 15


def test_a_file_system_without_locks_is_told_of_once_a_folder(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)  # as Lustre without `-o flock`
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2):
        Roxxel(data / f"{number}.rox").write([b"one"])
        directory = RunDirectory(tmp_path / "run")
        directory.claim(resume=True)
        directory.release()
    text = "this file system has no locks (No locks available): make sure that only one process writes there"
    assert capsys.readouterr().err == "".join(f"roxxel-dist: {tmp_path / name}: {text}\n" for name in ("data", "run"))
    assert sorted(os.listdir(data)) == ["0.rox", "1.rox"]
    assert not file_lock.is_held(tmp_path / "run" / ".lock", unknown=False)


WITHOUT_LOCKS = """
import errno, fcntl, os
def flock(file, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock  # as Lustre without `-o flock`
"""


def test_without_locks_two_writers_are_told_apart_by_the_owner_record(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    path, lines = tmp_path / ".lock", []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", WITHOUT_LOCKS + HOLDER, str(path)], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        assert take_lock(path, lines.append) is None
        assert is_held(path, unknown=False)
        assert f"(pid {process.pid} on host" in holder(path)
        process.kill()
    assert not is_held(path, unknown=True)
    lock = take_lock(path, lines.append)
    assert lock is not None
    assert take_lock(path, lines.append) is None, "this process has it"
    file_lock.release_lock(lock)
    assert not path.read_bytes()
    assert len(lines) == 1
    other = tmp_path / "other" / ".lock"
    other.parent.mkdir()
    other.write_text('{"pid": 7, "host": "elsewhere", "boot": "b", "start": 1}')
    assert is_held(other, unknown=True)
    assert not is_held(other, unknown=False)
    assert take_lock(other, lines.append) is not None
    assert lines[1].endswith("only one process writes there; the last was another process (pid 7 on host elsewhere)")
