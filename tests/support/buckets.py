"""Data sets in the bucket of a test's server."""

from dataclasses import replace
from pathlib import Path

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, pack, unpack, write_index
from roxxel_dist.objects.store import ObjectStore


def put(server, folder: Path, name: str, *, index: bool = True) -> str:
    """Copy a data set into the bucket; its address."""
    store = ObjectStore.open(server.url(name))
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            store.upload(path, path.name)
    if index:
        write_index(store)
    return str(store.url)


def opened(url: str, cache: Path, *, cache_gb: float = 1.0, store_timeout: float = 20.0) -> Roxxel:
    """A data set in a bucket with a cache of its own."""
    return Roxxel(url, remote=RemoteConfig(cache_dir=str(cache), cache_gb=cache_gb, store_timeout=store_timeout))


def replace_object(url: str, name: str, data: bytes, *, is_known: bool = True) -> None:
    """Put another object in a shard's place; `is_known`: the index has its ETag, and all else as it was."""
    store = ObjectStore.open(url)
    etag = store.write(name, data)
    if is_known:
        entries = unpack(INDEX, store.read(INDEX))
        store.write(INDEX, pack([replace(each, etag=etag) if each.name == name else each for each in entries]))
