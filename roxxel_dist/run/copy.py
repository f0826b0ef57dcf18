"""The command `copy`: a data set, a run, or any folder, to a bucket, from one, or from one to another."""

from pathlib import Path, PurePosixPath

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.remote.index import INDEX
from roxxel_dist.data.remote.publish import copy_data
from roxxel_dist.objects.copy import Copied, copy_to_folder
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import BucketSource, FolderSource
from roxxel_dist.place.run_place import bucket_url
from roxxel_dist.utils.progress import Progress

CHECKPOINT_TABLE = "digests.json"
"""The file that makes a checkpoint in a bucket valid."""


def copy(
    source: str, target: str, *, overwrite: bool = False, timeout_s: float = 120.0, progress: bool = True
) -> Copied:
    """Copy a folder or a prefix; at least one of the two is in a bucket.

    Objects that already have the same content are not sent again. An interrupted copy is never valid, and continues
    when you start it again: a local folder appears at the end; in a bucket, the index and the first shard of a data set
    come last, and the digest table of a checkpoint. Hidden files and leases are left out.

    Args:
        source: a folder, or s3://, gs:// or az:// and BUCKET/PREFIX.
        target: the same. A folder must not exist, or must be empty.
        overwrite: replace objects of the same names, and remove shards that the source does not have.
        timeout_s: seconds for which a failed operation of a store is retried.
        progress: show progress on stderr.

    Raises:
        ValueError: there is nothing to copy, neither is in a bucket, or the target holds other content.
        StoreError: a store fails, or the received bytes are damaged.
    """
    origin_url, target_url = bucket_url(source), bucket_url(target)
    if origin_url is None and target_url is None:
        raise UserError(
            f"neither {source} nor {target} is in a bucket: one of them must be an address: s3://…, gs://… or az://…"
        )
    origin = (
        FolderSource(Path(source))
        if origin_url is None
        else BucketSource(ObjectStore.open(origin_url, timeout_s=timeout_s))
    )
    files = [file for file in origin.files() if PurePosixPath(file.name).name != INDEX]
    if not files:
        raise UserError(f"{source} has no files: correct the path")
    total = sum(file.size for file in files)
    with Progress(progress).bar(f"copying {len(files)} files", max(1, total)) as advance:
        if isinstance(origin, BucketSource) and target_url is None:
            return copy_to_folder(origin, Path(target), files, advance)
        store = ObjectStore.open(target, timeout_s=timeout_s)
        return copy_data(origin, store, files, advance=advance, overwrite=overwrite, is_late=_is_table)


def _is_table(name: str) -> bool:
    return PurePosixPath(name).name == CHECKPOINT_TABLE
