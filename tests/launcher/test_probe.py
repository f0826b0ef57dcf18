"""A probe is a real agent here, which is asked through its real pipes and has no ranks."""

import errno
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.launcher.host import probe
from roxxel_dist.launcher.host.probe import answer
from roxxel_dist.launcher.job.spec import Limits

LIMIT_S = 60
FACTS = {"ask": "facts", "run_dir": None, "run_id": None, "data_path": None, "resume": False, "shared": False}


class Asked:
    """A probe that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def facts(self, *, compare: bool = True, **more: Any) -> dict[str, Any]:
        return self.ask(**{**FACTS, "compare": compare, **more})

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT_S)


Start = Callable[..., Asked]


def test_each_question_gives_it_a_new_life() -> None:
    """Rounds of questions may last longer than one life: a host that only has to wait must not go meanwhile."""
    program = (
        "import signal, sys; from roxxel_dist.launcher.agent import agent; arm = signal.alarm; "
        "signal.alarm = lambda seconds: print(seconds, file=sys.stderr) or arm(seconds); agent.main()"
    )
    question = json.dumps({"ask": "addresses", "towards": []}) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", program], input=2 * question, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == 2 * [{"addresses": []}], done.stderr
    assert done.stderr.split() == ["600"] * 2 + ["0"]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def start(processes: list[subprocess.Popen[bytes]], tmp_path: Path) -> Start:
    def begin(cwd: Path = tmp_path, **env: str) -> Asked:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("ROXXEL_")}
        words = [sys.executable, "-m", "roxxel_dist.launcher.agent.agent"]
        process = subprocess.Popen(words, cwd=cwd, env={**outer, **env}, stdin=-1, stdout=-1)
        processes.append(process)
        return Asked(process)

    return begin


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_facts_of_this_machine(start: Start) -> None:
    told = start(SSH_CONNECTION="10.0.0.1 5000 10.0.0.2 22").facts()
    assert told["name"] == socket.gethostname()
    assert told["ssh_address"] == "10.0.0.2"
    assert told["versions"]["python"] == sys.version.split()[0]
    assert {"jax", "jaxlib", "numpy", "roxxel-dist", "orbax-checkpoint"} <= set(told["versions"])
    assert isinstance(told["tpus"], int)
    assert told["data"] is None
    assert told["run_dir"] is None
    assert start().facts()["machine"] == told["machine"]


def test_it_is_light() -> None:
    code = (
        "import contextlib, sys; from roxxel_dist.launcher.host import probe; "
        f"probe.answer({ {**FACTS, 'compare': True, 'run_dir': 'x'} }, contextlib.ExitStack(), probe.Limits()); "
        "print(*{'jax', 'numpy', 'yaml', 'tyro', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert result.stdout.strip() == ""


def test_the_run_directory_is_looked_at_and_left_as_it_was(start: Start, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "file").write_text("")
    before, changed = tree(tmp_path), (tmp_path / "old").stat().st_mode
    probe = start()
    told = probe.facts(run_dir="old/not/there/yet")["run_dir"]
    assert (told["path"], told["why"]) == (str(tmp_path / "old"), None)
    assert told["free"] > 0
    assert "is a file" in probe.facts(run_dir="file")["run_dir"]["why"]
    assert probe.facts(run_dir="/proc/new")["run_dir"]["why"] is not None  # not even root writes there
    assert tree(tmp_path) == before
    assert (tmp_path / "old").stat().st_mode == changed


@pytest.mark.parametrize("how", ["end of file", "SIGTERM", "SIGHUP"])
def test_a_file_that_others_see_goes_with_the_probe(start: Start, tmp_path: Path, how: str) -> None:
    (tmp_path / "shared").mkdir()
    first, second = start(), start()
    name = first.ask(ask="touch", run_dir="shared/run")["name"]
    assert tree(tmp_path) == [tmp_path / "shared", tmp_path / "shared" / name]
    assert second.ask(ask="see", run_dir="shared/run", name=name) == {"seen": True}
    assert second.ask(ask="see", run_dir="run", name=name) == {"seen": False}
    if how == "end of file":
        assert first.end() == 0
    else:
        first.process.send_signal(signal.Signals[how])
        first.process.wait(LIMIT_S)
    assert tree(tmp_path) == [tmp_path / "shared"]


def test_a_port_is_held_known_and_let_go(start: Start) -> None:
    first, second = start(), start()

    def listen(probe: Asked, *places: tuple[str, int], nonce: str = "abc123") -> list[Any]:
        return probe.ask(ask="listen", places=places, nonce=nonce)["ports"]

    def connect(*ports: int, nonce: str = "abc123") -> list[Any]:
        return second.ask(ask="connect", places=[("127.0.0.1", port) for port in ports], nonce=nonce)["took"]

    port, other, none = listen(first, ("127.0.0.1", 0), ("127.0.0.2", 0), ("192.0.2.1", 0))
    assert "assign" in none, "why, for the one alone"
    for _ in range(3):
        assert all(0 < took < 60_000 for took in connect(port, port))
    took = connect(port, other)
    assert took[0] < 60_000
    assert "refused" in took[1], "it listens at another address"
    assert "in use" in listen(second, ("127.0.0.1", port))[0]
    assert "somebody else" in connect(port, nonce="other1")[0]
    assert first.end() == 0
    assert "refused" in connect(port)[0]
    with socket.socket() as again:  # with no option: not even a closed connection is left on it
        again.bind(("127.0.0.1", port))


def test_places_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CONNECT_S", 0.5)
    with socket.socket() as full, socket.socket() as first:  # a full queue gives no answer
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        places = [full.getsockname()] * 8
        tried: list[int] = []  # how many try at the same time
        create = socket.create_connection

        def connect(*words: Any) -> socket.socket:
            tried.append(threading.active_count())
            return create(*words)

        monkeypatch.setattr(socket, "create_connection", connect)
        before = threading.active_count()
        took = answer({"ask": "connect", "places": places, "nonce": "a"}, ExitStack(), Limits())["took"]
        assert took == ["no answer within 0.5 s"] * 8
        assert max(tried) == before + 7, "each in a thread, the last one in this"


def test_a_host_without_room_for_threads_tries_one_place_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with socket.socket() as closed, ExitStack() as held:
        closed.bind(("127.0.0.1", 0))
        places = [closed.getsockname()] * 3
        answered = answer({"ask": "connect", "places": places, "nonce": "a"}, held, Limits())
        assert answered == {"took": ["Connection refused"] * 3, "sizes": [0] * 3}
        (why,) = answer({"ask": "listen", "places": [("127.0.0.1", 0)], "nonce": "a"}, held, Limits())["ports"]
        assert why == "can't start new thread: this host allows no more processes (`ulimit -u`, pids.max)"


def test_a_kernel_without_ipv6_has_the_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoIPv6(socket.socket):
        def __init__(self, family: int = -1, *more: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *more)

    monkeypatch.setattr(socket, "socket", NoIPv6)
    monkeypatch.setattr(probe, "is_loopback", lambda address: False)  # the one route that each machine has
    monkeypatch.setattr(probe, "resolve", lambda name: ["2001:db8::7", "127.0.0.2"])  # AAAA and A
    answered = answer({"ask": "addresses", "towards": ["node2"]}, ExitStack(), Limits())
    assert answered == {"addresses": ["127.0.0.1"]}


def test_the_addresses_towards_other_machines(start: Start) -> None:
    probe = start()
    none = ["127.0.0.1", "localhost", "no-such-host.invalid"]
    assert probe.ask(ask="addresses", towards=none) == {"addresses": []}
    found = probe.ask(ask="addresses", towards=["127.0.0.1", "192.0.2.1"])["addresses"]
    assert not any(ipaddress.ip_address(address).is_loopback for address in found)
    assert probe.ask(ask="addresses", towards=found) == {"addresses": []}, "its own leads to no other machine"


def test_questions_that_cannot_be_answered(start: Start, tmp_path: Path) -> None:
    probe = start()
    assert "does not know 'joke'" in probe.ask(ask="joke")["why"]
    assert "why" in probe.ask(ask="touch", run_dir="/proc/new")
    assert "versions" not in probe.facts(compare=False)


def test_the_data_set(start: Start, corpus: Roxxel, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    probe = start()

    def data(path: str | None, run_dir: str = "run", *, resume: bool = False) -> Any:
        return probe.facts(data_path=path, run_dir=run_dir, resume=resume)["data"]

    shards = str(tmp_path / "corpus_*.rox")
    assert data(shards) == {"path": shards, "fingerprint": corpus.fingerprint}
    assert data("text.txt") == {"path": "text.txt", "text": True}
    assert "no such file" in data("nowhere.txt")["why"]
    assert "nowhere" in data("nowhere*.rox")["why"]
    (tmp_path / "corpus_00001.rox").write_bytes(b"not a shard")
    assert "corpus_00001.rox" in data(shards)["why"]
    assert data(None) is None


def test_the_data_set_of_a_resumed_run(start: Start, corpus: Roxxel, tmp_path: Path) -> None:
    shards = str(tmp_path / "corpus_*.rox")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"dim: 32\nrecord: {{format: 1, data_path: '{shards}'}}\n")
    probe = start()
    question = {"run_dir": "run", "data_path": None}
    assert probe.facts(**question)["data"] is None
    assert probe.facts(**question, resume=True)["data"] == {"path": shards, "fingerprint": corpus.fingerprint}


def test_an_interrupted_write_is_not_finished_by_a_probe(start: Start, tmp_path: Path) -> None:
    staged = tmp_path / "data" / ".data.writing"
    staged.mkdir(parents=True)
    (staged / "a_00000.rox").write_bytes(b"")
    (staged / "commit.json").write_text('{"remove": []}')
    before = tree(tmp_path)
    assert start().facts(data_path="data", run_dir="run")["data"] == {"path": "data"}
    assert start().facts(run_dir=".", resume=True)["data"] == {"path": "data"}, "shards that the run has made"
    assert tree(tmp_path) == before
