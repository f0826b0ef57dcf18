"""What an agent answers while it has no ranks: the questions of preflight. Nothing is left of them."""

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from roxxel_dist.launcher.host.host_info import accelerators, existing, gather, is_loopback, resolved, touch
from roxxel_dist.launcher.host.protocol import Decoder, Message, encode
from roxxel_dist.launcher.job.limits import Limits

if TYPE_CHECKING:
    from roxxel_dist.launcher.host.host_checks import HostChecks

CONNECT_S = 5.0
BULK = b"roxxel-dist" * 6000
"""As much as a rank sends at once: a path may lose packets of full size, and pass all small ones."""
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
                reply = {"seen": (existing(question["run_dir"]) / question["name"]).exists()}
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
    for target in (address for name in towards for address in resolved(name) if not is_loopback(address)):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as route, suppress(OSError):
            route.connect((target, 9))  # sends nothing: it only asks the kernel for the route
            own = str(route.getsockname()[0])
            if not is_loopback(own) and own != target:  # the target is an address of this host
                found[own] = None
    return list(found)
