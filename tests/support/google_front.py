"""The writing half of Google's XML interface in front of fake-gcs-server, which has it for reading alone.

A PUT becomes an upload by the JSON interface, whose conditions the server obeys; parts are kept here until they are
completed. Everything else is passed on, but for If-Match of a GET, which the server does not look at. A request without
the right bearer token is refused, as Google does.
"""

import http.client
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

PASSED = ("Range", "Accept")


class GoogleFront(ThreadingHTTPServer):
    """Serves at `address` what the server at `target` has, to who knows the token; `parts` survive it."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], target: tuple[str, int], token: str, parts: dict[str, dict[int, bytes]]
    ) -> None:
        super().__init__(address, Handler)
        self.target = target
        self.token = token
        self.parts = parts
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is nothing to tell of."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: GoogleFront

    def do_GET(self) -> None:
        self.pass_on()

    def do_HEAD(self) -> None:
        self.pass_on()

    def do_DELETE(self) -> None:
        query = self.query()
        if "uploadId" in query:
            self.server.parts.pop(query["uploadId"], None)
            self.answer(204)
        else:
            self.pass_on()

    def do_PUT(self) -> None:
        query, body = self.query(), self.body()
        if not self.is_known():
            return
        if "uploadId" in query:
            self.server.parts[query["uploadId"]][int(query["partNumber"])] = body
            self.answer(200, {"ETag": f'"part-{query["partNumber"]}"'})
        else:
            self.upload(body, b"")

    def do_POST(self) -> None:
        query, _ = self.query(), self.body()
        if not self.is_known():
            return
        if "uploadId" in query:
            parts = self.server.parts.pop(query["uploadId"], {})
            self.upload(b"".join(parts[number] for number in sorted(parts)), COMPLETED)
        else:
            name = secrets.token_hex(8)
            self.server.parts[name] = {}
            self.answer(200, body=INITIATED % name.encode())

    def upload(self, body: bytes, text: bytes) -> None:
        bucket, _, key = urlsplit(self.path).path.lstrip("/").partition("/")
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={quote(unquote(key), safe='')}"
        if generation := self.headers["x-goog-if-generation-match"]:
            target += f"&ifGenerationMatch={generation}"
        mark = secrets.token_hex(16).encode()
        metadata = json.dumps({"name": unquote(key)}).encode()
        pieces = (mark, b"application/json", metadata, mark, b"application/octet-stream", body, mark)
        related = b"--%s\r\nContent-Type: %s\r\n\r\n%s\r\n--%s\r\nContent-Type: %s\r\n\r\n%s\r\n--%s--\r\n" % pieces
        status, _, data = self.ask(
            "POST", target, related, {"Content-Type": f"multipart/related; boundary={mark.decode()}"}
        )
        if status != 200:
            self.answer(status, body=data)
            return
        made = json.loads(data)
        etag = made["etag"].strip('"')
        fields = {"ETag": f'"{etag}"', "x-goog-generation": str(made["generation"])}
        self.answer(200, fields, text.replace(b"%s", etag.encode()))

    def pass_on(self) -> None:
        if not self.is_known():
            return
        fields = {name: value for name in PASSED if (value := self.headers[name]) is not None}
        status, answered, data = self.ask(self.command, self.path, b"", fields)
        wanted = self.headers["If-Match"]
        if wanted is not None and status < 300 and wanted.strip('"') != answered.get("Etag", "").strip('"'):
            status, answered, data = 412, {}, b""
        kept = {
            name: value for name, value in answered.items() if name.lower() not in ("connection", "transfer-encoding")
        }
        self.answer(status, kept, data)

    def is_known(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {self.server.token}":
            return True
        self.answer(401, body=b"<Error><Code>AuthenticationRequired</Code><Message>test</Message></Error>")
        return False

    def ask(self, method: str, path: str, body: bytes, fields: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self.server.target, timeout=60)
        try:
            connection.request(method, path, body, fields)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def answer(self, status: int, fields: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response_only(status)
        for name, value in (fields or {}).items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))


INITIATED = b"<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>"
COMPLETED = b"<CompleteMultipartUploadResult><ETag>%s</ETag></CompleteMultipartUploadResult>"
