"""The answers of an agent that has no ranks to the questions of preflight, and the facts of its host in them.

Starts fast: no jax, numpy only for a data set. Nothing is left of a question: a file that is made is removed."""

import fcntl
import ipaddress
import os
import pwd
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.launcher.host.protocol import Decoder, Message, encode
from roxxel_dist.launcher.job.spec import Limits, host_checks
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
    return any(is_loopback(address) or is_owned(address) for address in resolve(name))


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
    addresses = resolve(name)
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


def nearest_existing(path: str) -> Path:
    """The nearest folder (or file) that exists on the way up from a path."""
    place = Path(os.path.abspath(path))
    return next(each for each in (place, *place.parents) if os.path.exists(each))


def folder(path: str, *, is_run: bool) -> HostInfo:
    """Free bytes where a folder is or would be, and why no file can be made there (None: one was, and is gone).

    Of a folder that `is_run`, or is to be one, `foreign` is why no run may write there; else None.
    """
    place, free, why = nearest_existing(path), 0, None
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
    mark = nearest_existing(path) / f".roxxel-probe-{os.urandom(8).hex()}"
    mark.touch(mode=0o600, exist_ok=False)
    return mark


def resolve(name: str) -> list[str]:
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


if TYPE_CHECKING:
    from roxxel_dist.launcher.host.host_checks import HostChecks

CONNECT_S = 5.0
BULK = b"roxxel-dist" * 6000
"""A message as large as those of ranks: a path may lose packets of full size, and pass all small ones."""
FILL = 16384
"""Letters of a host's first answer that say nothing: lines of ranks will be as long, and the link has to carry them."""
STUCK = f"small packets pass, and {len(BULK) // 1024} KiB do not within {CONNECT_S:g} s"
MTU, MTU_V6 = (socket.IPPROTO_IP, 14), (getattr(socket, "IPPROTO_IPV6", 41), 24)
"""Options of a Linux socket that Python does not name: the largest packet of its path, as far as the kernel knows."""
AT_ONCE = 32
"""Connections that a host tries at the same time."""


def answer_all(questions: list[Message], inbox: Decoder, channel: int, nonce: str, limits: Limits) -> list[Message]:
    """Answer these questions and all that follow, until there is another order.

    Returns that order and those behind it; nothing where stdin has ended.
    """
    names = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
    before = {name: signal.signal(name, lambda *_: sys.exit(1)) for name in names}  # by way of `held`: the files go
    try:
        with ExitStack() as held:
            while questions and "ask" in questions[0]:
                signal.alarm(round(limits.life_s))
                try:
                    os.write(channel, encode(answer(questions.pop(0), held, limits), nonce))
                except BrokenPipeError:
                    return []
                questions = questions or inbox.read(0)
    finally:
        signal.alarm(0)
    for name, handler in before.items():
        signal.signal(name, handler)
    return questions


