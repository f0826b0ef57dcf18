"""A data set comes to a bucket: its shards so that a part is never taken for the whole, and its index last."""

from collections.abc import Iterable
from pathlib import PurePosixPath

from roxxel_dist.objects.store import ObjectStore

INDEX = "shards.index"


def is_shard(name: str) -> bool:
    """Whether a file is a shard of tokens."""
    return name.endswith(".rox")


def is_index(name: str) -> bool:
    """Whether an object is the index of the data set beside it."""
    return PurePosixPath(name).name == INDEX


def data_folders(names: Iterable[str]) -> list[str]:
    """The folders, "" among them, that have shards."""
    return sorted({_folder(name) for name in names if is_shard(name)})


def first_shards(names: Iterable[str]) -> set[str]:
    """The first shard of each folder: without it the others are no data set, so it comes last."""
    firsts: dict[str, str] = {}
    for name in filter(is_shard, names):
        folder = _folder(name)
        firsts[folder] = min(name, firsts.get(folder, name))
    return set(firsts.values())


def write_indexes(store: ObjectStore, folders: Iterable[str]) -> None:
    """Write the index of each data set below a store's prefix."""
    from roxxel_dist.data.remote.index import write_index

    for folder in folders:
        write_index(ObjectStore.open(store.url.join(folder), timeout_s=store.timeout_s))


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
