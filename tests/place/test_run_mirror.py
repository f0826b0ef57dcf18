"""What the mirror of a run in a bucket does about files that come, go, and cannot be read."""

import os
import shutil
import threading

import pytest
from commands import wait_for

from roxxel_dist.objects.errors import StoreTimeoutError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.place import bucket_folder
from roxxel_dist.place import bucket_run as run_mirror
from roxxel_dist.place.bucket_folder import BucketFolder
from roxxel_dist.place.bucket_run import RunMirror
from roxxel_dist.process.progress import Progress
from roxxel_dist.train.log.console import TextTracker
from roxxel_dist.train.log.csv_jsonl import CsvTracker, JsonlTracker
from roxxel_dist.train.log.timeline import Timeline


@pytest.fixture
def link(server):
    with server.link() as link:
        yield link


@pytest.fixture
def store(server, link, tmp_path):
    with server.environment(link, XDG_CACHE_HOME=str(tmp_path / "cache")):
        yield ObjectStore.open(server.url(tmp_path.name), timeout_s=2)


@pytest.fixture
def mirror(store, tmp_path, monkeypatch):
    monkeypatch.setattr(run_mirror, "INTERVAL_S", 0.05)
    (tmp_path / "run").mkdir()
    mirror = RunMirror(store, tmp_path / "run", lambda name: True, serves=True)
    yield mirror
    mirror.close(5)


def keys(store):
    return [info.key for info in store.list()]


