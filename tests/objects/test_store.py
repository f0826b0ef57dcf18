"""A store on real servers, through a link that is as bad as a test wants it to be."""

import threading

import pytest
from servers import AzureServer, GcsServer, S3Server, StrictS3Server

from roxxel_dist.objects.errors import StoreError, StoreNotFoundError, StorePreconditionError, StoreTimeoutError
from roxxel_dist.objects.store import MULTIPART, ObjectStore

SERVERS = {"s3": S3Server, "strict-s3": StrictS3Server, "gs": GcsServer, "az": AzureServer}
# S3 keeps a folder and an object of one name apart; the gateway of the tests has them in a file system.
KEYS = ["a b", "a#b", "a%20b", "a~b", "ü", "a+b", "a:b", "a=b,c", "a?b", "a&b", "[a]", "Ω/x", "a/b/c/d"]


@pytest.fixture(scope="module", params=["s3", "gs", pytest.param("az", marks=pytest.mark.long)])
def server(request, tmp_path_factory):
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def link(server):
    with server.link() as link:
        yield link


@pytest.fixture
def store(server, link, request):
    with server.environment(link):
        yield ObjectStore.open(server.url(request.node.name.partition("[")[0]), timeout_s=10)


@pytest.fixture
def hasty(server, link, request):
    """A store whose time limit is short."""
    with server.environment(link):
        yield ObjectStore.open(server.url(request.node.name.partition("[")[0]), timeout_s=0.5)


def test_what_was_written_is_read(store):
    etag = store.write("a/b", b"hello")
    info = store.head("a/b")
    assert (info.key, info.size, info.etag) == ("a/b", 5, etag)
    assert store.read("a/b", etag=etag) == b"hello"
    assert store.read_range("a/b", 1, 3) == b"el"
    assert store.read_ranges("a/b", [(0, 1), (4, 5), (2, 4)], etag=etag) == [b"h", b"o", b"ll"]
    store.write("ab", b"")
    assert [info.key for info in store.list()] == ["a/b", "ab"]
    assert [info.key for info in store.list("a")] == ["a/b"]
    assert store.list()[0].etag == etag
    assert store.read("ab") == b""
    store.delete(["a/b", "ab", "none"])
    assert store.list() == []


def test_keys_are_what_they_were(store):
    for key in KEYS:
        store.write(key, key.encode())
    assert [info.key for info in store.list()] == sorted(KEYS)
    assert [store.read(key).decode() for key in KEYS] == KEYS


@pytest.mark.long  # pages are read by obstore, and a thousand objects take the gateway five seconds
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_all_pages_of_a_list_are_read(store):
    keys = [f"n/{i:05}" for i in range(1010)]
    threads = [
        threading.Thread(target=lambda part=keys[i::8]: [store.write(key, b"") for key in part]) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.key for info in store.list()] == keys
    store.delete(keys)
    assert store.list() == []


def test_a_folder_is_listed_without_what_lies_deeper(store):
    for key in ("deep/b.txt", "deep/a.txt", "deep/2/x/y.txt", "deep/10/z.txt", "deeper.txt"):
        store.write(key, b"1")
    objects, folders = store.list_folder("deep")
    assert ([info.key for info in objects], folders) == (["deep/a.txt", "deep/b.txt"], ["10", "2"])
    assert "deep" in store.list_folder()[1]
    assert "deeper.txt" in [info.key for info in store.list_folder()[0]]
    assert store.list_folder("none") == ([], [])


