"""The cache: full disks, other boots, processes that are killed, and many of them at once."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from buckets import opened
from small_disks import mounted_disk

from roxxel_dist.data.remote.cache import BlockCache, CacheError
from roxxel_dist.data.remote.config import RemoteConfig

pytestmark = pytest.mark.xdist_group("bucket")
TESTS = Path(__file__).parents[2]
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
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)})


def digest(local, seed=0):
    sums = hashlib.sha256()
    for batch in local.stream(257, 8, seed=seed, steps=200):
        sums.update(batch.tobytes())
    return sums.hexdigest()


@pytest.mark.parametrize("cache_gb", [1.0, 0.0018])
def test_four_processes_read_the_same(server, local, url, cache, cache_gb):
    """In a cache of a half of the data set blocks go while others read them."""
    with server.link() as link, server.environment(link):
        readers = [start(url, cache, cache_gb, seed) for seed in (0, 0, 1, 2)]
        outputs = [reader.communicate(timeout=100)[0].split() for reader in readers]
        assert [output[-1] for output in outputs] == [digest(local, seed) for seed in (0, 0, 1, 2)]
        if cache_gb == 1.0:
            size = sum(shard.path.stat().st_size for shard in local.shards)
            assert link.body_bytes < 1.3 * size


def test_a_reader_that_is_killed_leaves_a_cache_that_others_use(server, local, url, cache):
    with server.link(delay_s=0.02, rate=3e6) as link, server.environment(link):
        for step in (0, 2, 7):
            reader = start(url, cache)
            while reader.stdout.readline().strip() != str(step):
                pass
            reader.send_signal(signal.SIGKILL)
            reader.wait()
            reader.stdout.close()
        link.delay_s = link.rate = 0
        assert start(url, cache).communicate(timeout=100)[0].split()[-1] == digest(local)
        remote = opened(url, cache)
        remote.verify()
        size = sum(path.stat().st_blocks * 512 for path in remote.fetcher.cache.folder.glob("*.data"))
        assert size < remote.fetcher.cache.used + (1 << 20)


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk", "600k", "--lazy") as disk:
        yield disk


def test_a_full_disk(url, local, small_disk):
    remote = opened(url, small_disk / "cache")
    offsets = (local.first_tokens[:, None] + np.arange(100) * 1900).ravel()
    with pytest.raises(CacheError, match=r"cache_dir .*/cache: the disk is full .* use a lower cache_gb, or a cache"):
        remote.read(offsets, 1900)
    remote = opened(url, small_disk / "cache", cache_gb=0.0003)
    offsets = local.first_tokens[:, None].repeat(9, 1).ravel() + 900
    assert np.array_equal(remote.read(offsets, 500), local.read(offsets, 500))


def test_a_cache_that_is_too_small(url, cache):
    with pytest.raises(CacheError, match=r"cache_gb is 1e-05: blocks are evicted before they are read"):
        opened(url, cache, cache_gb=1e-5).read(np.array([0]), 9000)
    for name in ("cache_gb", "store_timeout"):
        with pytest.raises(ValueError, match=f"{name} is 0: it must be above 0"):
            RemoteConfig(**{name: 0})


def test_a_place_that_cannot_be_written(url, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cache_dir .*/file cannot be used \(.*\): name a folder that can be written"):
        opened(url, tmp_path / "file")
    with pytest.raises(
        CacheError, match=r"cache_dir /proc/cache cannot be used \(No such file .*\): name a folder that"
    ):
        opened(url, Path("/proc/cache"))


def test_a_cache_of_another_boot_is_deleted_unless_it_is_used(tmp_path):
    used = BlockCache(tmp_path, 1 << 20)
    moved, gone = tmp_path / "blocks-other", tmp_path / "blocks-gone"
    used.folder.rename(moved)  # its files stay open
    gone.mkdir()
    (gone / "users").touch()
    BlockCache(tmp_path, 1 << 20)
    assert moved.exists()
    assert not gone.exists()
    del used
    BlockCache(tmp_path, 1 << 20)
    assert not moved.exists()
