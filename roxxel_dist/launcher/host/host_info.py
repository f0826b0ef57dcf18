"""The facts about a host that preflight needs, gathered on that host. Starts fast: no jax, numpy only for a data set.

Nothing here changes the host: the one file that is made (to learn whether that is possible) is removed at once.
"""

import fcntl
import ipaddress
import os
import pwd
import socket
import struct
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.job.program import host_checks
from roxxel_dist.process.platforms import why_no_devices
from roxxel_dist.process.process_stat import boot_id

LOCK = Path("/tmp/libtpu_lockfile")
IS_FILE = "is a file"

HostInfo = dict[str, Any]


def gather(question: HostInfo) -> HostInfo:
    """Gather all that preflight compares or judges, as plain values.

    The question has the fields of `checks.Requirements`: a run directory of None means that the job writes nothing on
    this host, and `compare` also asks for values to compare between hosts (versions, data).
    """
    run_dir, data_path, resume = (question[name] for name in ("run_dir", "data_path", "resume"))
    jax = question.get("jax")
    info: HostInfo = accelerators() | {
        "machine": machine(),
        "place": place(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "tpu_lock": tpu_lock(LOCK),
        "cores": os.cpu_count() or 1,
        "no_devices": None if jax is None else why_no_devices({**os.environ, **jax}),
        "run_dir": folder(run_dir, is_run=question["shared"]) if run_dir is not None else None,
    }
    if question["compare"]:
        connection = os.environ.get("SSH_CONNECTION", "").split()
        info |= own_name() | {
            "ssh_address": connection[2] if len(connection) == 4 else None,  # where the ssh connection came to
            "versions": {"python": sys.version.split()[0], **versions()},
            "data": None,
            "ports": rank_ports(),
        }
        if data_path is not None or resume:
            info["data"] = host_checks().data_to_read(data_path, run_dir, resume=resume)
    return info


def machine() -> str:
    """The name of this machine, with one network: containers may have networks of their own."""
    return f"{boot_id() or socket.gethostname()} {os.readlink('/proc/self/ns/net')}"


def place() -> str:
    """The machine, or the container of it: those that share a network have files and a name of their own."""
    return " ".join([machine(), *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "uts"))])


def is_called(name: str) -> bool:
    """Whether this machine has a name, or an address: alone, behind `user@`, or behind `pod/`."""
    name = name.rpartition("@")[2].rpartition("/")[2]
    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    return any(is_loopback(address) or is_owned(address) for address in resolved(name))


def accelerators() -> HostInfo:
    """The numbers of accelerators, and which of them jax is to use."""
    # A container sees all GPUs of its machine in /proc, and may use those in /dev. AMD's are not counted.
    gpus = len(glob("/dev/nvidia[0-9]*") or glob("/proc/driver/nvidia/gpus/*"))
    return {
        "gpus": None if not gpus and os.path.exists("/dev/kfd") else gpus,
        "tpus": len(glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")),
        "platforms": os.environ.get("JAX_PLATFORMS"),
    }


def own_name() -> HostInfo:
    """The host's own name, the addresses that it means to the host itself, and which of them are the host's."""
    name = socket.gethostname()
    addresses = resolved(name)
    return {"name": name, "resolves": addresses, "owned": [one for one in addresses if is_owned(one)]}


def is_owned(address: str) -> bool:
    """Whether a program of this host can listen at an address."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return True
    return False


def rank_ports() -> list[int] | None:
    """The first and the last of the ports that the kernel gives to programs that ask for a free one."""
    with suppress(OSError, ValueError):
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return [int(first), int(last)]
    return None


def existing(path: str) -> Path:
    """The nearest folder (or file) that exists on the way up from a path."""
    place = Path(os.path.abspath(path))
    return next(each for each in (place, *place.parents) if os.path.exists(each))


def folder(path: str, *, is_run: bool) -> HostInfo:
    """Free bytes where a folder is or would be, and why no file can be made there (None: one was, and is gone).

    Of a folder that `is_run`, or is to be one, `foreign` is why no run may write there; else None.
    """
    place, free, why = existing(path), 0, None
    try:
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        touch(path).unlink()
    except NotADirectoryError:
        why = IS_FILE
    except OSError as error:
        why = error.strerror or str(error)
    foreign = host_checks().why_no_run(path) if is_run else None
    return {"path": str(place), "free": free, "why": why, "foreign": foreign}


def touch(path: str) -> Path:
    """Make an empty file of a new name where a folder is or would be. The caller removes it. Raises OSError."""
    mark = existing(path) / f".roxxel-probe-{os.urandom(8).hex()}"
    mark.touch(mode=0o600, exist_ok=False)
    return mark


def resolved(name: str) -> list[str]:
    """The addresses of a host name, in the order in which programs try them; empty where it has none."""
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in addresses))


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def tpu_lock(path: Path) -> str | None:
    """The reason why a program cannot have libtpu's lock at a path, and what to do; None where it can.

    libtpu opens the file for writing and takes a POSIX lock on it (lockf) for the life of its process; the file stays,
    and may be another user's. Nothing is locked here, not for a moment.
    """
    if not os.path.lexists(path):
        return None
    flock = "hhqqi4x"  # struct flock of Linux with 64 bits: type, whence, start, length, pid
    try:  # O_CREAT as libtpu: in /tmp the kernel looks at that
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "rb+", buffering=0) as file:
            lock = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(flock, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        return f"cannot be opened ({error.strerror}), and nothing can use the TPU; sudo rm {path}"
    kind, _, _, _, pid = struct.unpack(flock, lock)
    if kind == fcntl.F_UNLCK:
        return None
    holder = process_name(pid) if pid > 0 else "a process of another container"
    return f"is held by {holder}, which uses the TPU; end it, or JAX_PLATFORMS=cpu goes without"


def process_name(pid: int) -> str:
    """A process for people: its number, its program and its user where they can be seen."""
    with suppress(OSError, KeyError):
        place = Path("/proc", str(pid))
        program = (place / "comm").read_text(errors="replace").strip()
        return f"process {pid} ({program} of user {pwd.getpwuid(place.stat().st_uid).pw_name})"
    return f"process {pid}"


PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """The versions of `PACKAGES`, by the folders that pip makes: `importlib.metadata` takes as long as all the rest."""
    installed: dict[str, str] = {}
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith(".dist-info"):
                    package, _, version = name.removesuffix(".dist-info").partition("-")
                    installed.setdefault(package.lower().replace("_", "-"), version)
    return {name: installed[name] for name in PACKAGES if name in installed}
