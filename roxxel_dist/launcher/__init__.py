"""Many processes as one job: what to start, where, and what to do when one dies. Imports no jax.

The names are imported when they are first used: every rank passes through this file on its way to its program.
"""

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "JobSpec": "job.spec",
    "log_dir_for": "job.spec",
    "new_run_id": "job.spec",
    "run": "control.supervisor",
    "LocalBackend": "backends.local",
}

if TYPE_CHECKING:
    from roxxel_dist.launcher.backends.local import LocalBackend as LocalBackend
    from roxxel_dist.launcher.control.supervisor import run as run
    from roxxel_dist.launcher.job.spec import JobSpec as JobSpec
    from roxxel_dist.launcher.job.spec import log_dir_for as log_dir_for
    from roxxel_dist.launcher.job.spec import new_run_id as new_run_id

__all__ = ["JobSpec", "LocalBackend", "log_dir_for", "new_run_id", "run"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
