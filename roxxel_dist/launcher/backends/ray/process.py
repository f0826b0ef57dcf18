"""The near end of a program that a Ray actor runs: pipes here, and two threads that carry their bytes through Ray.

No port and no key of ours: everything travels in calls of the actor, which Ray authenticates.
"""

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

CHUNK = 1 << 16
KILL_S = 5.0
"""How long to wait for a node's report of how a killed program ended."""
LOOK_S = 1.0
LOST = 255
"""The exit code of a program whose node is gone, as with ssh."""


class NoNodeError(Exception):
    """The lack of an actor that could run anything. The message says why."""


class RayProcess:
    """A program on a node, with as much of `subprocess.Popen` as the launcher needs.

    Args:
        reach: makes sure of the actor; may wait. Raises NoNodeError.
        number: names the program, for this actor and all that follow it.
        words: its command line.
        directory: where it runs; None: where Ray's worker does.
        closed: set before Ray is shut down; nothing is asked of it any more.
    """

    def __init__(
        self,
        reach: Callable[[], Any],
        number: int,
        words: Sequence[str],
        directory: str | None,
        closed: threading.Event,
    ) -> None:
        self._reach, self._number, self._closed = reach, number, closed
        self._words, self._directory = list(words), directory
        self._code: int | None = None
        self._ended = threading.Event()
        self._actor: Any = None
        self._kill_by = math.inf
        """By the launcher's clock; finite when it was killed."""
        self._threads: list[threading.Thread] = []
        orders, stdin = os.pipe()
        stdout, out = os.pipe()
        stderr, err = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb")
        self._thread(self._run, orders, out, err)

    def poll(self) -> int | None:
        """The exit code; None while the program runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; LOST where its node is gone. Raises subprocess.TimeoutExpired.

        One that was killed is waited for KILL_S at most: its node may be gone too, and its agent has a limit.
        """
        limit = min(math.inf if timeout is None else timeout, max(0.0, self._kill_by - time.monotonic()))
        if not self._ended.wait(min(limit, threading.TIMEOUT_MAX)):
            if time.monotonic() < self._kill_by:
                raise subprocess.TimeoutExpired(self._words, timeout or 0)
            return LOST
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """End it now; see `wait`."""
        from ray.exceptions import RayError

        self._kill_by = min(self._kill_by, time.monotonic() + KILL_S)
        if self._actor is not None:
            with suppress(RayError):
                self._actor.kill.remote(self._number)

    def leave(self, limit_s: float) -> None:
        """Wait until no thread of this one is in Ray any more, when `closed` is set."""
        end = time.monotonic() + limit_s
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _thread(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, name=f"ray-{self._number}", daemon=True))
        self._threads[-1].start()

    def _run(self, orders: int, out: int, err: int) -> None:
        """The life of the program: started, its output carried here, its end received."""
        code = LOST
        try:
            self._actor = self._reach()
            reason = self._ask("start", self._words, self._directory)
            if not reason:
                if self._kill_by < math.inf:  # before it was there
                    self.kill()
                self._thread(self._carry_orders, orders)
                code = self._carry_output(out, err)
        except NoNodeError as problem:
            reason = str(problem)
        except Exception as problem:  # of many kinds, if Ray is gone; an uncaught one would leave callers waiting
            reason = reason_of(problem)
        if len(self._threads) == 1:
            os.close(orders)
        if reason:
            with suppress(OSError):
                os.write(err, f"{reason}\n".encode())
        os.close(err)
        self._code = code
        self._ended.set()
        os.close(out)  # last: the reader looks for the reason at the end of stdout

    def _ask(self, method: str, *arguments: object) -> Any:
        """The answer of the actor. Raises RayError, also when the launcher has closed."""
        from ray.exceptions import GetTimeoutError

        if self._closed.is_set():
            raise GetTimeoutError("the launcher has ended")
        return result(getattr(self._actor, method).remote(self._number, *arguments), self._closed)

    def _carry_output(self, out: int, err: int) -> int:
        """Bring the output of the program into the pipes here, to its end; returns its exit code."""
        while True:
            *pieces, code = self._ask("read")
            for fd, data in zip((out, err), pieces, strict=True):
                view = memoryview(data)
                with suppress(BrokenPipeError):  # the reader has closed its end
                    while view:
                        view = view[os.write(fd, view) :]
            if code is not None:
                return code

    def _carry_orders(self, fd: int) -> None:
        from ray.exceptions import RayError

        with os.fdopen(fd, "rb", buffering=0) as orders, suppress(RayError):
            while self._ask("write", orders.read(CHUNK)):
                pass


def result(answer: Any, closed: threading.Event, limit_s: float = math.inf) -> Any:
    """The answer of an actor.

    Raises RayError if the actor is lost, or a GetTimeoutError after `limit_s` seconds or when `closed` is set: a thread
    that waits in Ray during its shutdown crashes the process.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    end = time.monotonic() + limit_s
    while True:
        try:
            return ray.get(answer, timeout=LOOK_S)
        except GetTimeoutError:
            if closed.is_set() or time.monotonic() > end:
                raise


def reason_of(problem: Exception) -> str:
    """Why an actor does not answer, in one line: Ray's own text has many."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, NodeDiedError

    if isinstance(problem, GetTimeoutError):
        return "Ray has no node for it yet, or the node does not answer (`ray status`)"
    if isinstance(problem, NodeDiedError) or "node has died" in str(problem):
        return "Ray says that the node died"
    if isinstance(problem, ActorDiedError):
        return "its Ray actor died (its process was killed, or its node is gone)"
    if isinstance(problem, ActorUnavailableError):
        return "the connection to its Ray actor broke"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"Ray cannot reach its actor: {lines[0] if lines else type(problem).__name__}"
