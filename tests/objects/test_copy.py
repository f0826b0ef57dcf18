"""The command copy, on real servers: what arrives, what is not sent again, what a copy that was killed leaves."""

import json
import os
import random
import subprocess
import sys
import time
from urllib.parse import unquote

import pytest
from servers import AzureServer, GcsServer, S3Server

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.objects.copy import copy_to_folder
from roxxel_dist.objects.copy_record import RECORD
from roxxel_dist.objects.errors import StoreError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import BucketSource
from roxxel_dist.run.copy import copy

SERVERS = {"s3": S3Server, "gs": GcsServer, "az": AzureServer}


@pytest.fixture(scope="module", params=["s3", *(pytest.param(name, marks=pytest.mark.long) for name in ("gs", "az"))])
def server(request, tmp_path_factory):
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as server:
        yield server


@pytest.fixture
def link(server):
    with server.link() as link, server.environment(link):
        yield link


@pytest.fixture
def url(server, link, request):
    return server.url(request.node.name.partition("[")[0])


@pytest.fixture
def folder(tmp_path):
    """Files, one of them large, an empty one and what is not copied."""
    folder = tmp_path / "source"
    (folder / "a" / "b c").mkdir(parents=True)
    for name, size in (
        ("one", 5),
        ("a/two", 17 << 20),
        ("a/b c/ü#%", 1000),
        ("empty", 0),
        (".hidden", 5),
        ("run.lease", 5),
    ):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def quiet(*args, **options):
    return copy(*map(str, args), progress=False, timeout_s=20, **options)


def sent(link):
    """Objects, or parts of them, that went to the server; Azure deletes by a POST too."""
    sends = (request.path for request in link.requests if request.method in ("PUT", "POST"))
    return sum(RECORD not in unquote(path) and "comp=batch" not in path for path in sends)


def test_a_folder_comes_back_as_it_was(folder, url, link, tmp_path, server):
    copied = quiet(folder, url)
    assert (copied.files, copied.sent) == (4, 4)
    other = f"{server.url('other')}"
    assert quiet(url, other).sent == 4
    for i, source in enumerate((url, other)):
        assert quiet(source, tmp_path / f"back{i}").sent == 4
        kept = contents(folder)
        del kept[".hidden"], kept["run.lease"]
        assert contents(tmp_path / f"back{i}") == kept
    assert sorted(os.listdir(tmp_path)) == ["back0", "back1", "source"]


def test_what_is_there_is_not_sent_again(folder, url, link):
    quiet(folder, url)
    before = sent(link)
    assert quiet(folder, url).sent == 0
    ObjectStore.open(url).delete([RECORD])  # as if a copy had been killed before it wrote anything down
    assert quiet(folder, url).sent == 0
    os.utime(folder / "one")
    assert quiet(folder, url).sent == 0
    assert sent(link) == before
    (folder / "one").write_bytes(b"again")
    with pytest.raises(
        ValueError, match=r"/one exists with other content: choose another place, or give overwrite=True"
    ):
        quiet(folder, url)
    assert quiet(folder, url, overwrite=True).sent == 1
    assert ObjectStore.open(url).read("one") == b"again"


