"""What an agent answers before it has ranks: the questions of preflight. Nothing is left of them.

A question is a message with `ask`. That what it asks cannot be done is an answer too: {"why": …}. Who is asked nothing
more ends with its stdin, or by itself after a while.
"""

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from roxxel_dist.launcher.preflight import host_info
from roxxel_dist.launcher.preflight.host_info import is_loopback, resolved
from roxxel_dist.launcher.transport.protocol import Decoder, Message, encode

LIFE_S = 600
"""From one question to the next: 300 hosts are asked 32 at a time, and each may take a minute. Who is behind a cut link
ends too."""
CONNECT_S = 5.0


class Probe:
    """Answers questions, and holds what they ask to be held (a port, a file) until it is closed."""

    def __init__(self) -> None:
        self._ports: list[tuple[socket.socket, threading.Thread]] = []
        self._files: list[Path] = []

    def answer(self, question: Message) -> Message:
        """The answer to a question: what was asked for, or `why` it cannot be had."""
        answers = {
            "facts": host_info.gather,
            "address": lambda asked: {"address": local_address(asked["towards"])},
            "listen": self._listen,
            "reach": lambda asked: {"ms": reach(asked["address"], asked["port"], asked["nonce"])},
            "touch": self._touch,
            "see": lambda asked: {"seen": (host_info.existing(asked["run_dir"]) / asked["name"]).exists()},
        }
        if question["ask"] not in answers:
            return {"why": f"it does not know {question['ask']!r}: install the same roxxel-dist on all hosts"}
        try:
            return answers[question["ask"]](question)
        except OSError as error:
            return {"why": error.strerror or str(error)}

    def _touch(self, question: Message) -> Message:
        """Make a file in the run directory, for others to see."""
        self._files.append(host_info.touch(question["run_dir"]))
        return {"name": self._files[-1].name}

    def _listen(self, question: Message) -> Message:
        """Hold a port, a free one for 0, and tell who connects the nonce, so that it is known whose port it is."""
        address = question["address"]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, question["port"]))
            server.listen(128)
        except OSError:
            server.close()
            raise
        teller = threading.Thread(target=_tell, args=(server, question["nonce"].encode()), daemon=True)
        teller.start()
        self._ports.append((server, teller))
        return {"port": server.getsockname()[1]}

    def close(self) -> None:
        """Let go of the ports, and take the files away."""
        for server, teller in self._ports:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            teller.join(2)  # until it has gone the port is in use
            server.close()
        for file in self._files:
            file.unlink(missing_ok=True)
        self._ports, self._files = [], []


def _tell(server: socket.socket, nonce: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(1)
            connection.sendall(nonce)
            connection.recv(1)  # the other side closes first: then no closed connection lingers on this port


def reach(address: str, port: int, nonce: str) -> float:
    """Milliseconds until the probe that listens there said its nonce. Raises OSError where it does not."""
    begun = time.monotonic()
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection:
            heard = b""
            while len(heard) < len(nonce) and (data := connection.recv(len(nonce))):
                heard += data
    except TimeoutError:
        raise OSError(f"no answer within {CONNECT_S:g} s") from None
    if heard != nonce.encode():
        raise OSError("somebody else answers there")
    return (time.monotonic() - begun) * 1000


def local_address(towards: list[str]) -> str | None:
    """The address of this host from which packets go to the first of these names or addresses that leads elsewhere.

    None where none of them does, or has a route.
    """
    for name in towards:
        for target in resolved(name):
            if is_loopback(target):
                continue
            family = socket.AF_INET6 if ":" in target else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as route, suppress(OSError):
                route.connect((target, 9))  # sends nothing: it only asks the kernel for the route
                own = str(route.getsockname()[0])
                if not is_loopback(own):
                    return own
    return None


def answer_all(questions: list[Message], inbox: Decoder, channel: int) -> list[Message]:
    """Answer these questions and all that follow, until there is another order.

    Returns that order and those behind it; nothing where stdin has ended.
    """
    names = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
    before = {name: signal.signal(name, lambda *_: sys.exit(1)) for name in names}  # by way of `finally`: the files go
    probe = Probe()
    try:
        while questions:
            while questions and "ask" in questions[0]:
                signal.alarm(LIFE_S)
                os.write(channel, encode(probe.answer(questions.pop(0))))
            if questions:
                break
            questions = inbox.read(0)
    except BrokenPipeError:
        return []
    finally:
        probe.close()
        signal.alarm(0)
    for name, handler in before.items():
        signal.signal(name, handler)
    return questions
