"""What, besides config and data, determines the last bits of a loss; and the cache of compiled programs.

Decision 9.
"""

import contextlib
import errno
import functools
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from roxxel_dist.cluster.jax_private import backends_are_initialized
from roxxel_dist.cluster.xla_flags import CPU_DEVICES, DETERMINISTIC
from roxxel_dist.process.durable import cache_folder
from roxxel_dist.process.exit_codes import UserError

DEFAULT_MIN_COMPILE_S = 1.0
"""jax's own: programs that compile faster are not kept in its cache."""
SHARD_THREADS = 16
"""Threads of XLA's pool with fewer than half as many virtual shards."""
SETTINGS = ("jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64")
"""Settings of jax that decide bits."""
DUMPS = "xla_dump"
"""Begins the flags that write what XLA does into files."""
OF_TOPOLOGY = ("devices", "processes", "distributed", "xla_flags")
"""Entries of the fingerprint that depend on the number of devices and processes, simulated ones included."""


def pin_threads(count: int | None = None) -> int:
    """Fix the size of XLA's CPU thread pool, before jax makes its first device, and return it.

    XLA splits a contraction by the size of the pool, so the pool decides the last bits of a result: one number for
    every rank and every restart keeps a run's losses bitwise the same.

    Args:
        count: that of an earlier run; by default PJRT_NPROC, or else the larger of the machine's cores and the devices
            of this process.
    """
    if count is None:
        devices = int(os.environ.get("ROXXEL_LOCAL_DEVICES") or 1)
        count = int(os.environ.get("PJRT_NPROC") or max(os.cpu_count() or 1, devices))
    os.environ["PJRT_NPROC"] = str(count)
    return count


def pin_for_run(virtual_shards: int, count: int | None) -> None:
    """`pin_for_shards` where there are virtual shards, else `pin_threads`; raises as these."""
    if virtual_shards:
        pin_for_shards(virtual_shards)
    else:
        pin_threads(count)


def pin_for_shards(virtual_shards: int) -> None:
    """Fix what decides bits for a run with virtual shards, on any machine, before jax makes its first device.

    XLA's CPU thread pool has two threads a shard, 16 at least: a number of the run, not of a machine or of its devices,
    and enough where each device waits in a collective. On a GPU it is `make_deterministic`. 0 shards change nothing.

    Raises:
        ValueError: jax has made its devices with another pool, or XLA_FLAGS forbid it.
        RuntimeError: jax uses its GPUs already, without the flag.
    """
    if not virtual_shards:
        return
    count = str(max(2 * virtual_shards, SHARD_THREADS))
    if not backends_are_initialized():
        os.environ["PJRT_NPROC"] = count
        make_deterministic()
    elif jax.default_backend() == "gpu":
        make_deterministic()
    elif jax.default_backend() == "cpu" and os.environ.get("PJRT_NPROC") != count:
        raise UserError(
            f"virtual_shards is {virtual_shards} and needs a thread pool of {count} in XLA. jax has made its devices "
            f"with PJRT_NPROC={os.environ.get('PJRT_NPROC', '')}: set PJRT_NPROC={count} before the program starts "
            f"(of `launch`: `--env PJRT_NPROC={count}`)"
        )


