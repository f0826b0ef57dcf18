"""A run by its name, a folder or an address in a bucket: the place that tells rooms above which of the two. No jax."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roxxel_dist.objects.url import ObjectUrl, is_url
from roxxel_dist.place.bucket_folder import BucketFolder

if TYPE_CHECKING:
    from roxxel_dist.place.bucket_run import BucketRun

RunName = str | os.PathLike[str]


def bucket_url(name: RunName | None) -> ObjectUrl | None:
    """The address of a run, or of a study, in a bucket; None for a folder and for no name.

    Raises UserError for an address that names no bucket.
    """
    return ObjectUrl.parse(name) if name and is_url(name) else None


def local_folder(name: RunName | None) -> Path | None:
    """The folder that a name means by itself; None for a run in a bucket and for no name."""
    return Path(name) if name and not is_url(name) else None


def bucket_folder(run: RunName, local_dir: str | Path | None = None, *, read_only: bool = True) -> BucketFolder | None:
    """The local folder of a run in a bucket, to fetch its files into; None where the run is a folder."""
    return BucketFolder(run, local_dir, read_only=read_only) if is_url(run) else None


def bucket_run(
    run: RunName, local_dir: str | Path | None = None, *, read_only: bool = True, timeout_s: float | None = None
) -> BucketRun | None:
    """A run in a bucket with its checkpoints, for which jax is imported; None where the run is a folder."""
    if not is_url(run):
        return None
    from roxxel_dist.place.bucket_run import BucketRun

    return BucketRun(run, local_dir, read_only=read_only, timeout_s=timeout_s)


def local_run(run: RunName, local_dir: str | Path | None = None, *, read_only: bool = True) -> Path:
    """The folder of a run: as named or, of one in a bucket, a local one with its files; checkpoints come when read."""
    bucket = bucket_folder(run, local_dir, read_only=read_only)
    return Path(run) if bucket is None else bucket.pull()
