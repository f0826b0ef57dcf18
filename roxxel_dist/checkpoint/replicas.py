"""Blocks of one host kept by another: a rank keeps its neighbour's blocks, and sends them back if they are lost there.

Both ends first prove that they know the job's key (HMAC-SHA256 over the nonces of both). Every frame carries a MAC by a
key of that connection, its direction and its number. Nothing is encrypted: gradients and parameters cross the same
interface in the clear, by the collectives (decision 19).
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from roxxel_dist.checkpoint.blocks import PAGE, PREAMBLE, DamagedFile, read_blocks, read_header
from roxxel_dist.checkpoint.digests import digest
from roxxel_dist.process.exit_codes import UserError

HELLO = b"roxxel-copies-1\n"
NONCE = MAC = 32
FRAME = struct.Struct("<I")
FRAME_BYTES = 1 << 22
TIMEOUT_S = 10.0
"""Seconds without a byte from the other end, after which it is taken for gone."""
CONNECTIONS = 16
"""At a time; further ones are refused."""
KEY = "key"
COPY = ".copy"
"""How the name of a file of another host's blocks ends."""


class WrongKey(ConnectionError):
    """The other end does not know the key of the job."""


def read_key(folder: Path) -> bytes:
    """The job's key. Raises OSError or ValueError where there is none."""
    return bytes.fromhex((folder / KEY).read_text(encoding="ascii"))


def address_towards(coordinator: str) -> str:
    """The address of this host on the way to jax's coordinator (HOST:PORT), which is the cluster's interface. Raises
    OSError where there is no way."""
    host, _, port = coordinator.rpartition(":")
    family, kind, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return probe.getsockname()[0]


class Channel:
    """A connection whose ends have proved that they know the key. Raises OSError where it breaks or a MAC is wrong."""

    def __init__(self, connection: socket.socket, key: bytes, *, server: bool) -> None:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        mine = secrets.token_bytes(NONCE)
        connection.sendall(HELLO + mine)
        theirs = self._bytes(len(HELLO) + NONCE)
        if not theirs.startswith(HELLO):
            raise ConnectionError("no program of this job answers there")
        theirs = theirs[len(HELLO) :]
        nonces = mine + theirs if server else theirs + mine

        def proof(role: bytes) -> bytes:
            return hmac.digest(key, role + nonces, "sha256")

        mine, theirs = (b"server", b"client") if server else (b"client", b"server")
        if server:  # the client proves it first: a stranger gets nothing that was made with the key
            self._check(proof(theirs))
            connection.sendall(proof(mine))
        else:
            connection.sendall(proof(mine))
            try:
                self._check(proof(theirs))
            except ConnectionError as error:
                raise WrongKey(f"it refuses the key of this job, or ended ({error})") from error
        self._out, self._in = proof(b"data of " + mine), proof(b"data of " + theirs)
        self._sent = self._received = 0

    def _check(self, expected: bytes) -> None:
        if not hmac.compare_digest(self._bytes(MAC), expected):
            raise WrongKey("it does not know the key of this job")

    def send(self, data: Any) -> None:
        """Send a frame: bytes, or anything that JSON can say."""
        payload = memoryview(data if isinstance(data, bytes | memoryview) else json.dumps(data).encode())
        head = FRAME.pack(len(payload))
        self._socket.sendall(head + self._mac(self._out, self._sent, head, payload))
        self._socket.sendall(payload)
        self._sent += 1

    def send_all(self, data: memoryview) -> None:
        """Send bytes in as many frames as it takes."""
        for begin in range(0, len(data), FRAME_BYTES):
            self.send(data[begin : begin + FRAME_BYTES])

    def receive(self) -> bytearray:
        """Receive a frame."""
        head = bytes(self._bytes(FRAME.size))
        mac, (length,) = self._bytes(MAC), FRAME.unpack(head)
        if length > FRAME_BYTES:
            raise ConnectionError("a frame is too long")
        payload = self._bytes(length)
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, head, memoryview(payload))):
            raise ConnectionError("a frame was changed on its way")
        self._received += 1
        return payload

    def receive_json(self) -> Any:
        """Receive a frame of JSON."""
        return json.loads(self.receive())

    def receive_all(self, size: int) -> bytearray:
        """Receive what `send_all` sent, `size` bytes."""
        data = bytearray()
        while len(data) < size:
            data += self.receive()
        return data

    @staticmethod
    def _mac(key: bytes, number: int, head: bytes, payload: memoryview) -> bytes:
        mac = hmac.new(key, struct.pack("<Q", number) + head, "sha256")
        mac.update(payload)
        return mac.digest()

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if not (read := self._socket.recv_into(view)):
                raise ConnectionError("the connection was closed")
            view = view[read:]
        return data


