"""The command `copy`: a data set, a run, or any folder, to a bucket, from one, or from one to another."""

from pathlib import Path, PurePosixPath

from roxxel_dist.data.build.progress import Progress
from roxxel_dist.data.remote.index import INDEX
from roxxel_dist.data.remote.publish import copy_data
from roxxel_dist.objects.copy import Copied, copy_to_folder
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import BucketSource, FolderSource
from roxxel_dist.objects.url import is_url

CHECKPOINT_TABLE = "digests.json"
"""Of a checkpoint, what makes it count in a bucket."""


def copy(
    source: str, target: str, *, overwrite: bool = False, timeout_s: float = 120.0, progress: bool = True
) -> Copied:
    """Copy a folder or a prefix; at least one of the two is in a bucket.

    Objects that are there already with the same content are not sent again. A copy that was ended is not taken for
    whole, and goes on when it is started again: a folder appears at the end; of a data set in a bucket the index and
    the first shard come last, of a checkpoint its table of digests. Hidden files and leases are left out.

    Args:
        source: a folder, or s3://, gs:// or az:// and BUCKET/PREFIX.
        target: the same. A folder must not be there yet, or be empty.
        overwrite: replace objects of the same names, and remove shards that the source does not have.
        timeout_s: seconds for which an operation of a store is tried again.
        progress: show on stderr what is being done.

    Raises:
        ValueError: there is nothing to copy, neither is in a bucket, or something else is there.
        StoreError: a store does not do it, or what came is damaged.
    """
    if not is_url(source) and not is_url(target):
        raise ValueError(
            f"neither {source} nor {target} is in a bucket: one of them must be an address: s3://…, gs://… or az://…"
        )
    origin = (
        BucketSource(ObjectStore.open(source, timeout_s=timeout_s)) if is_url(source) else FolderSource(Path(source))
    )
    files = [file for file in origin.files() if PurePosixPath(file.name).name != INDEX]
    if not files:
        raise ValueError(f"{source} has no files: correct the path")
    total = sum(file.size for file in files)
    with Progress(progress).bar(f"copying {len(files)} files", max(1, total)) as advance:
        if isinstance(origin, BucketSource) and not is_url(target):
            return copy_to_folder(origin, Path(target), files, advance)
        store = ObjectStore.open(target, timeout_s=timeout_s)
        return copy_data(origin, store, files, advance=advance, overwrite=overwrite, is_late=_is_table)


def _is_table(name: str) -> bool:
    return PurePosixPath(name).name == CHECKPOINT_TABLE
