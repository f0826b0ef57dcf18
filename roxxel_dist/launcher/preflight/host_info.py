"""What preflight wants to know of a host, found out on that host. Starts fast: no jax, and numpy only for a data set.

Nothing here changes the host: the one file that is made (to learn whether that is possible) is gone at once.
"""

import errno
import fcntl
import hashlib
import importlib
import ipaddress
import os
import platform
import re
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.preflight.stale_ranks import stale_ranks

PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
DATA_FUNCTION = "roxxel_dist.run_directory:data_to_read"
"""Says what `train` would read, called on the host by its name: the launcher imports nothing of the trainer."""

HostInfo = dict[str, Any]


def gather(question: HostInfo) -> HostInfo:
    """All that preflight compares or judges, as plain values.

    The question: `run_dir` (text, or None where the job keeps nothing on this host), `run_id` and `data_path` (text or
    None), `resume`, and `compare`: whether to tell what matters beside other hosts (versions, code, data).
    """
    run_dir = question["run_dir"]
    told: HostInfo = {
        "machine": _machine(),
        "gpus": _gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "tpu_lock": tpu_lock(LOCK),
        "tpus": len(_devices("/dev", r"accel\d+")),
        "cores": os.cpu_count() or 1,
        "platforms": os.environ.get("JAX_PLATFORMS"),
        "run_dir": folder(run_dir) if run_dir is not None else None,
        "left": stale_ranks(question["run_id"], run_dir),
    }
    if question["compare"]:
        told |= own_name() | {
            "ssh_address": _ssh_address(os.environ.get("SSH_CONNECTION", "")),
            "versions": _versions(),
            "code": hash_of_code(),
            "data": _data(question["data_path"], run_dir, resume=question["resume"]),
        }
    return told


def own_name() -> HostInfo:
    """The host's own name, and the addresses that it means to the host itself."""
    name = socket.gethostname()
    return {"name": name, "resolves": resolved(name)}


def existing(path: str) -> Path:
    """The nearest folder (or file) that exists on the way up from a path."""
    place = Path(os.path.abspath(path))
    while not os.path.exists(place):
        place = place.parent
    return place


def folder(path: str) -> HostInfo:
    """Free bytes where a folder is or would be, and why no file can be made there (None: one was, and is gone)."""
    place = existing(path)
    free, why = 0, None
    try:
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        if place.is_dir():
            touch(path).unlink()
        else:
            why = f"{place} is a file"
    except OSError as error:
        why = error.strerror or str(error)
    return {"path": str(place), "free": free, "why": why}


def touch(path: str) -> Path:
    """Make an empty file of a new name where a folder is or would be. Who calls takes it away. Raises OSError."""
    mark = existing(path) / f".roxxel-probe-{os.urandom(8).hex()}"
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return mark


def resolved(name: str) -> list[str]:
    """The addresses of a host name, in the order in which programs try them; empty where it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _machine() -> str:
    """The same for two hosts that are one machine, with one network."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    network = os.readlink("/proc/self/ns/net")
    return f"{boot or socket.gethostname()} {network}"


def _devices(place: str, pattern: str) -> list[str]:
    try:
        return [name for name in os.listdir(place) if re.fullmatch(pattern, name)]
    except OSError:
        return []


def _gpus() -> int | None:
    """How many GPUs of NVIDIA; None where there are others, which nobody counts here.

    A container sees all of its machine's in /proc, and may use those in /dev.
    """
    found = len(_devices("/dev", r"nvidia\d+") or _devices("/proc/driver/nvidia/gpus", r".+"))
    return None if not found and os.path.exists("/dev/kfd") else found


def usable_gpus(facts: HostInfo) -> int | None:
    """How many GPUs the programs of a host may use: by its own list, or all; None where nobody counts them."""
    listed = facts["visible"]
    return facts["gpus"] if listed is None else len([name for name in listed.split(",") if name.strip()])


def _ssh_address(connection: str) -> str | None:
    """The address of this host that the ssh connection came to."""
    parts = connection.split()
    return parts[2] if len(parts) == 4 else None


def _versions() -> dict[str, str]:
    """Of Python and of what decides how a run goes; packages that are not there are left out."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def hash_of_code() -> str:
    """Of this package's own files: an editable install has one version for ever."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _data(data_path: str | None, run_dir: str | None, *, resume: bool) -> HostInfo | None:
    if data_path is None and not resume:
        return None
    module, _, function = DATA_FUNCTION.partition(":")
    return getattr(importlib.import_module(module), function)(data_path, run_dir, resume=resume)


# libtpu opens this file for writing and takes a POSIX lock on it (lockf) for the life of its process. The file stays.
# The lock is stale where its process hangs on; where another user has made the file, nobody else can open it.
LOCK = Path("/tmp/libtpu_lockfile")
FLOCK = "hhqqi4x"
"""struct flock of Linux with 64 bits: type, whence, start, length, pid."""


def tpu_lock(path: Path) -> dict[str, Any] | None:
    """The lock at a path: `path`, the `holder` (words; None: nobody), and `why` it cannot be opened; None: no file.

    Nothing is locked here, not for a moment.
    """
    if not os.path.lexists(path):
        return None
    told = {"path": str(path), "holder": None, "why": None}
    try:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )  # as libtpu: in /tmp the kernel looks at that
    except OSError as error:
        reason = "it is another user's" if error.errno in (errno.EACCES, errno.EPERM) else str(error.strerror)
        return told | {"why": reason}
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    finally:
        os.close(file)
    return told if kind == fcntl.F_UNLCK else told | {"holder": _who(pid)}


def _who(pid: int) -> str:
    """A process for people; one of another container has no number here."""
    if pid <= 0:
        return "a process of another container"
    with suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}"
