"""Devices before jax makes any: whether it can make those asked for, and which numbers of them a training can use.

jax ends with an assertion where it finds no GPU, or goes on with the CPU; XLA ends the process for a flag that it does
not know. So both are looked at before. Standard library only.
"""

import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from roxxel_dist.process.exit_codes import UserError, pip_install

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


def mesh_shape(
    devices: int, *, n_devices: int = 0, fsdp: int = 1, expert: int = 1, tensor: int = 1
) -> tuple[int, int, int, int]:
    """The sizes of the axes "data", "fsdp", "expert" and "tensor" of a mesh.

    Args:
        devices: how many there are.
        n_devices: how many to use, 0 for all.
        fsdp: size of "fsdp", 0 for all that "expert" and "tensor" leave; "data" gets the rest.
        expert: size of "expert".
        tensor: size of "tensor".

    Raises:
        UserError: more devices are asked for than there are, or they cannot be shared out so.
    """
    if n_devices < 0 or n_devices > devices:
        raise UserError(
            f"n_devices is {n_devices}, but {devices} device(s) are here: use 0 for all, or launch more "
            f"(`roxxel-dist launch local --nprocs N --devices-per-proc M -- CMD…`)"
        )
    count = n_devices or devices
    if tensor < 1 or count % tensor:
        raise UserError(f"tensor_devices is {tensor}: it must be at least 1, and divide the {count} device(s)")
    share, left = f"{count} device(s)" + (f" / tensor_devices ({tensor})" if tensor > 1 else ""), count // tensor
    if expert < 1 or left % expert:
        best = max(size for size in range(1, left + 1) if left % size == 0 and size <= max(expert, 1))
        raise UserError(f"expert_devices is {expert}: it must divide {share}, as {best} does")
    share, left = share + (f" / expert_devices ({expert})" if expert > 1 else ""), left // expert
    fsdp = fsdp or left
    if fsdp < 1 or left % fsdp:
        raise UserError(f"fsdp_devices is {fsdp}: it must divide {share}; 0 stands for all of them")
    return left // fsdp, fsdp, expert, tensor


def check_shard_count(count: int, devices: int) -> None:
    """Check the number of devices. Raises UserError where there are more than `count` virtual shards."""
    if devices > count:
        raise UserError(
            f"virtual_shards is {count}, and there are {devices} devices, of which each has one shard at least: set "
            f"n_devices to {count} or fewer"
        )


def largest_divisor(count: int, most: int) -> int:
    """The largest number up to `most` that divides `count`; 1 where `most` is below."""
    return max(n for n in range(1, max(1, min(count, most)) + 1) if count % n == 0)


@dataclass(frozen=True, kw_only=True)
class DeviceNeeds:
    """Needs of a training as to the number of its devices. Its batches ask nothing: any number shares their rows."""

    n_devices: int = 0
    """Devices to use; 0: all."""
    fsdp: int = 1
    """Devices that share one copy of the parameters; 0: all that "expert" and "tensor" leave."""
    expert: int = 1
    """Devices that share the experts."""
    tensor: int = 1
    """Devices that compute on the same rows."""
    virtual_shards: int = 0
    """At least the devices; 0: none."""

    def check(self, devices: int) -> None:
        """Check that the training can use so many devices. Raises UserError with the reason."""
        shape = mesh_shape(devices, n_devices=self.n_devices, fsdp=self.fsdp, expert=self.expert, tensor=self.tensor)
        if self.virtual_shards:
            check_shard_count(self.virtual_shards, math.prod(shape))

    def refusal(self, devices: int) -> str:
        """The reason why the training cannot use so many devices; empty where it can."""
        try:
            self.check(devices)
        except UserError as error:
            return str(error)
        return ""
