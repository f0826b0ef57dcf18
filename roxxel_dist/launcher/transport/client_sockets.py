"""The TCP connections of a client from which nothing comes: the kernel knows what their other side has not taken."""

import ipaddress
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

from roxxel_dist.cluster.process_stat import SESSION, processes

ESTABLISHED, SYN_SENT = 1, 2
RETRANSMIT = 1
"""The timer of a connection on which something is sent again, for nothing acknowledges it."""


def stuck_connection(session: int) -> str:
    """The connection of a session's programs that does not get on, for people; or ""."""
    for pid, fields in processes():
        if int(fields[SESSION]) == session:
            sockets = set(_sockets(pid))
            for version in ("tcp", "tcp6"):
                with suppress(OSError), open(f"/proc/{pid}/net/{version}", encoding="ascii") as file:
                    lines = (line.split() for line in file.readlines()[1:])
                    if said := next(_stuck(fields for fields in lines if fields[9] in sockets), ""):
                        return said
    return ""


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of the sockets of a process; none where it is gone, or is another user's."""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{number}").partition(":[")
                if kind == "socket":
                    yield inode.rstrip("]")


def _stuck(lines: Iterable[list[str]]) -> Iterator[str]:
    """The connections of a table in /proc that do not get on: their fields 2 to 6 are addresses, state and queues."""
    for fields in lines:
        address, port = _place(fields[2])
        place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        state, (timer, _), repeats = int(fields[3], 16), fields[5].split(":"), int(fields[6], 16)
        if state == SYN_SENT:
            yield f"{place} takes no connection"
        elif state == ESTABLISHED and int(timer, 16) == RETRANSMIT and repeats:
            count = int(fields[4].partition(":")[0], 16)
            yield (
                f"{place} has taken the connection, and does not acknowledge {count} bytes: packets of full size are "
                f"lost (an MTU: `ping -M do -s {1452 if ':' in address else 1472} {address}`), or its link is cut"
            )


def _place(text: str) -> tuple[str, int]:
    """Address and port as /proc writes them: each 4 bytes in the order of this machine."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8]) for start in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)
