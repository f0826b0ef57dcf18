"""The ranks of this machine, of a job whose other machines have launchers of their own."""

from collections.abc import Mapping
from typing import Any

from roxxel_dist.launcher.backends.local import LocalBackend


class MemberBackend(LocalBackend):
    """As `LocalBackend`, with rank 0 on another machine or where another machine reaches it.

    Args:
        address: where rank 0 is for the ranks of this machine: an address of its own, or a name.
        leads: whether rank 0 is one of them.
    """

    def __init__(self, address: str, *, leads: bool) -> None:
        self.address: str | None = address
        self.leads = leads

    def describe(self) -> Mapping[str, Any]:
        """What `backends.make` needs."""
        return {"kind": "member", "address": self.address, "leads": self.leads}
