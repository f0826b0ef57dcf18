"""What checks say: a finding about hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from roxxel_dist.launcher.preflight.host_info import Facts

Level = Literal["ok", "warning", "error"]
Hosts = Mapping[str, Facts]
"""What each host said, in the order of the ranks."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    level: Level
    check: str
    hosts: tuple[str, ...]
    text: str


def finding(level: Level, check: str, hosts: Sequence[str], text: str) -> Finding:
    """A finding about these hosts."""
    return Finding(level=level, check=check, hosts=tuple(hosts), text=text)
