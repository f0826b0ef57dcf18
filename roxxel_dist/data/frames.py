"""What `data.encode` and its helper processes say to each other through pipes: lists of byte strings, and no pickle."""

import struct
from collections.abc import Sequence
from typing import IO

HEAD = struct.Struct("<I")


def write_frame(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    """Send some byte strings as one frame."""
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    stream.write(b"".join([HEAD.pack(len(parts)), lengths, *parts]))
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes] | None:
    """The byte strings of the next frame; None where the other side has ended."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (count,) = HEAD.unpack(head)
    table = stream.read(8 * count)
    if len(table) < 8 * count:
        return None
    parts = [stream.read(length) for length in struct.unpack(f"<{count}Q", table)]
    return parts if sum(map(len, parts)) == sum(struct.unpack(f"<{count}Q", table)) else None
