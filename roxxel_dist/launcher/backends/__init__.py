"""Where ranks can run, a file each.

A backend is a class with what `base.Backend` says, and a line in BACKENDS. Where its file has a class `Options` too
(`base.Options` says what of), `roxxel-dist launch NAME` is made of it; the others have commands of their own.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.base import Backend

BACKENDS = {
    "local": "roxxel_dist.launcher.backends.local:LocalBackend",
    "ssh": "roxxel_dist.launcher.backends.ssh:SshBackend",
    "member": "roxxel_dist.launcher.backends.local:MemberBackend",
    "slurm": "roxxel_dist.launcher.backends.slurm.backend:SlurmBackend",
}
"""By the `kind` of their descriptions: those that a controller in a process of its own can have."""


def make(description: Mapping[str, Any]) -> "Backend":
    """The backend that said this in `describe`. Raises ValueError for a kind that there is not."""
    values = dict(description)
    kind = values.pop("kind")
    if kind not in BACKENDS:
        raise ValueError(f"there is no way to launch that is called {kind!r}: use {', '.join(BACKENDS)}")
    return resolve_name(BACKENDS[kind])(**values)


def options() -> dict[str, type[Any]]:
    """The class `Options` of every backend that has one, by the backend's name."""
    modules = {name: resolve_name(place.partition(":")[0]) for name, place in BACKENDS.items()}
    return {name: module.Options for name, module in modules.items() if hasattr(module, "Options")}
