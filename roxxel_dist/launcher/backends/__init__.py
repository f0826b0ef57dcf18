"""Backends: places where ranks can run, a file or a folder each, and a line in BACKENDS.

The module of a line has a class `Options`, a subclass of `BackendOptions` (`control/new_job.py`) where it starts ranks
from here, else of `Options` (`job/backend.py`): its fields are the flags of `roxxel-dist launch NAME`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roxxel_dist.launcher.job.backend import Options

BACKENDS = {
    "local": "roxxel_dist.launcher.backends.local",
    "ssh": "roxxel_dist.launcher.backends.ssh",
    "exec": "roxxel_dist.launcher.backends.exec",
    "slurm": "roxxel_dist.launcher.backends.slurm.launch",
    "ray": "roxxel_dist.launcher.backends.ray.backend",
    "k8s": "roxxel_dist.launcher.backends.kubernetes.jobset",
    "member": "roxxel_dist.launcher.backends.kubernetes.node",
}


def options() -> dict[str, type["Options"]]:
    """The class `Options` of every backend, by the backend's name."""
    return {name: import_module(place).Options for name, place in BACKENDS.items()}
