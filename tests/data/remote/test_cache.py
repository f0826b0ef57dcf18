"""The cache, in the situations of other projects' bug reports; each is named as project#number."""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import buckets
import numpy as np
import pytest
from buckets import opened, put, replace_object
from small_disks import mounted_disk

from roxxel_dist.data.files.format import HEADER_BYTES
from roxxel_dist.data.remote import cache as cache_module
from roxxel_dist.data.remote.cache import PART, CacheError, ChunkCache
from roxxel_dist.data.remote.config import RemoteConfig

pytestmark = pytest.mark.xdist_group("bucket")
SUPPORT = Path(buckets.__file__).parent
READER = """
import hashlib, sys
from pathlib import Path
from buckets import opened
data = opened(sys.argv[1], Path(sys.argv[2]), cache_gb=float(sys.argv[3]))
digest = hashlib.sha256()
for number, batch in enumerate(data.stream(257, 8, seed=int(sys.argv[4]), steps=200)):
    digest.update(batch.tobytes())
    print(number, flush=True)
print(digest.hexdigest(), flush=True)
"""


def start(url, cache, cache_gb=1.0, seed=0):
    words = [sys.executable, "-c", READER, url, str(cache), str(cache_gb), str(seed)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SUPPORT)})


def digest(local, seed=0):
    sums = hashlib.sha256()
    for batch in local.stream(257, 8, seed=seed, steps=200):
        sums.update(batch.tobytes())
    return sums.hexdigest()


def windows(local):
    """First tokens of windows of up to 3,000 tokens in all shards."""
    return (local.first_tokens[:, None] + np.arange(60) * 3000).ravel()


def chunk_files(cache):
    return [path for path in cache.glob("chunks/*/*") if path.suffix != PART]


@pytest.mark.parametrize("cache_gb", [pytest.param(1.0, marks=pytest.mark.long), 0.0018])
def test_processes_read_the_same(server, local, url, cache, cache_gb):
    """pytorch-lightning#18957, litData#846: in a cache of a half of the data set files go while others read them."""
    with server.link(delay_s=0.02) as link, server.environment(link):
        readers = [start(url, cache, cache_gb, seed) for seed in (0, 0, 1)]
        outputs = [reader.communicate(timeout=100)[0].split() for reader in readers]
        assert [output[-1] for output in outputs] == [digest(local, seed) for seed in (0, 0, 1)]
        if cache_gb == 1.0:
            size = sum(shard.path.stat().st_size for shard in local.shards)
            assert link.body_bytes < 1.3 * size


def test_a_reader_that_is_killed_leaves_a_cache_that_others_use(server, local, url, cache):
    """litData#398: no process waits for what a killed one has left."""
    with server.link(delay_s=0.02, rate=1e7) as link, server.environment(link):
        for step in (0, 7):
            reader = start(url, cache)
            while reader.stdout.readline().strip() != str(step):
                pass
            reader.send_signal(signal.SIGKILL)
            reader.wait()
            reader.stdout.close()
        link.delay_s = link.rate = 0
        assert start(url, cache).communicate(timeout=100)[0].split()[-1] == digest(local)
        opened(url, cache).verify()


def test_an_index_is_written_while_others_write_theirs(tmp_path, monkeypatch, caplog):
    """What another process writes is listed under a name that it has a moment later no more."""
    cache, entries = ChunkCache(tmp_path, 1 << 20), cache_module._entries
    path = cache.index_file("a set")
    path.parent.mkdir()
    (path.parent / ".other.tmp").touch()

    def listed(folder):
        found = entries(folder)
        (path.parent / ".other.tmp").unlink()
        return found

    monkeypatch.setattr(cache_module, "_entries", listed)
    cache.write_index(path, b"an index")
    assert (path.read_bytes(), cache.is_paused, caplog.text) == (b"an index", False, "")


def test_claims_of_the_dead_are_taken_over_and_cleared(tmp_path, monkeypatch):
    """webdataset#84, litData#533: no file of an unfinished download stays."""
    cache = ChunkCache(tmp_path, 1 << 20)
    assert cache.claim("a-1")
    assert not ChunkCache(tmp_path, 1 << 20).claim("a-1")
    monkeypatch.setattr(cache_module, "CLAIM_S", 0.05)
    time.sleep(0.06)
    assert cache.claim("a-1")
    assert cache.write("a-1", b"data")
    assert cache.read("a-1", 4) == b"data"
    assert cache.claim("a-2")
    monkeypatch.setattr(cache_module, "STALE_S", 0.0)
    time.sleep(0.01)
    for number in range(3, 80):
        assert cache.claim(f"a-{number}")
        assert cache.write(f"a-{number}", bytes(1 << 14))
    assert not list(tmp_path.glob(f"chunks/*/*{PART}"))


def test_the_limit_holds_and_what_was_not_used_goes_first(tmp_path):
    """webdataset#117, mosaicml/streaming#844: the files of an earlier process count and go too."""
    limit = 1 << 20
    earlier = ChunkCache(tmp_path, limit)
    for number in range(40):
        assert earlier.claim(f"old-{number}")
        assert earlier.write(f"old-{number}", bytes(1 << 14))
    past = time.time() - 100
    for path in chunk_files(tmp_path):
        os.utime(path, (past, past))
    assert earlier.read("old-7", 1 << 14) is not None
    now = ChunkCache(tmp_path, limit)
    for number in range(45):
        now.claim(f"new-{number}")
        now.write(f"new-{number}", bytes(1 << 14))
        time.sleep(0.001)
    assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= limit
    names = {path.name for path in chunk_files(tmp_path)}
    assert {f"new-{number}" for number in range(45)} <= names
    assert "old-7" in names
    assert len(names) < 90


