"""The largest numbers that settings of data may have: with larger ones native code would end the process, out of memory
or threads."""

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

MOST_WORKERS = 1024
MOST_SHARD_BYTES = 1 << 50
LARGEST_BLOCK = 1 << 30


def check_range(name: str, value: int, most: int, what: str) -> None:
    """Raises UserError unless a setting is from 1 to `most`; `what` it counts is for the message."""
    if not 1 <= value <= most:
        raise UserError(f"{argument(name, value)}: {what}, from 1 to {most:,}")
