"""What carries a program's bytes between the launcher and a node of Ray, at both ends, with Ray's calls as threads."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_ray import import_ray

from roxxel_dist.launcher.backends.ray.actor import RayNode
from roxxel_dist.launcher.backends.ray.backend import LOST, NoNodeError, RayProcess, reason_of

Until = Callable[[Callable[[], Any], str], None]
ECHO = "import sys; print(sys.stdin.read().upper()); print('oh', file=sys.stderr); sys.exit(7)"
NODE = """
import sys, time
from roxxel_dist.launcher.backends.ray.actor import RayNode
node = RayNode()
node.start(0, ["sh", "-c", "touch up; cat; touch ended"], None)
time.sleep(1000)
"""


class Actor:
    """Stands for the handle of an actor, which is here."""

    def __init__(self) -> None:
        self.node = RayNode()
        self.calls = ThreadPoolExecutor()
        self.errors = import_ray().exceptions
        self.lost: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.calls.submit(getattr(self.node, name), *given))

    def get(self, answer: Future[Any], *, timeout: float) -> Any:
        """For `ray.get`."""
        if self.lost is not None:
            raise self.lost
        try:
            return answer.result(min(timeout, 0.1))
        except TimeoutError:
            raise self.errors.GetTimeoutError from None


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    made = Actor()
    monkeypatch.setattr(import_ray(), "get", made.get)
    yield made
    made.calls.shutdown()


def begin(actor: Actor, *words: str, directory: Path | None = None) -> RayProcess:
    return RayProcess(lambda: actor, 0, words, None if directory is None else str(directory), threading.Event())


def close(process: RayProcess) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.leave(10)


def test_what_it_reads_writes_and_ends_with(actor: Actor, tmp_path: Path) -> None:
    process = begin(actor, sys.executable, "-c", ECHO, directory=tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    text = b"a word " * 50_000  # more than a call carries
    process.stdin.write(text)
    assert process.poll() is None
    process.stdin.close()
    assert process.stdout.read() == text.upper() + b"\n"
    assert process.stderr.read() == b"oh\n"
    assert process.wait(60) == process.poll() == 7
    close(process)


def test_it_is_killed(actor: Actor) -> None:
    process = begin(actor, "sleep", "1000")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    assert process.wait(60) in (-9, LOST)  # LOST where this machine is slow
    close(process)


@pytest.mark.parametrize(
    ("words", "folder", "said"),
    [
        (["true"], "none", "cd: {folder}: there is no such directory on this node\n"),
        (["no-such-program"], "", "no-such-program: No such file or directory\n"),
    ],
)
def test_what_a_node_cannot_start_is_told(
    actor: Actor, tmp_path: Path, words: list[str], folder: str, said: str
) -> None:
    process = begin(actor, *words, directory=tmp_path / folder)
    assert process.stderr is not None
    assert process.stderr.read().decode() == said.format(folder=tmp_path / folder)
    assert process.wait(60) == LOST
    close(process)


def test_no_node_is_told() -> None:
    def reach() -> Any:
        raise NoNodeError("Ray had no node for it")

    process = RayProcess(reach, 0, ["true"], None, threading.Event())
    assert process.stderr is not None
    assert process.stderr.read() == b"Ray had no node for it\n"
    assert process.wait(60) == LOST
    close(process)


def test_a_node_that_dies_ends_it_with_the_reason(actor: Actor, tmp_path: Path, until: Until) -> None:
    process = begin(actor, "sh", "-c", "touch up; cat", directory=tmp_path)
    # The program may run before the node has heard of it.
    until(lambda: (tmp_path / "up").exists() and 0 in actor.node._programs, "the program")
    actor.lost = actor.errors.ActorUnavailableError("", None)
    assert process.stderr is not None
    assert process.stderr.read() == b"the connection to its Ray actor broke\n"
    assert process.wait(60) == LOST
    actor.node.write(0, b"")  # as when its process ends
    close(process)


def test_programs_of_a_node_whose_process_is_killed_read_the_end_of_their_stdin(tmp_path: Path, until: Until) -> None:
    with subprocess.Popen([sys.executable, "-c", NODE], cwd=tmp_path) as process:
        until((tmp_path / "up").exists, "the program")
        assert not (tmp_path / "ended").exists()
        process.kill()
    until((tmp_path / "ended").exists, "the end of the program")


def test_why_an_actor_does_not_answer() -> None:
    errors = import_ray().exceptions
    assert reason_of(errors.ActorDiedError()).startswith("its Ray actor died")
    assert reason_of(errors.NodeDiedError("x")) == "Ray says that the node died"
    assert reason_of(errors.RayError("one\ntwo")) == "Ray cannot reach its actor: one"
    assert reason_of(errors.RayError()) == "Ray cannot reach its actor: RayError"
