"""The command copy."""

import dataclasses

from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.settings.usage_errors import usage_errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyArgs:
    """Copy a data set, a run or any folder to a bucket, from a bucket, or between buckets. Files that the target
    already has with the same content are not sent again, so you can repeat an interrupted copy. The copy becomes
    visible when it is complete."""

    source: Positional[str]
    """A folder, or an address: s3://BUCKET/PREFIX, gs://... or az://..."""
    target: Positional[str]
    """A folder that does not exist or is empty, or an address."""
    overwrite: bool = False
    """Replace objects that have other content, and remove shards that the source does not have."""
    store_timeout: float = 120.0
    """Seconds to retry an operation of the object store. After that the exit code is 74."""


def copy(words: list[str]) -> int:
    """Copy a data set, a run or a folder to or from a bucket."""
    args = parse(CopyArgs, words, "copy")
    with usage_errors():
        from roxxel_dist.run.copy import copy as copied
        from roxxel_dist.utils import display

        done = copied(args.source, args.target, overwrite=args.overwrite, timeout_s=args.store_timeout)
        there = f", {done.files - done.sent} were there" if done.sent < done.files else ""
        print(f"{args.target}: {done.files} files, {done.sent} copied ({display.size(done.sent_bytes)}){there}")
    return 0