@contextlib.contextmanager
def _connected(address: tuple[str, int], key: bytes) -> Iterator[Channel]:
    with socket.create_connection(address, TIMEOUT_S) as connection:
        yield Channel(connection, key, server=False)


def send_file(address: tuple[str, int], key: bytes, name: str, data: memoryview) -> None:
    """Give a neighbour the bytes of a file of blocks, under a name there. Raises OSError where it has not taken it."""
    with _connected(address, key) as channel:
        channel.send({"put": name, "size": len(data)})
        if problem := channel.receive_json():  # refused, before gigabytes are sent
            raise OSError(problem)
        channel.send_all(data[PAGE:])
        channel.send_all(data[: PREAMBLE.size])
        if problem := channel.receive_json():
            raise OSError(problem)


def fetch_blocks(
    address: tuple[str, int], key: bytes, generation: str, numbers: Collection[int]
) -> dict[int, bytearray]:
    """Blocks of a generation that another host has, compared with their digests. Raises OSError where it has not."""
    blocks: dict[int, bytearray] = {}
    with _connected(address, key) as channel:
        channel.send({"get": generation, "numbers": sorted(numbers)})
        while (answer := channel.receive_json()) is not None:
            number, size, text = answer
            blocks[number] = channel.receive_all(size)
            if digest(blocks[number]) != text:
                raise OSError(f"block {number} was damaged on its way")
    if missing := set(numbers) - blocks.keys():
        raise OSError(f"it does not have block {min(missing)}")
    return blocks


class CopyServer:
    """Listens at one address of this host, for neighbours that bring their blocks and hosts that need them.

    The files are in `folder`, the address is of the cluster's interface, the port is any, and `key` is that of the job.
    A line about a refused host is logged. Raises OSError: nothing can listen there.
    """

    def __init__(self, folder: Path, address: str, key: bytes, log: Callable[[str], None]) -> None:
        self._folder, self._key, self._log = folder, key, log
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=CONNECTIONS)
        self.address: tuple[str, int] = (address, self._socket.getsockname()[1])
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self._refused: set[str] = set()
        self.refusal: str = ""
        """Why nothing more is kept for neighbours; empty while it is."""
        threading.Thread(target=self._listen, name="copies", daemon=True).start()

    def close(self) -> None:
        """Listen no more. What is under way ends by itself."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._socket.accept()
            except OSError:  # closed
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection, host), name="copy", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                channel = Channel(connection, self._key, server=True)
                request = channel.receive_json()
                if "put" in request:
                    self._take(channel, request["put"], request["size"])
                else:
                    self._give(channel, request["get"], request["numbers"])
        except WrongKey as error:
            if host not in self._refused:  # once: repeated connections must not fill the log
                self._refused.add(host)
                self._log(f"a connection from {host} for copies in memory was refused: {error}")
        except (OSError, ValueError, KeyError, TypeError):  # it comes again, or the copy stays incomplete
            pass
        finally:
            self._room.release()

    def _take(self, channel: Channel, name: str, size: int) -> None:
        """Write a neighbour's file; void until its last byte is there."""
        slot, _, rank = name.partition("-")
        if not (slot in ("0", "1") and rank.isdecimal() and size > PAGE):
            raise UserError(name)
        if self.refusal:
            channel.send(self.refusal)
            return
        path = self._folder / f"{name}{COPY}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(file, 0, size)
                os.pwrite(file, bytes(PREAMBLE.size), 0)
            except OSError as error:
                path.unlink(missing_ok=True)
                channel.send(f"{error.strerror} in {self._folder}")
                return
            channel.send("")
            offset = PAGE
            while offset < size:
                data = channel.receive()
                os.pwrite(file, data, offset)
                offset += len(data)
            os.pwrite(file, channel.receive(), 0)
            channel.send("")
        finally:
            os.close(file)

    def _give(self, channel: Channel, generation: str, numbers: list[int]) -> None:
        wanted = set(numbers)
        for path in block_files(self._folder):
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                header = read_header(path)
                if header is None or header.generation != generation:
                    continue
                mine = sorted(wanted & header.blocks.keys())
                for number, block in read_blocks(path, header, mine).items():
                    channel.send([number, len(block), header.blocks[number][2]])
                    channel.send_all(block)
                wanted -= set(mine)
        channel.send(None)


def block_files(folder: Path) -> list[Path]:
    """The files of blocks in a folder, this host's own and copies, in an order that all of its ranks see."""
    return sorted(path for path in folder.iterdir() if path.name.partition("-")[0] in ("0", "1"))