def test_the_sets_of_a_large_cache_have_all_names(tmp_path):
    cache = ChunkCache(tmp_path, 32 << 30)
    assert cache.sets == 256
    small = ChunkCache(tmp_path, 1 << 20)
    for number in range(300):
        cache.claim(f"x-{number}")
        cache.write(f"x-{number}", bytes(8000))
    assert len(chunk_files(tmp_path)) == 300
    small.claim("y")
    small.write("y", bytes(1 << 17))
    assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= 1 << 20


def test_other_files_are_left_alone(url, local, tmp_path):
    """mosaicml/streaming#988: eviction takes what is fetched again, and nothing else."""
    mine = tmp_path / "cache" / "mine" / "precious"
    mine.parent.mkdir(parents=True)
    mine.write_text("my work")
    remote = opened(url, tmp_path / "cache", cache_gb=0.0003)
    assert np.array_equal(remote.read(windows(local), 500), local.read(windows(local), 500))
    assert mine.read_text() == "my work"
    assert sum(path.stat().st_size for path in chunk_files(tmp_path / "cache")) <= 300_000


def test_a_cache_smaller_than_a_chunk(url, local, cache):
    """mosaicml/streaming#417, #475: no deadlock, no riddle: it is read without a cache."""
    remote = opened(url, cache, cache_gb=1e-5)
    assert np.array_equal(remote.read(windows(local), 3000), local.read(windows(local), 3000))
    for one, two in zip(remote.stream(257, 8, steps=40), local.stream(257, 8, steps=40), strict=True):
        assert np.array_equal(one, two)
    for name in ("cache_gb", "store_timeout"):
        with pytest.raises(ValueError, match=f"{name} is 0: it must be above 0"):
            RemoteConfig(**{name: 0})


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk", "600k", "--lazy") as disk:
        yield disk


def test_a_full_disk(url, local, small_disk, caplog):
    """mosaicml/streaming#475, juicefs#6247: the cache has what the disk has, whatever cache_gb says."""
    remote = opened(url, small_disk / "cache")
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(remote.read(windows(local), 1900), local.read(windows(local), 1900))
        assert chunk_files(small_disk / "cache")
    assert len([record for record in caplog.records if "the disk is full" in record.message]) <= 1


def test_a_disk_that_others_have_filled(url, local, small_disk, caplog):
    """One line, and the data is used without a cache."""
    with (small_disk / "others").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with caplog.at_level(logging.WARNING):
        remote = opened(url, small_disk / "cache")
        for one, two in zip(remote.stream(257, 8, steps=60), local.stream(257, 8, steps=60), strict=True):
            assert np.array_equal(one, two)
    (line,) = [record.message for record in caplog.records if "cache_dir" in record.message]
    assert line.startswith(f"cache_dir {small_disk}/cache: the disk is full. Data from the bucket is used without the")


def test_a_place_that_cannot_be_written(url, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cache_dir .*/file cannot be used \(.*\): name a folder that can be written"):
        opened(url, tmp_path / "file")
    with pytest.raises(CacheError, match=r"cache_dir /proc/cache cannot be used \(.*\): name a folder that"):
        opened(url, Path("/proc/cache"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        (flip, True),  # juicefs#5981: the disk reads something else
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), True),  # s3fs-fuse#715, #15: zeros
        (lambda path: os.truncate(path, path.stat().st_size // 2), False),  # s3fs-fuse#446: the first bytes alone
        (lambda path: path.write_bytes(b""), False),  # what a power failure leaves of a renamed file
        (lambda path: path.unlink(), False),  # litData#452: another process has deleted it
        (lambda path: (path.unlink(), path.mkdir()), False),
    ],
)
def test_a_cache_that_has_changed_is_fetched_again(url, local, cache, caplog, change, is_named):
    opened(url, cache).read(windows(local), 500)
    for path in chunk_files(cache):
        change(path)
    with caplog.at_level(logging.WARNING):
        remote = opened(url, cache)
        assert np.array_equal(remote.read(windows(local), 500), local.read(windows(local), 500))
    lines = [record.message for record in caplog.records if "damaged in the cache of this host" in record.message]
    assert len(lines) == int(is_named)
    if not chunk_files(cache)[0].is_dir():
        assert np.array_equal(opened(url, cache).read(windows(local), 500), local.read(windows(local), 500))


def test_a_cache_that_is_deleted_while_it_is_used(url, local, cache):
    stream = opened(url, cache).stream(257, 8, steps=60)
    for number, batch in enumerate(local.stream(257, 8, steps=60)):
        assert np.array_equal(next(stream), batch)
        if number % 20 == 10:
            shutil.rmtree(cache, ignore_errors=True)


def test_an_object_that_is_replaced_is_read_anew(server, folder, local, cache):
    """s3fs-fuse#1047, s3fs#422: the bytes of another version are never in the cache of this one."""
    url, shard = put(server, folder, "renewed", index=False), local.shards[0]
    assert np.array_equal(opened(url, cache).read(np.array([0]), 99), local.read(np.array([0]), 99))
    data = bytearray(shard.path.read_bytes())
    data[HEADER_BYTES] ^= 1
    replace_object(url, shard.path.name, bytes(data), is_known=False)
    with pytest.raises(ValueError, match=r"block 0 .* is damaged"):  # not what the cache has of the version before
        opened(url, cache).read(np.array([0]), 99)