def make_deterministic() -> None:
    """Have XLA give the same bits each time, through XLA_FLAGS, before jax makes its first device.

    The flags that are there stay. On a CPU the flag changes nothing.

    Raises:
        ValueError: XLA_FLAGS forbids it, or names a file that cannot be read.
        RuntimeError: jax uses its GPUs already.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA takes it for the name of a file with flags
        try:
            flags = Path(flags).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UserError(f"XLA_FLAGS is {flags!r}, a file that cannot be read ({error.strerror})") from error
    given = [flag for flag in flags.split() if flag.strip("-").split("=")[0] == DETERMINISTIC]
    if given and given[-1].lower().endswith(("=false", "=0")):
        raise UserError(
            f"deterministic is true, but XLA_FLAGS has {given[-1]}: take it out, or set deterministic to false"
        )
    if given:
        return
    if backends_are_initialized() and jax.default_backend() == "gpu":
        raise RuntimeError(
            f"deterministic is true, but jax uses its GPUs already, and XLA has read its flags: ask for it first, or "
            f"set XLA_FLAGS=--{DETERMINISTIC}=true before the program starts"
        )
    os.environ["XLA_FLAGS"] = f"{flags} --{DETERMINISTIC}=true".strip()


def is_deterministic() -> bool:
    """Whether XLA_FLAGS ask for the same bits each time, as `make_deterministic` does."""
    given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.strip("-").split("=")[0] == DETERMINISTIC]
    return bool(given) and not given[-1].lower().endswith(("=false", "=0"))


PROGRAMS = "programs"
"""A key of a fingerprint: the first version of roxxel-dist that computes a step as this one does, to the bit."""
NEWEST_PROGRAMS = "roxxel-dist 0.2.0"
"""That of this version."""


def numerics_fingerprint() -> dict[str, Any]:
    """Facts that can change the last bits of a loss, besides config and data; plain values, to be kept with a run.

    Makes jax's devices, so it comes after `make_deterministic` and `initialize`.
    """
    devices, threads = jax.devices(), os.environ.get("PJRT_NPROC")
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model name\s*: *(.+)", info, re.MULTILINE)  # its instructions decide how sums are split
    cpu = f"{platform.machine()} {model[1].strip() if model else 'CPU'}"
    return {
        PROGRAMS: NEWEST_PROGRAMS,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "pjrt_nproc": int(threads) if threads else None,
        "processes": jax.process_count(),
        "distributed": jax.distributed.is_initialized(),  # on CPU devices reduce in another order then
        "devices": dict(Counter(cpu if d.platform == "cpu" else d.device_kind for d in devices)),
        "platform": " ".join(devices[0].client.platform_version.split()),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        **{name: getattr(jax.config, name) for name in SETTINGS},
    }


def without_topology(bits: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint without the numbers of devices and processes: everything that determines the bits of a run with
    virtual shards. Kinds of devices stay; threads count on CPUs, deterministic operations on GPUs, dumps never."""
    platform_name = str(bits.get("platform", "")).lower()
    flags = {flag.split("=")[0]: flag for flag in str(bits.get("xla_flags", "")).split()}  # of two the last one holds
    without = [f"--{CPU_DEVICES}", f"--{DUMPS}"]
    if not re.search("cuda|rocm", platform_name):
        without.append(f"--{DETERMINISTIC}")
    kept = {name: value for name, value in bits.items() if name not in OF_TOPOLOGY}
    if not platform_name.startswith("cpu"):
        kept.pop("pjrt_nproc", None)
    kept["xla_flags"] = " ".join(sorted(flag for name, flag in flags.items() if not name.startswith(tuple(without))))
    return kept | {"devices": sorted(bits.get("devices", {}))}


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each entry of two fingerprints that differs; what only one of the two has is left out."""
    return [f"{name}: {saved[name]!r} -> {now[name]!r}" for name in now if name in saved and saved[name] != now[name]]


def enable_compilation_cache(folder: str | Path | None = None) -> None:
    """Keep compiled programs in the user's cache folder, so that a restart compiles nothing twice.

    A folder chosen in the environment (JAX_COMPILATION_CACHE_DIR) or by an earlier call wins.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        folder = Path(folder or cache_folder() / "xla")
        if _is_writable(folder):
            jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default of one second leaves out most of a small model's programs. It holds for the whole process, so what its
    # program or its environment has chosen stays.
    if jax.config.jax_persistent_cache_min_compile_time_secs == DEFAULT_MIN_COMPILE_S:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@functools.cache  # one message a folder
def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if jax.process_index() == 0:
            print(
                f"roxxel-dist: {folder} cannot be written ({error.strerror}): compiled programs are not kept; "
                f"JAX_COMPILATION_CACHE_DIR names another folder",
                file=sys.stderr,
                flush=True,
            )
        return False
    return True
