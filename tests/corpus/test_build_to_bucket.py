"""`data build` into a bucket: what is there at the end, and what an end before that leaves."""

import random
import re
import subprocess
import sys
import time

import pytest

from roxxel_dist.corpus.build import build
from roxxel_dist.corpus.to_bucket import SentFiles
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import BUILD_FILE
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, pack, unpack, write_index
from roxxel_dist.data.verify import verify_objects
from roxxel_dist.objects.errors import StoreError, StoreTimeoutError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars


@pytest.fixture
def link(server, tmp_path):
    with server.link() as link, server.environment(link, XDG_CACHE_HOME=str(tmp_path / "cache")):
        yield link


@pytest.fixture
def url(server, link, request):
    return server.url(request.node.name)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(14):
        words = random.Random(i).choices(("tokens", "of", "a", "text", "that", "is", "long"), k=5000)
        (folder / f"{i:02}.txt").write_text(" ".join(words))
    return folder


def built(texts, out, **options):
    remote = RemoteConfig(store_timeout=20)
    given = {"tokenizer": "byte", "max_shard_bytes": 100_000, "progress": False, "remote": remote, **options}
    return build(texts, out, **given)


def objects(url):
    store = ObjectStore.open(url)
    return {info.key: store.read(info.key) for info in store.list()}


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_has_what_a_folder_would_have(texts, url, tmp_path):
    local = built(texts, tmp_path / "local", val_fraction=0.2)
    remote = built(texts, url, val_fraction=0.2)
    assert remote.fingerprint == local.fingerprint
    found = objects(url)
    assert {key for key in found if key.endswith("index")} == {"train/shards.index", "val/shards.index"}
    assert {key: data for key, data in found.items() if not key.endswith("index")} == files(tmp_path / "local")
    assert list((tmp_path / "cache" / "roxxel-dist" / "builds").iterdir()) == []


def test_a_missing_last_shard_is_noticed(texts, url):
    built(texts, url)
    store = ObjectStore.open(url)
    store.delete([max(info.key for info in store.list() if info.key.endswith(".rox"))])
    message = "build.json is of a data set with fingerprint .* a shard at the end is missing"
    with pytest.raises(UserError, match=message):
        write_index(store)
    problems, _ = verify_objects(url, ProgressBars(False))
    assert re.search(message, problems[0])
    store.delete([INDEX])
    with pytest.raises(UserError, match=message):
        Roxxel(url)


def test_an_index_that_was_written_over_half_an_upload_is_not_trusted(texts, url, link, tmp_path):
    """As a program may have that does not compare: the last shard came after the index, or never."""
    built(texts, url)
    store, last = ObjectStore.open(url), max(key for key in objects(url) if key.endswith(".rox"))
    whole, record = unpack(INDEX, store.read(INDEX)), store.read(BUILD_FILE)
    store.write(INDEX, pack([entry for entry in whole if entry.name != last]))
    message = rf"build.json is of a data set with fingerprint .* copy .* `roxxel-dist data index {url}`"
    for is_there in (True, False):
        store.delete([] if is_there else [last])
        for name in (url, f"{url}/shard_00000.rox"):
            with pytest.raises(UserError, match=message):
                Roxxel(name, remote=RemoteConfig(cache_dir=str(tmp_path / "new")))
    time.sleep(1.1)  # the times of objects are whole seconds
    store.write(BUILD_FILE, record)  # newer than the index: more shards are on their way
    config = RemoteConfig(cache_dir=str(tmp_path / "other"))
    assert len(Roxxel(url, remote=config).shards) == len(whole) - 1
    before = len(link.requests)
    assert len(Roxxel(url, remote=config).shards) == len(whole) - 1
    assert len(link.requests) - before == 1  # of an index that was checked no more than before


def test_it_is_built_once(texts, url, link, capsys):
    first = built(texts, url)
    before = sum(request.method in ("PUT", "POST") for request in link.requests)
    assert built(texts, url).fingerprint == first.fingerprint
    assert sum(request.method in ("PUT", "POST") for request in link.requests) == before
    (texts / "00.txt").unlink()
    with pytest.raises(
        ValueError, match=r"holds another data set \(shard_00000.rox, .*: choose another place, or replace"
    ):
        built(texts, url, progress=True)
    assert capsys.readouterr().err == ""  # nothing was read
    again = built(texts, url, overwrite=True)
    assert again.documents == first.documents - 1


def test_a_build_that_was_killed_is_not_taken_for_whole_and_goes_on(texts, url, link, tmp_path):
    local = built(texts, tmp_path / "local")
    link.rate = 1e6
    settings = "tokenizer='byte', max_shard_bytes=100_000"
    code = f"from roxxel_dist.corpus.build import build; build({str(texts)!r}, {url!r}, {settings})"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(".rox" in request.path for request in link.requests) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
    link.rate = 0
    assert not any(key.endswith("index") for key in objects(url))
    assert built(texts, url).fingerprint == local.fingerprint
    assert {key for key in objects(url) if key != "shards.index"} == set(files(tmp_path / "local"))


def test_a_bucket_that_goes_away_costs_the_sending_alone(texts, url, link, tmp_path):
    link.lose = "PUT"
    with pytest.raises(StoreTimeoutError):
        built(texts, url, remote=RemoteConfig(store_timeout=0.5))
    link.lose = ""
    local = built(texts, tmp_path / "local")
    assert built(texts, url).fingerprint == local.fingerprint


def test_what_fails_leaves_nothing(texts, url, tmp_path):
    with pytest.raises(ValueError, match="no document is left for val"):
        built(texts, url, val_fraction=1e-9)
    assert objects(url) == {}
    assert list((tmp_path / "cache" / "roxxel-dist" / "builds").iterdir()) == []


def test_what_was_sent_before_a_kill_is_not_sent_again(url, tmp_path):
    """By its bytes and its etag: what has changed on either side is sent; another writer is noticed."""
    store, path = ObjectStore.open(url), tmp_path / "shard"
    path.write_bytes(b"tokens")
    SentFiles(store, tmp_path / "build").send("shard", path)
    sent, (info,) = SentFiles(store, tmp_path / "build"), store.list()
    sent.check(["shard"])
    assert [sent.has("shard", path, info.etag), sent.has("shard", path, None), sent.has("other", path, "")] == [
        True, False, False,
    ]  # fmt: skip
    etag = store.write("shard", b"others")
    assert not sent.has("shard", path, etag)
    with pytest.raises(StoreError, match="shard: it was replaced or deleted while the build was sent"):
        sent.check(["shard"])
    path.write_bytes(b"more")
    assert not sent.has("shard", path, info.etag)
    (tmp_path / "build.sent").write_text("{")  # torn: all is sent
    assert not SentFiles(store, tmp_path / "build").has("shard", path, info.etag)
