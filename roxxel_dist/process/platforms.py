"""Whether jax can make the devices that the environment asks for, known before jax makes any. Standard library only.

jax ends with an assertion where it finds no GPU, or goes on with the CPU; XLA ends the process for a flag that it does
not know. So both are looked at before.
"""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from roxxel_dist.process.exit_codes import pip_install

VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_LIBRARY_PATH", "PJRT_NAMES_AND_LIBRARY_PATHS", "CUDA_VISIBLE_DEVICES")
"""What is looked at in the environment of a process."""
EXTRAS = {"cuda": "cuda12", "gpu": "cuda12", "tpu": "tpu"}
"""The extra of this package that installs the plugin of a platform."""
PLUGINS = {"cuda": "xla_cuda", "rocm": "xla_rocm", "oneapi": "xla_oneapi"}
"""How the modules begin that make a platform of GPUs, in the namespace package `jax_plugins`."""
KNOWN = {*PLUGINS, "cpu", "gpu", "tpu"}
OTHERS = "others"
"""Among the installed platforms: a plugin whose platform has a name that is not known here."""
NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""The places at which jax looks for a GPU of NVIDIA."""
PARSE_S = 60.0
PARSE = "from jaxlib import xla_client; xla_client.CompileOptions().executable_build_options.debug_options"
"""A program that has XLA read its flags, in a fifth of the time that jax takes to make a device."""
NO_DEVICE = re.compile(r"--xla_force_host_platform_device_count=(?:-\d+|0+)(?!\S)")
FATAL = re.compile(r"^[EF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] (?:Check failed: .* )?(.+)$", re.MULTILINE)
"""A line that XLA logs before it ends the process."""


def why_no_devices(environ: Mapping[str, str]) -> str | None:
    """The reason why jax cannot make its devices with these variables, with the fix; None where none is known."""
    return why_no_platform(environ.get("JAX_PLATFORMS", ""), environ) or why_bad_flags(environ)


def why_no_platform(platforms: str, environ: Mapping[str, str]) -> str | None:
    """The reason why jax does not start with `platforms` (as in JAX_PLATFORMS); None where nothing is known.

    jax must find each that is named, but for cuda beside others, and takes the first one that is there. One of a plugin
    that is not known here is not judged.
    """
    if not platforms:
        return None
    names, installed = platforms.split(","), {"cpu"}
    if not set(names) <= installed:
        installed = _installed(environ)
    head = f"JAX_PLATFORMS is {platforms}"
    unset = "unset it (JAX_PLATFORMS=cpu for the CPU)"
    for name in names if len(names) == 1 else [name for name in names if name != "cuda"]:
        found = installed & {*PLUGINS} if name == "gpu" else installed & {name}
        if not found and not (OTHERS in installed and name not in KNOWN):
            install = f"install it: {pip_install(EXTRAS[name])}, or " if name in EXTRAS else ""
            return f"{head}, and this jax has {', '.join(sorted(installed - {OTHERS}))}: {install}{unset}"
        if found == {"cuda"} and not any(map(os.path.exists, NVIDIA)):
            places = ", ".join(NVIDIA[:2])
            return f"{head}, and no NVIDIA GPU is here ({places}): load its driver, give the container one, or {unset}"
    return None


def _installed(environ: Mapping[str, str]) -> set[str]:
    """The platforms of which this Python has the plugin, `OTHERS` among them."""
    from importlib.metadata import entry_points  # slow, and seldom needed

    spec = PathFinder.find_spec("jax_plugins")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    modules = {path.name for folder in folders for path in Path(folder).iterdir() if not path.name.startswith("_")}
    modules |= {entry.value.rpartition(".")[2] for entry in entry_points(group="jax_plugins")}
    found = {name for name, start in PLUGINS.items() if any(module.startswith(start) for module in modules)}
    if os.path.exists(environ.get("TPU_LIBRARY_PATH", "")) or PathFinder.find_spec("libtpu") is not None:
        found.add("tpu")
    named = environ.get("PJRT_NAMES_AND_LIBRARY_PATHS")
    strange = [module for module in modules if not module.startswith(tuple(PLUGINS.values()))]
    return found | {"cpu"} | ({OTHERS} if named or strange else set())


def why_bad_flags(environ: Mapping[str, str]) -> str | None:
    """The reason why XLA would end a process for its XLA_FLAGS, with the fix; None where it takes them.

    Only XLA knows its flags, so a process that has them is started, once for each value.
    """
    given = environ.get("XLA_FLAGS", "")
    flags = given.strip()
    if given and not flags:
        return f"XLA_FLAGS is {given!r}, which XLA takes for the name of a file: unset it"
    if (count := NO_DEVICE.search(flags)) is not None:
        return f"XLA_FLAGS is {flags!r}, and {count[0]} leaves no device: use 1 or more, or leave it out"
    return _why_refused(flags) if flags else None


@functools.cache
def _why_refused(flags: str) -> str | None:
    env = {**os.environ, "XLA_FLAGS": flags}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PARSE],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PARSE_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):  # the process itself will say what is wrong
        return None
    if done.returncode == 0 or not (problems := FATAL.findall(done.stderr)):
        return None
    shown = problems[0].rstrip(".")
    if (unknown := re.search(r"Unknown flags? in XLA_FLAGS: (.+)", shown)) is not None:
        shown = f"{unknown[1]} is no flag of it"
    return f"XLA_FLAGS is {flags!r}, and XLA does not take it ({shown}): correct that flag, or leave it out"
