"""The controller's end of the probes: the same question to all hosts at once, with a limit."""

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from roxxel_dist.launcher.backends.base import Backend, RemoteProcess
from roxxel_dist.launcher.transport.protocol import encode

PROBE = "roxxel_dist.launcher.preflight.probe"
LIMIT_S = 60.0
END_S = 2.0
CHUNK = 1 << 16
KEPT = 1 << 13
"""Bytes of a probe's stderr that are kept: its end has the reason."""

Message = dict[str, Any]


class Interrupted(Exception):
    """Somebody wants the launcher's attention, and preflight was broken off."""


@dataclass(eq=False, kw_only=True)
class _Probe:
    """A probe that runs on a host."""

    host: str
    process: RemoteProcess
    out: int
    err: int
    said: bytes = b""
    errors: bytes = b""
    answers: list[Message] = field(default_factory=list)


class Panel:
    """A probe on each host. Use it as a context: at its end the probes, and all that they held, are gone.

    Args:
        backend: starts the probes.
        hosts: where.
        wake: a descriptor; when it can be read, `ask` raises `Interrupted`.
    """

    def __init__(self, backend: Backend, hosts: Sequence[str], wake: int | None = None) -> None:
        self.gone: dict[str, str] = {}
        """Hosts that do not answer, and why."""
        self._select = selectors.DefaultSelector()
        self._probes: dict[str, _Probe] = {}
        self._started: list[RemoteProcess] = []
        if wake is not None:
            self._select.register(wake, selectors.EVENT_READ, None)
        try:
            for host in hosts:
                self._start(backend, host)
        except BaseException:
            self.close()
            raise

    def _start(self, backend: Backend, host: str) -> None:
        try:
            process = backend.start(host, PROBE)
        except OSError as error:
            self.gone[host] = f"no probe could be started: {error}"
            return
        assert process.stdout is not None
        assert process.stderr is not None
        self._started.append(process)
        probe = _Probe(host=host, process=process, out=process.stdout.fileno(), err=process.stderr.fileno())
        self._probes[host] = probe
        self._select.register(probe.out, selectors.EVENT_READ, probe)
        self._select.register(probe.err, selectors.EVENT_READ, probe)

    def ask(self, questions: Mapping[str, Message], limit: float = LIMIT_S) -> dict[str, Message]:
        """Ask hosts, and wait for all answers; `heard` in each is the time here when it came.

        A host that does not answer within `limit` seconds, or whose probe ends, has no answer, and is `gone`.

        Raises:
            Interrupted: the descriptor `wake` can be read.
        """
        answers: dict[str, Message] = {}
        for host, question in questions.items():
            if probe := self._probes.get(host):
                probe.answers.clear()
                _write(probe.process, encode(question))
        end = time.monotonic() + limit
        while waiting := [host for host in questions if host in self._probes and host not in answers]:
            left = end - time.monotonic()
            if left <= 0:
                for host in waiting:
                    self._lose(host, f"it did not answer within {limit:g} s: is the machine stuck, or its network?")
                break
            for key, _ in self._select.select(left):
                if key.data is None:
                    raise Interrupted
                self._read(key.fd, key.data)
            for host in waiting:
                if host in self._probes and self._probes[host].answers:
                    answers[host] = self._probes[host].answers.pop()
        return {host: answers[host] for host in questions if host in answers}

    def _read(self, fd: int, probe: _Probe) -> None:
        if self._probes.get(probe.host) is not probe:  # lost a moment ago, in the same round
            return
        data = os.read(fd, CHUNK)
        if fd == probe.err:
            probe.errors = (probe.errors + data)[-KEPT:]
            if not data:
                self._select.unregister(fd)
        elif not data:
            self._lose(probe.host, _why_it_ended(probe))
        else:
            *lines, probe.said = (probe.said + data).split(b"\n")
            for line in lines:
                answer = _decoded(line)
                if answer is None:
                    self._lose(probe.host, _noise(line))
                    return
                probe.answers.append(answer | {"heard": time.time()})

    def _lose(self, host: str, why: str) -> None:
        self.gone[host] = why
        probe = self._probes.pop(host)
        for fd in (probe.out, probe.err):
            with suppress(KeyError):
                self._select.unregister(fd)
        if probe.process.poll() is None:
            probe.process.kill()

    def close(self) -> None:
        """End the probes and wait for their end: then what they held is free."""
        self._select.close()
        for process in self._started:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        end = time.monotonic() + END_S
        for process in self._started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> "Panel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write(process: RemoteProcess, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the end of its stdout tells, and its stderr says why
        process.stdin.write(data)
        process.stdin.flush()


def _decoded(line: bytes) -> Message | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _noise(line: bytes) -> str:
    shown = line[:80].decode(errors="replace")
    return (
        f"{shown!r} came where an answer was expected: a start-up file there (~/.bashrc) prints; have it print nothing "
        "in shells that are not interactive"
    )


def _why_it_ended(probe: _Probe) -> str:
    try:
        code: int | str = probe.process.wait(END_S)
    except subprocess.TimeoutExpired:
        code = "unknown"
    os.set_blocking(probe.err, False)  # somebody else may hold the other end for long: a shared ssh connection does
    with suppress(BlockingIOError):
        while data := os.read(probe.err, CHUNK):
            probe.errors = (probe.errors + data)[-KEPT:]
    lines = [line.strip() for line in probe.errors.decode(errors="replace").splitlines() if line.strip()]
    why = lines[-1] if lines else "nothing was said"
    if "cd:" in why:
        why += "; name a working directory that is there with --directory"
    elif "No module named" in why or "not found" in why or "No such file" in why:
        why += "; install roxxel-dist there, or name the Python that has it with --python"
    return f"{why} (code {code})"