def answer(question: Message, held: ExitStack, limits: Limits) -> Message:
    """The answer to a question (a message with `ask`): what was asked for, or `why` it cannot be had.

    A port or a file that it asks for is there until `held` is closed, or the first question of the next round comes.
    """
    try:
        match question["ask"]:
            case "facts":
                held.close()
                reply = gather(question) | {"fill": os.urandom(FILL // 2).hex()}
                if question.get("checks") is not None:
                    reply["checks"] = _start_checks(question["checks"], reply, held, limits)
            case "checks":
                reply = {"checks": _start_checks(question["checks"], accelerators(), held, limits)}
            case "checked":
                reply = _checks[-1].collect() if _checks else {"why": "no check was asked for"}
            case "addresses":
                reply = {"addresses": local_addresses(question["towards"])}
            case "listen":
                reply = {
                    "ports": [_port(address, port, question["nonce"], held) for address, port in question["places"]]
                }
            case "connect":
                took, sizes = _connect_all(question["places"], question["nonce"])
                reply = {"took": took, "sizes": sizes}
            case "touch":
                file = touch(question["run_dir"])
                held.callback(file.unlink, missing_ok=True)
                reply = {"name": file.name}
            case "see":
                reply = {"seen": (nearest_existing(question["run_dir"]) / question["name"]).exists()}
            case unknown:
                reply = {"why": f"it does not know {unknown!r}: install the same roxxel-dist on all hosts"}
    except OSError as error:
        reply = {"why": error.strerror or str(error)}
    return reply | ({"id": question["id"]} if "id" in question else {})


_checks: list["HostChecks"] = []
"""The checks that run in this process, which answers to one launcher; the last ones count."""


def _start_checks(question: Message, info: Message, held: ExitStack, limits: Limits) -> bool:
    """Start what checks this host; whether there is anything. It ends with `held`."""
    has_devices = question["mode"] == "auto" and (info["gpus"] or info["tpus"])
    lists = question.get("lists", False)
    if question["mode"] != "on" and not has_devices and question["command"] is None and not lists:
        return False
    from roxxel_dist.launcher.host.host_checks import HostChecks  # late: most starts need none

    checks = HostChecks(question, info, limits)
    _checks[:] = [checks]
    held.callback(checks.close)
    return bool(checks)


def _port(address: str, port: int, nonce: str, held: ExitStack) -> int | str:
    """The port that `_listen` holds, or why it cannot."""
    try:
        return _listen(address, port, nonce, held)
    except OSError as error:
        return error.strerror or str(error)


def _listen(address: str, port: int, nonce: str, held: ExitStack) -> int:
    """Hold a port, a free one for 0; it sends the nonce to each client, which proves which host has the port."""
    server = held.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(128)

    def report() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            try:
                threading.Thread(target=_serve, args=(connection, nonce), daemon=True).start()
            except RuntimeError:  # no thread can be started: the others wait
                _serve(connection, nonce)

    reporter = threading.Thread(target=report, daemon=True)
    try:
        reporter.start()
    except RuntimeError as error:
        raise OSError(f"{error}: this host allows no more processes (`ulimit -u`, pids.max)") from None
    held.callback(reporter.join, 2)  # until it has gone the port is in use
    held.callback(server.shutdown, socket.SHUT_RDWR)  # wakes it
    return server.getsockname()[1]


def _serve(connection: socket.socket, nonce: str) -> None:
    """Say the nonce, and carry as much as ranks do in both directions."""
    with connection, suppress(OSError):
        connection.settimeout(2 * CONNECT_S)
        connection.sendall(nonce.encode())
        if not connection.recv(1):  # the nonce alone is there: what gets stuck from here on is what is large
            return
        connection.sendall(BULK)
        left = len(BULK)
        while left > 0 and (data := connection.recv(left)):
            left -= len(data)
        connection.sendall(b".")
        connection.recv(1)  # the other side closes first: then no closed connection lingers on this port


class Stuck(OSError):
    """A place that small packets reach, and what ranks send at once does not. `size`: of the largest packet."""

    def __init__(self, size: int) -> None:
        super().__init__(STUCK)
        self.size = size


def _connect_all(places: list[tuple[str, int]], nonce: str) -> tuple[list[float | str], list[int]]:
    """For each place the milliseconds of `connect_ms`, or why it cannot be reached. All are tried at once.

    Also the size of the packets that do not get there, 0 where that is not why.
    """
    took: list[float | str] = ["not tried"] * len(places)
    sizes = [0] * len(places)
    waiting = deque(range(len(places)))

    def connect() -> None:
        with suppress(IndexError):  # none waits any more
            while True:
                number = waiting.popleft()
                try:
                    took[number] = connect_ms(*places[number], nonce)
                except OSError as error:
                    took[number] = error.strerror or str(error)
                    sizes[number] = error.size if isinstance(error, Stuck) else 0

    threads = []
    with suppress(RuntimeError):  # no more threads can be started
        for _ in range(min(AT_ONCE, len(places)) - 1):
            thread = threading.Thread(target=connect, daemon=True)
            thread.start()
            threads.append(thread)
    connect()
    for thread in threads:
        thread.join()
    return took, sizes


def connect_ms(address: str, port: int, nonce: str) -> float:
    """Milliseconds until the probe that listens there said its nonce.

    Raises OSError where it does not, or does not take or give as much as ranks send at once (Stuck).
    """
    begun = time.monotonic()
    with ExitStack() as held:
        try:
            connection = held.enter_context(socket.create_connection((address, port), CONNECT_S))
            if _received(connection, len(nonce), begun + CONNECT_S) != nonce.encode():
                raise OSError("somebody else answers there")
        except TimeoutError:
            raise OSError(f"no answer within {CONNECT_S:g} s") from None
        took, end = (time.monotonic() - begun) * 1000, time.monotonic() + CONNECT_S
        try:
            connection.sendall(b".")
            is_whole = _received(connection, len(BULK), end) == BULK
            connection.sendall(BULK)
            if not is_whole or _received(connection, 1, end) != b".":
                raise OSError("it closes the connection before all is sent")
        except TimeoutError:
            raise Stuck(connection.getsockopt(*(MTU_V6 if ":" in address else MTU))) from None
    return took


def _received(connection: socket.socket, count: int, end: float) -> bytes:
    """So many bytes, or fewer where the other side closes. Raises TimeoutError at `end`, though some may trickle in."""
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(0.001, end - time.monotonic()))
        if not (part := connection.recv(count - len(data))):
            break
        data += part
    return bytes(data)


def local_addresses(towards: list[str]) -> list[str]:
    """The addresses of this host from which packets go to these names or addresses, each once.

    Those that lead to this host, or have no route, give none.
    """
    found: dict[str, None] = {}
    for target in (address for name in towards for address in resolve(name) if not is_loopback(address)):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:  # a kernel may have no IPv6
            route.connect((target, 9))  # sends nothing: it only asks the kernel for the route
            own = str(route.getsockname()[0])
            if not is_loopback(own) and own != target:  # the target is an address of this host
                found[own] = None
    return list(found)
