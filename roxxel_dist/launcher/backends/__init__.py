"""Where ranks can run, a file or a folder each, and a line in BACKENDS.

The module of a line has a class `Options` (`base.Options`): its fields are the flags of `roxxel-dist launch NAME`. The
class that the line names is the backend (`base.Backend`); Kubernetes has none, as it starts nothing.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from roxxel_dist.cluster.exit_codes import UserError

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.base import Backend, Options

BACKENDS = {
    "local": "roxxel_dist.launcher.backends.local:LocalBackend",
    "ssh": "roxxel_dist.launcher.backends.ssh:SshBackend",
    "slurm": "roxxel_dist.launcher.backends.slurm.launch:SlurmBackend",
    "ray": "roxxel_dist.launcher.backends.ray.backend:RayBackend",
    "k8s": "roxxel_dist.launcher.backends.kubernetes.jobset",
    "member": "roxxel_dist.launcher.backends.kubernetes.node:MemberBackend",
}


def make(description: Mapping[str, Any]) -> "Backend":
    """The backend that said this in `describe`. Raises ValueError for a kind that there is not."""
    values = dict(description)
    kind = values.pop("kind")
    if kind not in BACKENDS:
        raise UserError(f"there is no way to launch that is called {kind!r}: use {', '.join(BACKENDS)}")
    return resolve_name(BACKENDS[kind])(**values)


def options() -> dict[str, type["Options"]]:
    """The class `Options` of every backend, by the backend's name."""
    return {name: resolve_name(place.partition(":")[0]).Options for name, place in BACKENDS.items()}
