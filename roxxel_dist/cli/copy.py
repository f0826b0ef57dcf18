"""The command copy."""

import dataclasses

import tyro

from roxxel_dist.cli.arguments import parse
from roxxel_dist.config import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyArgs:
    """Copy a data set, a run or any folder to a bucket, from one, or from one to another. What is there already with
    the same content is not sent again, so a copy that was ended goes on. It counts when it is whole, and not before."""

    source: tyro.conf.Positional[str]
    """A folder, or s3://BUCKET/PREFIX, gs:// or az://."""
    target: tyro.conf.Positional[str]
    """The same. A folder must not be there yet, or be empty."""
    overwrite: bool = False
    """Replace objects of the same names that have another content, and remove shards that the source does not have."""
    store_timeout: float = 120.0
    """Seconds for which an operation of an object store is tried again; then the command ends with 74."""


def copy(words: list[str]) -> int:
    """Copy a data set, a run or a folder to or from a bucket."""
    args = parse(CopyArgs, words, "copy")
    with usage_errors():
        from roxxel_dist import display
        from roxxel_dist.copy import copy as copied

        done = copied(args.source, args.target, overwrite=args.overwrite, timeout_s=args.store_timeout)
        there = f", {done.files - done.sent} were there" if done.sent < done.files else ""
        print(f"{args.target}: {done.files} files, {done.sent} copied ({display.size(done.sent_bytes)}){there}")
    return 0