def test_large_objects_go_in_parts(store, link, tmp_path):
    data = bytes(range(256)) * (MULTIPART // 256 + 1)
    (tmp_path / "file").write_bytes(data)
    etag = store.upload(tmp_path / "file", "large")
    assert store.read("large", etag=etag) == data
    store.write("large2", data)
    store.download("large2", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "file"]
    assert max(len(request.range) for request in link.requests) > 0


def test_what_is_not_there(store):
    store.write("k", b"12345")
    for call in (store.read, store.head, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(
            StoreNotFoundError, match=r"test_what_is_not_there/x.*: there is no such object: correct the path"
        ):
            call("x")
    with pytest.raises(StoreError, match=r"bytes 3-6: the object has only 5 bytes"):
        store.read_range("k", 3, 6)
    with pytest.raises(StoreError, match=r"bytes 8-9: the object ends before these bytes"):
        store.read_range("k", 8, 9)
    with pytest.raises(ValueError, match="a range must have at least one byte"):
        store.read_range("k", 3, 3)
    with pytest.raises(ValueError, match=r"the key '\.\./k' cannot be used"):
        store.read("../k")


def test_another_object_is_not_read_for_the_one_that_was_meant(store, tmp_path):
    etag = store.write("k", b"one")
    store.write("k", b"two")
    with pytest.raises(StorePreconditionError):
        store.read("k", etag=etag)
    with pytest.raises(StorePreconditionError):
        store.read_ranges("k", [(0, 1), (1, 2)], etag=etag)
    with pytest.raises(StorePreconditionError):
        store.download("k", tmp_path / "k", etag=etag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", ["s3", "strict-s3", "gs", pytest.param("az", marks=pytest.mark.long)], indirect=True)
def test_conditions(store, server):
    """The S3 gateway takes them and does as it likes, which is noticed; the others obey."""
    assert store.supports_conditions() == (type(server) is not S3Server)
    assert store.list() == []
    first = store.write("k", b"one", if_absent=True)
    if not store.supports_conditions():
        return
    with pytest.raises(StorePreconditionError):
        store.write("k", b"two", if_absent=True)
    second = store.write("k", b"three", if_match=first)
    with pytest.raises(StorePreconditionError):
        store.write("k", b"four", if_match=first)
    assert store.read("k", etag=second) == b"three"


def test_a_conditional_write_whose_answer_was_lost_is_no_failure(link, store):
    """The second try finds what the first one has done. Another one's object is not taken for it."""
    link.lose = "PUT"
    done = []
    thread = threading.Thread(target=lambda: done.append(store.write("lease", b"mine", if_absent=True)))
    thread.start()
    while sum(request.method == "PUT" for request in link.requests) < 2:
        assert thread.is_alive()
    link.lose = ""
    thread.join()
    assert done == [store.head("lease").etag]
    if store.supports_conditions():
        with pytest.raises(StorePreconditionError):
            store.write("lease", b"mine", if_absent=True)


@pytest.mark.parametrize(
    ("trouble", "value", "words"),
    [
        ("status", 503, r"the server answers that it is busy \(SlowDown\)"),
        ("status", 429, r"the server answers that it is busy \(TooManyRequests\)"),
        ("cut", 100, "the connection to the endpoint at .* broke"),
        ("trickle", 1.0, "no whole answer came from the endpoint at .* within the limit of a request"),
        ("down", True, "the endpoint at .* refuses connections"),
    ],
)
def test_trouble_is_tried_again_until_the_limit(hasty, link, trouble, value, words):
    hasty.write("k", b"x" * 1000)
    before = getattr(link, trouble)
    setattr(link, trouble, value)
    with pytest.raises(StoreTimeoutError, match=rf"read .*/k bytes 0-1000: {words}.*, \d+ (try|tries) in \d s: "):
        hasty.read_range("k", 0, 1000)
    setattr(link, trouble, before)
    assert hasty.read("k") == b"x" * 1000


@pytest.mark.parametrize("parts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_server_that_comes_back(server, link, store, tmp_path, parts):
    """Reads and writes that it went away from are done when it is there again; in parts and not."""
    data = bytes(range(256)) * ((3 * MULTIPART // 2 if parts else MULTIPART // 4) // 256)
    (tmp_path / "file").write_bytes(data)
    link.rate = len(data) / 0.6

    def away():
        link.down = True
        server.restart()
        link.down = False

    for call in (lambda: store.upload(tmp_path / "file", "k"), lambda: store.download("k", tmp_path / "again")):
        timer = threading.Timer(0.3, away)
        timer.start()
        call()
        timer.join()
    assert (tmp_path / "again").read_bytes() == data


def test_trouble_is_logged(hasty, link, caplog, monkeypatch):
    monkeypatch.setattr("roxxel_dist.objects.failures.SILENT_S", 0.0)
    hasty.write("k", b"")
    link.status = 503
    with pytest.raises(StoreTimeoutError):
        hasty.head("k")
    record = caplog.records[0]
    assert record.name == "roxxel_dist.objects"
    assert "look at" in record.message
    assert "/k: the server answers that it is busy (503), for 0 s" in record.message
