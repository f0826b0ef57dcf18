"""As much of the module `ray` as drivers and workers behind `process_ray` name: the real one takes half a second."""

import sys
from types import ModuleType
from typing import Any

LOST = ("WorkerCrashedError", "LocalRayletDiedError", "TaskCancelledError", "RayTaskError", "RuntimeEnvSetupError")


def install() -> None:
    """For a process of its own that has not imported `ray`."""
    ray, util, exceptions = (ModuleType(name) for name in ("ray", "ray.util", "ray.exceptions"))
    error = type("RayError", (Exception,), {})
    vars(exceptions).update({name: type(name, (error,), {}) for name in (*LOST, "GetTimeoutError")}, RayError=error)
    vars(util).update(get_node_ip_address=lambda: "127.0.0.1")
    vars(ray).update(util=util, exceptions=exceptions, remote=_remote)
    for module in (ray, util, exceptions):
        sys.modules.setdefault(module.__name__, module)


def _remote(**options: Any) -> Any:
    """It checks no amounts."""
    return lambda body: body
