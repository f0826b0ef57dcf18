"""What is read from a bucket is what is read from the local copy, to the bit."""

import numpy as np
import pytest
from buckets import opened, put

from roxxel_dist.cli.data import data_table
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import BUILD_FILE, NoShardsError, is_tokens
from roxxel_dist.data.remote.index import INDEX, not_in_index
from roxxel_dist.data.verify import VerifiedBlocks
from roxxel_dist.input.stream import Stream, locate_token
from roxxel_dist.objects.store import ObjectStore

pytestmark = pytest.mark.xdist_group("bucket")
PHASES = [
    Phase(30, 8, 129, weights={"self": 0.7, "code": 0.3}),
    Phase(20, 4, 513, weights={"self": 0.5, "code": 0.5}, packing="documents"),
]


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A second data set, in one shard."""
    folder = tmp_path_factory.mktemp("code")
    rng = np.random.default_rng(4)
    Roxxel(folder).write((rng.integers(0, 999, 700).astype(np.uint32) for _ in range(99)), separator=5, block_size=1000)
    return folder


@pytest.fixture(scope="module")
def code_url(server, code):
    return put(server, code, "code", index=False)


def same(batch, other):
    """Whether two batches are equal, packed ones in all three arrays."""
    return all(np.array_equal(one, two) for one, two in zip(np.atleast_3d(batch), np.atleast_3d(other), strict=True))


@pytest.mark.parametrize("index", [True, False])
def test_a_data_set_is_the_same(server, folder, local, cache, index):
    url = put(server, folder, f"same-{index}", index=index)
    assert is_tokens(url)
    with opened(url, cache) as remote:
        assert (remote.fingerprint, remote.num_tokens, len(remote)) == (local.fingerprint, local.num_tokens, len(local))
        assert [str(shard.path) for shard in remote.shards] == [f"{url}/{s.path.name}" for s in local.shards]
        for share in (0.1, 0.37):
            for mine, other in zip(remote.split(share), local.split(share), strict=True):
                assert (mine.ranges, mine.fingerprint, len(mine)) == (other.ranges, other.fingerprint, len(other))
        assert all(np.array_equal(one, two) for one, two in zip(remote, local, strict=True))
        assert np.array_equal(remote[-1], local[-1])
        for token in (0, 5, local.num_tokens - 1):
            mine, other = locate_token(remote, token), locate_token(local, token)
            assert (mine.path.name, mine.document, mine.position) == (other.path.name, other.document, other.position)
        remote.verify()
        assert data_table(remote).splitlines()[2:7] == data_table(local).splitlines()[2:7]


def test_an_index_is_all_that_opening_reads(server, url, cache):
    with server.link() as link, server.environment(link):
        opened(url, cache).split(0.1)
        paths = [(request.method, request.path.rpartition("/")[2].partition("?")[0]) for request in link.requests]
        assert paths[:3] == [("HEAD", INDEX), ("GET", INDEX), ("HEAD", BUILD_FILE)]  # and there is no such record
        before = len(paths)
        opened(url, cache).split(0.1)  # the index is in the cache
        assert [request.method for request in link.requests[before:]] == ["HEAD"]


def test_blends_packing_amendments_and_resumes(local, url, code, code_url, cache):
    remote = {"self": opened(url, cache), "code": opened(code_url, cache)}
    here = {"self": local, "code": Roxxel(code)}
    ranges = {"self": local.ranges, "code": here["code"].ranges}
    phases = Curriculum(local, PHASES, {"code": here["code"]}).plan(11).shapes
    plan = Plan(phases, {**ranges, "self": local.ranges[:4]}, 11).amend(25, datasets=ranges)
    expected = list(Stream(plan, here, None))
    for mine, other in zip(Stream(Plan.from_state(plan.state(0)), remote, None), expected, strict=True):
        assert same(mine, other)
    for step in (13, 37):
        stream = Stream(Plan.from_state(plan.state(step)), remote, None, start_step=step)
        stream.verify(step, step + 5, VerifiedBlocks())
        assert all(same(next(stream), expected[step + number]) for number in range(5))


def test_a_document_is_located_by_a_part_of_its_table(server, tmp_path, cache):
    """Of a shard of many documents, 64 KiB of their ends are fetched, not all."""
    (tmp_path / "many").mkdir()
    documents = np.ones((60_000, 2), np.uint16)
    Roxxel(tmp_path / "many").write(documents, separator=None, vocab_size=2)
    url = put(server, tmp_path / "many", "many")
    with server.link() as link, server.environment(link):
        remote = opened(url, cache)
        before = link.body_bytes
        assert locate_token(remote, 90_001).document == 45_000
        assert 0 < link.body_bytes - before < 70_000


def test_names(server, folder, local, url, cache):
    assert opened(f"{url}/shard_00000.rox", cache).num_tokens == len(local.shards[0].tokens)
    assert opened(f"{url}/shard_0000[0-2].rox", cache).num_tokens == sum(len(s.tokens) for s in local.shards[:3])
    assert opened(f"{url}/shard", cache).fingerprint == local.fingerprint
    with pytest.raises(NoShardsError, match=r"s3://bucket/none: no .rox object there"):
        opened(server.url("none"), cache)
    with pytest.raises(ValueError, match="one address, not a list"):
        Roxxel([url, url])
    with pytest.raises(ValueError, match="write to a local folder, copy it there"):
        opened(url, cache).write([b"a"])
    store = ObjectStore.open(put(server, folder, "two"))
    store.delete(["shard_00001.rox", INDEX])
    with pytest.raises(ValueError, match="shard 1 is missing"):
        opened(str(store.url), cache)


def test_what_the_cache_has_needs_no_network(server, local, url, cache):
    with server.link() as link, server.environment(link):
        remote = opened(url, cache, store_timeout=1)
        offsets = np.arange(40) * 3000
        remote.read(offsets, 500)
        link.down = True
        assert np.array_equal(remote.read(offsets, 500), local.read(offsets, 500))
        waits = remote.fetcher.waits
        with pytest.raises(TimeoutError, match=r"s3://bucket/corpus/shard_0000\d.rox bytes"):
            remote.read(np.array([400_000]), 500)
        assert remote.fetcher.waits == waits + 1


@pytest.mark.long
def test_a_pass_through_a_small_cache(server, local, url, cache):
    """Chunks go and come back, and nothing else is read."""
    with server.link() as link, server.environment(link):
        remote = opened(url, cache, cache_gb=0.0012)
        streams = zip(remote.stream(129, 8, seed=3), local.stream(129, 8, seed=3), strict=True)
        assert all(np.array_equal(one, two) for one, two in streams)
        used = sum(path.stat().st_size for path in cache.glob("chunks/*/*"))
        assert 500_000 < used <= remote.fetcher.cache.capacity


def test_readers_that_share_a_folder_fetch_once(server, local, url, cache):
    """Readers that share a folder fetch each block once between them."""
    with server.link(delay_s=0.02) as link, server.environment(link):
        readers = [opened(url, cache) for _ in range(3)]
        streams = [reader.stream(257, 8) for reader in readers]
        for batch in local.stream(257, 8):
            assert all(np.array_equal(next(stream), batch) for stream in streams)
        size = sum(shard.entry.size for shard in readers[0].shards)
        assert link.body_bytes < 1.1 * size


@pytest.mark.parametrize("documents", [False, True])
def test_what_was_fetched_ahead_needs_no_request(server, local, url, cache, documents):
    """Document ends too, where a phase tells documents apart."""
    with server.link() as link, server.environment(link):
        remote, offsets = opened(url, cache), np.arange(50) * 3500
        remote.fetch(offsets, 900, documents=documents)
        count = len(link.requests)
        assert np.array_equal(remote.read(offsets, 900), local.read(offsets, 900))
        assert len(link.requests) == count
        assert remote.fetcher.waits == 0
        remote.segments(offsets, 900)
        assert (len(link.requests) == count) == documents


def test_what_an_index_leaves_out():
    beside = ["shards.index", "tokenizer.json", "tokenizer_config.json", "build.json"]
    keys = ["shard_00000.rox", *beside, "val/shard_00000.rox", ".part.rox", "a.npy"]
    assert not_in_index(keys) == [".part.rox", "a.npy", "val/shard_00000.rox"]
    assert not_in_index(["shard_00000.rox", *beside]) == []
