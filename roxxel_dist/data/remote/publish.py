"""Copying a data set to a bucket: an incomplete copy is never valid, and the index comes last."""

from collections.abc import Callable, Iterable, Sequence

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.files.discovery import ENDING
from roxxel_dist.data.remote.index import INDEX, write_index
from roxxel_dist.objects.copy import Advance, Copied, copy_to_bucket
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import Source, SourceFile
from roxxel_dist.utils.voice import argument


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

    The first shard of each data set is sent after the others, which are not valid without it, and then the index.

    Args:
        source: of the files.
        store: the destination.
        files: of the source, without an index.
        advance: called with the number of copied bytes.
        overwrite: replace objects of the same names with other content, and remove shards that are not among `files`.
        is_late: whether a file must be sent after the others, like a first shard.

    Raises:
        ValueError: an object with other content, or another data set, exists, and `overwrite` is off.
        StoreError: a store fails.
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
    """The folder of a file, "" at the top."""
    return name.rpartition("/")[0]


def _make_room(store: ObjectStore, names: set[str], folders: set[str], overwrite: bool) -> None:
    """Refuse or remove shards of another data set; an index is removed before its shards."""
    there = {info.key for info in store.list()}
    strange = sorted(key for key in there - names if key.endswith(ENDING) and folder_of(key) in folders)
    if strange and not overwrite:
        which = ", ".join(strange[:3])
        raise UserError(
            f"{store.url} has another data set ({which}): choose another place, or give {argument('overwrite')}"
        )
    if overwrite:
        store.delete(sorted(there & {f"{folder}/{INDEX}".lstrip("/") for folder in folders}))
        store.delete(strange)
