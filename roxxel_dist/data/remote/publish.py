"""A data set comes to a bucket: its shards so that a part is never taken for the whole, and its index last."""

from collections.abc import Callable, Iterable, Sequence

from roxxel_dist.data.discovery import ENDING
from roxxel_dist.data.remote.index import INDEX, write_index
from roxxel_dist.objects.copy import Advance, Copied, copy_to_bucket
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import Source, SourceFile


def copy_data(
    source: Source,
    store: ObjectStore,
    files: Sequence[SourceFile],
    *,
    advance: Advance,
    overwrite: bool = False,
    is_late: Callable[[str], bool] = lambda name: False,
) -> Copied:
    """Copy files, data sets among them, to a bucket, and write the index of each data set.

    Of each data set the first shard is sent behind the others, without which they are none, and then the index.

    Args:
        source: where the files are.
        store: the destination.
        files: of the source; no index among them.
        advance: called with bytes that are done.
        overwrite: replace objects of the same names with another content, and remove shards that are not among `files`.
        is_late: whether a file is to come behind the others as a first shard does.

    Raises:
        ValueError: an object with another content, or another data set, is there, and `overwrite` is off.
        StoreError: a store does not do it.
    """
    names = [file.name for file in files]
    firsts, folders = first_shards(names), {folder_of(name) for name in names if name.endswith(ENDING)}
    _make_room(store, set(names), folders, overwrite)
    copied = copy_to_bucket(
        source,
        store,
        files,
        stage=lambda name: int(name in firsts or is_late(name)),
        advance=advance,
        overwrite=overwrite,
    )
    for folder in sorted(folders):
        write_index(ObjectStore.open(store.url.join(folder), timeout_s=store.timeout_s))
    return copied


def first_shards(names: Iterable[str]) -> set[str]:
    """The first shard of each folder."""
    firsts: dict[str, str] = {}
    for name in names:
        if name.endswith(ENDING):
            firsts[folder_of(name)] = min(name, firsts.get(folder_of(name), name))
    return set(firsts.values())


def folder_of(name: str) -> str:
    """The folder that a file is in, "" at the top."""
    return name.rpartition("/")[0]


def _make_room(store: ObjectStore, names: set[str], folders: set[str], overwrite: bool) -> None:
    """Refuse what is of another data set, or remove it; an index goes before the shards that it tells of."""
    there = {info.key for info in store.list()}
    strange = sorted(key for key in there - names if key.endswith(ENDING) and folder_of(key) in folders)
    if strange and not overwrite:
        which = ", ".join(strange[:3])
        raise ValueError(f"{store.url} has another data set ({which}): choose another place, or give overwrite=True")
    if overwrite:
        store.delete(sorted(there & {f"{folder}/{INDEX}".lstrip("/") for folder in folders}))
        store.delete(strange)
