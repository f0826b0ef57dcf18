"""One host of a job whose hosts are started by somebody else, each with a launcher of its own: pods, containers.

Nobody tells these nodes anything: each knows its number, and by what name it finds the first one.
"""

import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from roxxel_dist.launcher.preflight.host_info import is_loopback, resolved

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "hosts": ("ROXXEL_HOSTS",),
    "index": ("ROXXEL_INDEX", "JOB_COMPLETION_INDEX"),
    "first": ("ROXXEL_FIRST_HOST",),
    "port": ("ROXXEL_PORT",),
    "procs_per_host": ("ROXXEL_PROCS_PER_HOST",),
    "attempt": ("ROXXEL_RESTARTS",),
    "run_id": ("ROXXEL_RUN_NAME",),
}
"""Where a flag that is not given is looked for. None of them is one that a rank gets."""
DEFAULTS: Mapping[str, str | int | None] = {
    "hosts": 1,
    "index": 0,
    "first": "localhost",
    "port": 29500,
    "procs_per_host": 1,
    "attempt": 0,
    "run_id": None,
}
"""What a flag is that nobody gives."""
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?|[0-9A-Fa-f:.]+")
RETRY_S = 0.5
TELL_S = 3.0


class NoFirstHostError(Exception):
    """The first host was not found in time. The message is for people."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Which host of which job this is. Raises ValueError for what cannot be."""

    hosts: int
    index: int
    first: str
    """The name or the address of host 0."""
    procs: int
    """Processes of each host."""

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ValueError(f"--hosts {self.hosts}: must be at least 1")
        if not 0 <= self.index < self.hosts:
            raise ValueError(
                f"--index {self.index}: must be within 0 and {self.hosts - 1}, for there are {self.hosts} hosts"
            )
        if self.procs < 1:
            raise ValueError(f"--procs-per-host {self.procs}: must be at least 1")
        if not NAME.fullmatch(self.first):
            raise ValueError(f"--first {self.first!r} cannot be a host: give the name or the address of host 0")

    @property
    def is_coordinator(self) -> bool:
        """Whether this is host 0."""
        return self.index == 0


def flags_from_environment(
    flags: Mapping[str, str | int | None], environment: Mapping[str, str]
) -> dict[str, str | int | None]:
    """The flags, those that are None filled in from the environment (`VARIABLES`).

    Raises:
        ValueError: a variable that must be a number is none; it is named.
    """
    filled = dict(flags)
    for name, variables in VARIABLES.items():
        variable = next((variable for variable in variables if environment.get(variable)), None)
        if filled.get(name) is not None or variable is None:
            continue
        text = environment[variable]
        is_text = name in ("first", "run_id")
        if not is_text and not re.fullmatch(r"\d{1,9}", text):
            raise ValueError(f"{variable} is {text!r}: must be a number, as of --{name.replace('_', '-')}")
        filled[name] = text if is_text else int(text)
    return filled


def find_first(node: Node, limit_s: float, say: Callable[[str], None], pause: Callable[[float], bool]) -> str | None:
    """Where rank 0 is for the ranks of this node: for host 0 its own address, for others the name.

    A name may need some time until it is known, and may still mean a host of an earlier attempt. Others are given
    the name, not what it means now, so that whoever connects in vain asks again.

    Args:
        node: which host this is.
        limit_s: seconds to wait.
        say: tells people.
        pause: waits so many seconds; True where somebody asked to stop.

    Returns:
        The address or name; None where `pause` said so.

    Raises:
        NoFirstHostError: the time is over.
    """
    begun = time.monotonic()
    said = False
    while True:
        address, why = _look(node)
        if address:
            return address
        waited = time.monotonic() - begun
        if waited >= limit_s:
            raise NoFirstHostError(f"{why}; waited {limit_s:g} s (--host-timeout)")
        if waited >= TELL_S and not said:
            said = True
            say(f"{why}; waiting up to {limit_s:g} s (--host-timeout)")
        if pause(min(RETRY_S, limit_s - waited)):
            return None


def _look(node: Node) -> tuple[str, str]:
    """(where rank 0 is, or why that is not known)."""
    addresses = resolved(node.first)
    if not addresses:
        return "", f"--first {node.first}: no such name; a headless service or the hosts file must tell it"
    is_literal = node.first == "localhost" or node.first in addresses
    outside = [address for address in addresses if is_literal or not is_loopback(address)]
    if not outside:
        text = "which other hosts cannot reach; have /etc/hosts name its real address"
        return "", f"--first {node.first} resolves to {addresses[0]}, {text}"
    if not node.is_coordinator:
        return node.first, ""
    for address in outside:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address, ""
    return "", f"--first {node.first} is {outside[0]}, which is no address of this machine, and --index 0 is this one"