def test_damage_on_the_way_back_is_noticed(folder, url, tmp_path):
    quiet(folder, url)
    store = ObjectStore.open(url)
    record = json.loads(store.read(RECORD))
    record["files"]["one"]["xxh3"] = "0" * 32  # as if other bytes had been sent
    store.write(RECORD, json.dumps(record).encode())
    with pytest.raises(StoreError, match=r"/one: it does not agree with its digest"):
        quiet(url, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_what_is_written_in_its_place_meanwhile_stays(folder, url, tmp_path):
    """A data set may be made there while the objects come: the copy looks a second time before it takes the place."""
    quiet(folder, url)
    (place := tmp_path / "back").mkdir()

    def write_there(size):
        if not any(place.iterdir()):
            (place / "shard_00000.rox").write_bytes(b"somebody's tokens")

    source = BucketSource(ObjectStore.open(url))
    files = [file for file in source.files() if file.name == "one"]
    with pytest.raises(ValueError, match="back exists already: choose another place"):
        copy_to_folder(source, place, files, write_there)
    assert contents(place) == {"shard_00000.rox": b"somebody's tokens"}


def test_a_copy_that_was_killed_goes_on(folder, url, link, tmp_path):
    """Either way; what had arrived is not sent again, and nothing appears before its end."""
    for i in range(30):
        (folder / f"small{i:02}").write_bytes(bytes([i]) * 100_000)
    for source, target in ((folder, url), (url, tmp_path / "back")):
        link.requests.clear()
        link.rate = 6e6
        command = [sys.executable, "-m", "roxxel_dist", "copy", str(source), str(target)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while (
            sum("small" in request.path and request.method != "HEAD" for request in link.requests) < 30
            and process.poll() is None
        ):
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -9
        assert not (tmp_path / "back").exists()
        link.rate = 0
        copied = quiet(source, target)
        assert copied.files == 34
        assert copied.sent < 34
    kept = contents(folder)
    del kept[".hidden"], kept["run.lease"]
    assert contents(tmp_path / "back") == kept


def test_a_data_set_gets_an_index_and_is_whole_or_not_there(url, link, tmp_path):
    texts = [f"document {i} " * 200 for i in range(100)]
    for seed in (0, 1):
        random.Random(seed).shuffle(texts)
        Roxxel(tmp_path / f"data{seed}" / "shard_*.rox").write(texts, max_shard_bytes=40_000)
    names = sorted(path.name for path in (tmp_path / "data0").glob("*.rox"))
    assert len(names) > 3
    quiet(tmp_path / "data0", url)
    store = ObjectStore.open(url)
    assert [info.key for info in store.list()] == [RECORD, *sorted([*names, "shards.index"])]
    puts = [unquote(request.path) for request in link.requests if request.method == "PUT"]
    written = [path for path in puts if path.endswith(".rox")]
    assert names[0] in written[-1]
    with pytest.raises(ValueError, match="exists with other content"):
        quiet(tmp_path / "data1", url)
    assert store.read(names[0]) == (tmp_path / "data0" / names[0]).read_bytes()
    Roxxel(tmp_path / "data2" / "shard_*.rox").write(texts[:50], max_shard_bytes=40_000)
    with pytest.raises(ValueError, match="has another data set"):
        quiet(tmp_path / "data2", url)
    quiet(tmp_path / "data2", url, overwrite=True)
    quiet(url, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "data2")


def test_what_cannot_be_copied(folder, url, tmp_path):
    quiet(folder, url)
    for source, target, words in (
        (tmp_path / "none", url, "none is not there: correct the path"),
        (folder / "one", url, "one is a file: name its folder"),
        (url + "/none", tmp_path / "back", "/none has no files: correct the path"),
        (url, folder, "source exists already: choose another place, or remove it"),
        (folder, tmp_path / "back", "is in a bucket: one of them must be an address"),
        ("s3://", tmp_path / "back", "names no bucket"),
    ):
        with pytest.raises(ValueError, match=words):
            quiet(source, target)


def test_the_command(folder, url, link, capsys):
    from roxxel_dist.cli import main

    assert main(["copy", str(folder), url]) == 0
    assert capsys.readouterr().out == f"{url}: 4 files, 4 copied (17.83 MB)\n"
    assert main(["copy", str(folder), url]) == 0
    assert capsys.readouterr().out == f"{url}: 4 files, 0 copied (0 B), 4 were there\n"
    link.down = True
    assert main(["copy", str(folder), url, "--store_timeout", "0.3"]) == 74
    assert "refuses connections" in capsys.readouterr().err
    assert main(["copy", str(folder / "none"), url]) == 2
