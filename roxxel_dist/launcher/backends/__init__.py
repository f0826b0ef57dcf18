"""Where ranks can run, a file each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roxxel_dist.launcher.link import Backend


def make(description: Mapping[str, Any]) -> "Backend":
    """The backend that said this in `describe`. Raises ValueError for a kind that there is not."""
    values = dict(description)
    kind = values.pop("kind")
    if kind == "local":
        from roxxel_dist.launcher.backends.local import LocalBackend

        return LocalBackend(**values)
    if kind == "ssh":
        from roxxel_dist.launcher.backends.ssh import SshBackend

        return SshBackend(**values)
    if kind == "member":
        from roxxel_dist.launcher.backends.member import MemberBackend

        return MemberBackend(**values)
    if kind == "slurm":
        from roxxel_dist.launcher.backends.slurm import SlurmBackend

        return SlurmBackend(**values)
    raise ValueError(f"there is no way to launch that is called {kind!r}: use local, ssh, member or slurm")
