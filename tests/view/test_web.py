"""The page's server and its numbers, without a browser: who is let in, what is sent, and that nothing else happens."""

import base64
import contextlib
import hashlib
import http.client
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
from dataclasses import replace

import pytest
from browser import data_of
from commands import command, environment, wait_for
from made_rows import add, made_run
from served_page import serve
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.sweep.driver.checks import LOGGED
from roxxel_dist.view.frame import Look, frame
from roxxel_dist.view.items import items_of
from roxxel_dist.view.run import RunReader
from roxxel_dist.view.web import server as serving
from roxxel_dist.view.web.page import page
from roxxel_dist.view.web.sections import sections
from roxxel_dist.view.web.server import Changes, Feed, PageServer

LIMIT_S = 60.0


@pytest.fixture
def runs(tmp_path):
    for name in ("one", "two"):
        made_run(tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.fixture
def server(runs):
    with serve(runs) as server:
        yield server


def ask(server, path="/", *, token=None, host=None, method="GET", raw=None):
    """(status, headers, body) of a request; `raw` is sent as it stands."""
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as connection:
        target = path if token is None else f"{path}?token={token}"
        host = f"127.0.0.1:{server.port}" if host is None else host
        connection.sendall(raw or f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        return answer.status, answer.headers, answer.read()


def test_the_page_for_who_has_the_link(server):
    status, headers, body = ask(server, token=server.token)
    assert status == 200
    text = body.decode()
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (part,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert server.token not in text
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text)
    assert server.link == f"http://127.0.0.1:{server.port}/?token={server.token}"
    assert f"-L {server.port}:127.0.0.1:{server.port}" in server.tunnel


WRONG = ["", "x", "ä", "%ff%00", "{token}x", "{short}"]


@pytest.mark.parametrize("token", WRONG)
@pytest.mark.parametrize("path", ["/", "/events"])
def test_no_token_or_a_wrong_one(server, path, token):
    given = token.format(token=server.token, short=server.token[:-1])
    status, _, body = ask(server, raw=f"GET {path}?token={given} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status == 403
    assert leaks(body, server) == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "127.0.0.1@evil"]
)
def test_another_name_of_the_host(server, host):
    status, _, body = ask(server, token=server.token, host=host.format(port=server.port))
    assert status == 421
    assert leaks(body, server) == []
    assert ask(server, token=server.token, host="localhost:9")[0] == 200  # the other end of a tunnel


def test_an_address_beyond_the_loopback(runs):
    with PageServer(Feed(lambda: items_of([str(runs)])), "0.0.0.0") as server:
        assert f"http://{socket.gethostname()}:{server.port}/" in server.link
        assert f"-L {server.port}:127.0.0.1:{server.port} " in server.tunnel
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            assert ask(server, token=server.token, host=f"{socket.gethostname()}:{server.port}")[0] == 200
            assert ask(server, token=server.token, host="evil.example")[0] == 421
        finally:
            server.shutdown()
            thread.join(LIMIT_S)


TRICKS = [
    "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/static/../page.html", "/events/", "/events/../",
    "/runs/one/metrics.jsonl", "/%00", "/page.js", "http://evil.example/", "/.", "/\\..\\..",
]  # fmt: skip


@one_test("path", TRICKS)
def test_paths_lead_nowhere(server, path):
    status, _, body = ask(server, path, token=server.token)
    # Of an absolute address the path alone counts, which is the page's own.
    assert status == (200 if path == "http://evil.example/" else 404)
    if status == 404:
        assert leaks(body, server) == []
    assert ask(server, path)[0] == 403


@one_test("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_there_is_nothing_to_write(server, method):
    status, headers, body = ask(server, token=server.token, method=method)
    assert status == 501
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert leaks(body, server) == []


def test_what_is_no_request(server):
    for raw in (
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70000 + b"\r\n\r\n",
    ):
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _, body = ask(server, raw=raw + b"\r\n\r\n")
            assert status >= 400
            assert leaks(body, server) == []
    assert ask(server, token=server.token)[0] == 200


def leaks(body, server):
    return [word for word in (server.token, "one", "two", "train_loss") if word.encode() in body]


def test_a_thousand_connections(server, monkeypatch):
    """That say nothing, or little: most are refused at once, all are cut off, and the page is served again."""
    monkeypatch.setattr(serving, "REQUEST_S", 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    connections, refused = [], 0
    try:
        for number in range(1000):
            connection = socket.create_connection(("127.0.0.1", server.port), LIMIT_S)
            connections.append(connection)
            if number % 2:
                connection.sendall(b"GET / HT")
        for connection in connections:
            connection.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionError):
                refused += b"503" in connection.recv(100)
        assert refused > 500
        wait_for(lambda: ask(server, token=server.token)[0] == 200, LIMIT_S, "the page")
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Stream:
    """The events of a server."""

    def __init__(self, server, *items):
        query = "".join(f"&item={item}" for item in items)
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        self.connection.request("GET", f"/events?token={server.token}{query}")
        self.answer = self.connection.getresponse()
        assert self.answer.headers["Content-Type"].startswith("text/event-stream")

    def next(self):
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("data: "):
                return json.loads(line[6:])

    def until(self, holds):
        """The first message that `holds`."""
        while not holds(message := self.next()):
            pass
        return message

    def close(self):
        self.connection.close()


def test_changes_and_new_runs_come_by_themselves(server, runs, monkeypatch):
    monkeypatch.setattr("roxxel_dist.view.web.server.NEW_S", 0.2)
    monkeypatch.setattr("roxxel_dist.view.web.server.LIST_S", 0.2)
    stream = Stream(server)
    first = stream.next()
    assert len(first["ids"]) == 2
    one = next(item for item in first["ids"] if first["items"][item]["head"]["name"].endswith("one"))
    assert first["items"][one]["head"]["step"] == 20
    assert first["items"][one]["curve/train_loss"][1][-1] == float(f"{1 + 4 / math.sqrt(20):.6g}")
    assert "config" not in first["items"][one]  # in brief
    add(runs / "one", range(21, 26))
    later = stream.until(lambda message: message["items"])
    assert list(later["items"]) == [one]  # the other one has not changed
    assert later["items"][one]["head"]["step"] == 25
    made_run(runs / "three")
    assert len(stream.until(lambda message: len(message["ids"]) == 3)["ids"]) == 3
    stream.close()


def test_a_run_that_is_restarted_goes_on_in_the_same_stream(server, runs):
    """Training goes back to an earlier step: the log is another file, with other rows."""
    listed = Stream(server)
    first = listed.next()
    listed.close()
    one = next(item for item in first["ids"] if first["items"][item]["head"]["name"].endswith("one"))
    stream = Stream(server, one)
    whole = stream.next()["items"][one]
    assert whole["config"] == {"dim": 32, "lr": 0.001, "data_path": "data/here"}
    assert whole["curve/tokens"][1][-1] == 64 * 20
    kept = (runs / "one" / "metrics.jsonl").read_text().splitlines(keepends=True)[:10]
    (runs / "one" / "new").write_text("".join(kept))
    (runs / "one" / "new").rename(runs / "one" / "metrics.jsonl")
    add(runs / "one", [11], train_loss=9.0)
    later = stream.until(lambda message: message["items"].get(one, {}).get("head", {}).get("step") == 11)["items"][one]
    assert later["curve/train_loss"] == [
        [*range(1, 12)],
        [*(float(f"{1 + 4 / math.sqrt(step):.6g}") for step in range(1, 11)), 9.0],
    ]
    stream.close()


def test_what_has_not_changed_is_not_sent(runs):
    feed = Feed(lambda: items_of([str(runs)]))
    one, other = Changes(feed), Changes(feed)
    assert json.loads(one.next()) == json.loads(other.next())
    assert one.next() == ""
    shutil.rmtree(runs / "two")
    feed._looked = float("-inf")
    assert len(json.loads(one.next())["ids"]) == 1
    feed._find, feed._looked = lambda: list(map(os.stat, ["gone"])), float("-inf")  # as a folder between two looks
    assert one.next() == ""


def test_the_server_ends_while_somebody_looks(runs):
    with serve(runs) as server:
        stream = Stream(server)
        stream.next()
    assert stream.answer.readline() in (b"", b"\n")
    stream.close()


def test_a_report_is_the_same_page_with_its_numbers(runs, tmp_path, capsys):
    assert main(["report", str(runs / "one"), str(runs / "two"), "--out", str(tmp_path / "out")]) == 0
    assert f"page: {tmp_path / 'out' / 'report.html'}" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.html").read_text()
    data = data_of(text)
    assert [data["items"][item]["head"]["name"] for item in data["ids"]] == ["one", "two"]
    assert data["items"][data["ids"][0]]["config"]["lr"] == 0.001
    assert "connect-src 'none'" in text
    scripts = re.compile(r"<script>.*?</script>", re.DOTALL)
    assert scripts.search(text)[0] == scripts.search(page("x"))[0]  # of the page that is served


def test_a_page_cannot_be_had(runs, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["top", "--web", "--port", str(port), str(runs)]) == 2
    assert "use 0 for a free one" in capsys.readouterr().err
    assert main(["top", "--web", "--once", str(runs)]) == 2
    assert main(["top", "--web", str(runs / "none")]) == 2


def test_the_command_serves_until_it_is_ended(runs):
    words = command("top", "--web", runs)
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = process.stdout.readline().removeprefix("page: ").strip()
        assert "ssh -N -L" in process.stdout.readline()
        connection = http.client.HTTPConnection(re.search(r"//([^/]+)/", link)[1], timeout=LIMIT_S)
        connection.request("GET", "/?" + link.partition("?")[2])
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) in (0, -signal.SIGINT, 130)


def test_what_a_terminal_shows_of_the_newest_row_is_on_the_page(runs):
    state, script = RunReader(runs / "one").read(), page("x")
    for name in LOGGED:
        (line,) = frame([replace(state, row={name: 0.25}, phases=())], Look(width=200, height=40))[1:2]
        if line.plain not in ("no loss yet", "no row yet"):
            assert name in json.loads(sections(replace(state, row={name: 0.25}))["head"])["row"], name
            assert re.search(rf"\brow\.{name}\b|row, \"{name}\"", script), name


def test_the_page_asks_nobody_else():
    """Neither its own text nor the library names an address, but for what a licence and a name space say."""
    found = set(re.findall(r"https?://[^\s\"'`)<]+", page("x")))
    assert found <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert "{{" not in page("x").partition("<script>")[0]
