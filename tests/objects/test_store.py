"""A store on a real server, through a link that is as bad as a test wants it to be."""

import pytest
from objects.servers import S3Server

from roxxel_dist.objects.errors import StoreNotFoundError
from roxxel_dist.objects.store import ObjectStore


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def store(server, request):
    with server.environment():
        yield ObjectStore.open(server.url(request.node.name.partition("[")[0]), timeout_s=10)


def test_what_was_written_is_read(store):
    etag = store.write("a/b", b"hello")
    info = store.head("a/b")
    assert (info.key, info.size, info.etag) == ("a/b", 5, etag)
    assert store.read("a/b", etag=etag) == b"hello"
    assert store.read_range("a/b", 1, 3) == b"el"
    assert store.read_ranges("a/b", [(0, 1), (4, 5), (2, 4)]) == [b"h", b"o", b"ll"]
    store.write("ab", b"")
    assert [info.key for info in store.list()] == ["a/b", "ab"]
    assert [info.key for info in store.list("a")] == ["a/b"]
    assert store.list()[0].etag == etag
    assert store.read("ab") == b""
    store.delete(["a/b", "ab", "none"])
    assert store.list() == []
    with pytest.raises(StoreNotFoundError, match="there is no such object"):
        store.read("a/b")


def test_large_objects(store, tmp_path):
    data = bytes(range(256)) * (20 << 12)
    (tmp_path / "file").write_bytes(data)
    etag = store.upload(tmp_path / "file", "large")
    assert store.read("large", etag=etag) == data
    store.download("large", tmp_path / "again", etag=etag)
    assert (tmp_path / "again").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "file"]


def test_conditions_that_the_server_does_not_obey_are_noticed(store):
    assert not store.supports_conditions()
    assert store.list() == []