@pytest.mark.parametrize(
    "name", ["config.yaml", "tokenizer.json", "metrics.jsonl", "logs/rank-0.log", "plots/loss.png"]
)
def test_a_file_that_is_deleted_locally_stays_in_the_bucket(store, mirror, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("first")
    mirror.start()
    wait_for(lambda: keys(store) == [name])
    path.unlink()
    mirror.flush()
    assert store.read(name) == b"first"
    path.write_text("second, which is new")
    wait_for(lambda: store.read(name) == b"second, which is new")


def test_rows_that_come_while_files_are_sent_stay_in_the_bucket(store, mirror, link, tmp_path):
    """A pass has listed the files before the rows were there."""
    for number in range(10):
        (tmp_path / "run" / f"f{number}").write_text("x")
    link.delay_s = 0.1
    sends = threading.Thread(target=mirror.flush)
    sends.start()
    wait_for(lambda: any(request.method == "PUT" for request in link.requests))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    mirror.flush_rows()
    sends.join()
    assert store.read("metrics.jsonl") == b'{"step": 1}\n'


READS = {"state_of": run_mirror.state_of, "files_below": run_mirror.files_below}


@pytest.mark.parametrize("number", [116, 5, 13], ids=["ESTALE", "EIO", "EACCES"])
@pytest.mark.parametrize("read", READS)
def test_an_error_of_the_disk_is_one_line_and_is_tried_again(
    store, mirror, tmp_path, monkeypatch, caplog, read, number
):
    calls = []

    def fails(path):
        if path.name in ("bad", "badlogs"):
            calls.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return READS[read](path)

    monkeypatch.setattr(run_mirror, read, fails)
    folder = tmp_path / "run"
    (folder / "badlogs").mkdir()
    (folder / "badlogs" / "rank-0.log").write_text("x")
    (folder / "bad").write_text("x")
    mirror.start()
    wait_for(lambda: len(calls) > 3)
    lines = [line for line in caplog.text.splitlines() if "cannot be sent to the bucket" in line]
    assert len(lines) == 1
    assert os.strerror(number) in lines[0]
    mirror.check()
    monkeypatch.setattr(run_mirror, read, READS[read])
    wait_for(lambda: {"bad", "badlogs/rank-0.log"} <= {*keys(store)})
    (folder / "later").write_text("x")
    wait_for(lambda: "later" in keys(store))


def test_rows_that_cannot_be_read_keep_a_checkpoint_from_counting(mirror, tmp_path, monkeypatch):
    def stale(path):
        raise OSError(116, "Stale file handle")

    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(run_mirror, "state_of", stale)
    with pytest.raises(OSError, match="Stale"):
        mirror.flush_rows()


@pytest.mark.parametrize("error", ["the store is away", "a bug"])
def test_what_ends_the_thread_is_an_error_of_the_run(mirror, link, tmp_path, monkeypatch, error):
    def mistaken(name):
        raise RuntimeError("a bug")

    mirror.start()
    if error == "a bug":
        mirror._is_mine = mistaken
    else:
        link.down = True
    (tmp_path / "run" / "config.yaml").write_text("x")
    wait_for(lambda: not mirror._thread.is_alive())
    with pytest.raises(RuntimeError if error == "a bug" else StoreTimeoutError):
        mirror.check()


def test_a_reader_sees_rows_vanish_that_the_run_has_taken_back(store, tmp_path):
    store.write("config.yaml", b"dim: 64\n")
    store.write("metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')
    reader = BucketFolder(store.url, tmp_path / "reader", read_only=True)
    writer = BucketFolder(store.url, tmp_path / "writer")
    assert (reader.pull() / "metrics.jsonl").read_bytes() == (writer.pull() / "metrics.jsonl").read_bytes()
    store.write("metrics.jsonl", b'{"step": 1}\n')
    assert (reader.pull() / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    assert (writer.pull() / "metrics.jsonl").read_bytes().count(b"\n") == 2  # rows that it had not sent yet


LOGS = {
    "metrics.jsonl": JsonlTracker,
    "training_log.csv": CsvTracker,
    "logs/rank-0.log": TextTracker,
    "timeline.jsonl": lambda path: opened_timeline(path.parent),
}


def opened_timeline(run):
    progress = Progress(None, 0)
    timeline = Timeline(run, progress)
    timeline.open()
    progress.enter(1)
    return timeline


@pytest.mark.parametrize("name", LOGS)
def test_rows_are_put_back_after_a_cleaner(tmp_path, name):
    """A log that is deleted while it is open, with its folder, has all rows again when the next one comes."""
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    log = LOGS[name](path)
    log.row({"step": 1, "train_loss": 2.0})
    before = path.read_text()
    shutil.rmtree(tmp_path / "run")
    log.row({"step": 2, "train_loss": 1.0})
    after = path.read_text()
    assert after.startswith(before)
    assert after.count("\n") == before.count("\n") + 1
    path.unlink()
    if name in ("metrics.jsonl", "training_log.csv"):
        log.rewind(1)
        assert path.read_text() == before
    log.close()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(
    ("local", "sent", "kept", "read"),
    [
        (b"rows\n", b"rows\n", b"rows\n", b"rows\n"),
        (b"rows\nmore\n", b"rows\n", b"rows\nmore\n", b"rows\n"),
        (b"rows\n", b"rows\nmore\n", b"rows\nmore\n", b"rows\nmore\n"),
        (b"other\nand more\n", b"rows\n", b"rows\n", b"rows\n"),
        (b"rowS\n", b"rows\n", b"rows\n", b"rows\n"),
        (None, b"rows\n", b"rows\n", b"rows\n"),
    ],
    ids=["the same", "grown here", "grown there", "another one, and longer", "another one", "not here"],
)
def test_a_file_that_has_grown_here_is_the_newer_one(store, tmp_path, monkeypatch, large, local, sent, kept, read):
    monkeypatch.setattr(bucket_folder, "AT_ONCE", 2 if large else 1 << 20)
    store.write("config.yaml", b"dim: 8\n")
    store.write("logs/rank-0.log", sent)
    for read_only, expected in ((False, kept), (True, read)):
        of_run = BucketFolder(str(store.url), tmp_path / f"local-{read_only}", read_only=read_only)
        log = of_run.folder / "logs" / "rank-0.log"
        log.parent.mkdir(parents=True)
        if local is not None:
            log.write_bytes(local)
        of_run.pull()
        assert log.read_bytes() == expected
        assert os.listdir(log.parent) == ["rank-0.log"]
