"""A W&B server in this process, on the loopback: what the real client needs of one, and a memory that tests can ask.

History lines have offsets, as in W&B's file stream protocol: a client that sends a line again overwrites it, and one
that resumes gets their number and the last one. `twice` lists the lines that came more than once.
"""

import gzip
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "local"
KEY = "0" * 40


@dataclass
class Run:
    """What the server knows of a run."""

    name: str
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    twice: list[int] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows in their order."""
        return [self.lines[offset] for offset in sorted(self.lines)]

    def write(self, name: str, offset: int, content: list[str]) -> None:
        """Lines of one of the run's streams."""
        if "history" in name:
            for i, line in enumerate(content, offset):
                if i in self.lines:
                    self.twice.append(i)
                self.lines[i] = json.loads(line)
        elif "summary" in name:
            self.summary.update(json.loads(content[-1]))


class WandbServer(ThreadingHTTPServer):
    """Serves from the moment it is made until `close`; a context manager.

    Args:
        port: where, 0 for any that is free.

    Attributes:
        runs: what clients sent, by run id.
        answering: clear it for a server that accepts requests and answers none.
        unknown: operations that it had no answer to.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs: dict[str, Run] = {}
        self.unknown: list[str] = []
        self.answering = threading.Event()
        self.answering.set()
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Leads a client here."""
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_address[1]}", "WANDB_API_KEY": KEY}

    def run(self, name: str) -> Run:
        """The run of that id, which need not exist yet."""
        return self.runs.setdefault(name, Run(name))

    def close(self) -> None:
        """Stop; clients cannot connect any more."""
        self.answering.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or gave up waiting, is no error here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, operation: str, query: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        """The data of a GraphQL operation; None for one that this server does not know."""
        project = {"id": "P", "name": "project", "entity": {"id": "E", "name": ENTITY}}
        if operation == "UpsertBucket":
            return self._upsert(variables, project)
        if operation == "RunResumeStatus":
            return {"model": project | {"bucket": self._resume(variables["name"])}}
        if operation == "CreateRunFiles":
            base = f"http://127.0.0.1:{self.server_address[1]}/upload"
            files = [{"name": name, "uploadUrl": f"{base}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        known: dict[str, Any] = {
            "Viewer": {"viewer": {"id": "U", "entity": ENTITY, "username": ENTITY, "flags": "{}"}},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "RunStoppedStatus": {"project": {"run": {"stopped": False}}},
            "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": None}},
        }
        if operation not in known and "__type" in query:
            return dict.fromkeys(re.findall(r"(\w+)\s*:\s*__type", query)) or {"__type": None}
        return known.get(operation)

    def _upsert(self, variables: dict[str, Any], project: dict[str, Any]) -> dict[str, Any]:
        name, inserted = variables["name"], variables["name"] not in self.runs
        run = self.run(name)
        if variables.get("config"):
            run.config = {key: item["value"] for key, item in json.loads(variables["config"]).items()}
        bucket = {
            "id": f"R_{name}", "name": name, "displayName": variables.get("displayName") or name, "sweepName": None,
            "project": project, "historyLineCount": len(run.lines), "config": "{}", "description": None,
        }  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _resume(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        run = self.runs[name]
        tail = [json.dumps(row) for row in run.history[-1:]]
        return {
            "id": f"R_{name}", "name": name, "displayName": name, "historyLineCount": len(run.lines),
            "historyTail": json.dumps(tail), "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0,
            "summaryMetrics": json.dumps(run.summary), "tags": [], "wandbConfig": '{"t": 1}',
            "config": json.dumps({key: {"value": value} for key, value in run.config.items()}),
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""

    def do_PUT(self) -> None:
        self._body()
        self._send({})

    def do_GET(self) -> None:
        self._send({})

    def do_POST(self) -> None:
        body = self._body()
        self.server.answering.wait()
        if self.path.startswith("/graphql"):
            self._graphql(json.loads(body))
        elif found := re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            sent = json.loads(body)
            with self.server.lock:
                run = self.server.run(found[1])
                for name, part in (sent.get("files") or {}).items():
                    run.write(name, part.get("offset", 0), part["content"])
                run.exit_code = sent.get("exitcode", run.exit_code)
            self._send({"exitcode": None, "limits": {}})
        else:
            self._send({})

    def _graphql(self, body: dict[str, Any]) -> None:
        named = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
        operation = body.get("operationName") or (named[1] if named else "?")
        with self.server.lock:
            data = self.server.answer(operation, body["query"], body.get("variables") or {})
        if data is None:
            self.server.unknown.append(operation)
            self._send({"errors": [{"message": f"unknown operation {operation}"}], "data": None}, 400)
        else:
            self._send({"data": data})

    def _body(self) -> bytes:
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _send(self, data: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
