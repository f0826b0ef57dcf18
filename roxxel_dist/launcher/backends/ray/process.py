"""The near end of a program that a Ray actor runs: pipes here, and threads that carry their bytes through Ray.

No port and no key of ours: everything travels in calls of the actor, which Ray authenticates.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

CHUNK = 1 << 16
KILL_S = 5.0
"""How long a node may take to say how a killed program ended, before nobody waits for it."""
REASON_S = 1.0
LOOK_S = 1.0
LOST = 255
"""How a program ends whose node is gone, as with ssh."""


class NoNodeError(Exception):
    """There is no actor that could run anything. The message says why."""


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
        self._lock = threading.Lock()
        self._node: Any = None
        self._killed = False
        self._threads: list[threading.Thread] = []
        orders, stdin = os.pipe()
        stdout, out = os.pipe()
        stderr, err = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(stderr, "rb")
        self._thread(self._run, orders, out, err)

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, when it has; LOST where its node is gone. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._words, timeout or 0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """End it now. A node that does not answer is waited for KILL_S at most; its agent has a heartbeat timeout."""
        self._killed = True
        self._tell_killed()
        limit = threading.Timer(KILL_S, self._end, (LOST,))
        limit.daemon = True
        limit.start()

    def _tell_killed(self) -> None:
        from ray.exceptions import RayError

        if self._node is not None:
            with suppress(RayError):
                self._node.kill.remote(self._number)

    def _thread(self, run: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, name=f"ray-{self._number}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _run(self, orders: int, out: int, err: int) -> None:
        """The life of the program: started, its stdout carried here, its end heard."""
        from ray.exceptions import RayError

        try:
            self._node = self._reach()
            why = self._ask("start", self._words, self._directory)
        except NoNodeError as problem:
            why = str(problem)
        except RayError as problem:
            why = gone(problem)
        if why:
            self._refuse(why, orders, out, err)
            return
        if self._killed:
            self._tell_killed()
        self._thread(self._carry_orders, orders)
        errors = self._thread(self._carry_errors, err)
        try:
            self._carry(out, False)
        except RayError:
            errors.join(REASON_S)  # who sees the end of its stdout looks at once for the reason
            self._end(LOST)
        os.close(out)
        try:
            self._end(self._ask("wait"))
        except RayError:
            self._end(LOST)

    def _refuse(self, why: str, orders: int, out: int, err: int) -> None:
        os.close(orders)
        with suppress(OSError):
            os.write(err, f"{why}\n".encode())
        os.close(err)
        self._end(LOST)
        os.close(out)

    def leave(self, limit_s: float) -> None:
        """Wait until no thread of this one is in Ray any more, when `closed` is set."""
        end = time.monotonic() + limit_s
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _ask(self, method: str, *arguments: object) -> Any:
        """The answer of the actor. Raises RayError, also when the launcher has closed."""
        import ray
        from ray.exceptions import GetTimeoutError

        if self._closed.is_set():
            raise GetTimeoutError("the launcher has ended")
        answer = getattr(self._node, method).remote(self._number, *arguments)
        while True:
            try:
                return ray.get(answer, timeout=LOOK_S)
            except GetTimeoutError:
                if self._closed.is_set():  # who waits in Ray while it is shut down takes the process with it
                    raise

    def _carry(self, fd: int, error: bool) -> None:
        """Bring what the program says into a pipe here, to its end."""
        with suppress(BrokenPipeError):  # nobody here wants to know any more
            while data := self._ask("read", error):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]

    def _carry_errors(self, fd: int) -> None:
        from ray.exceptions import RayError

        try:
            self._carry(fd, True)
        except RayError as problem:
            with suppress(OSError):
                os.write(fd, f"{gone(problem)}\n".encode())
        finally:
            os.close(fd)

    def _carry_orders(self, fd: int) -> None:
        from ray.exceptions import RayError

        try:
            with suppress(RayError):
                while self._ask("write", os.read(fd, CHUNK)):
                    pass
        finally:
            os.close(fd)

    def _end(self, code: int) -> None:
        with self._lock:
            if self._code is None:
                self._code = code
        self._ended.set()


def gone(problem: Exception) -> str:
    """Why an actor does not answer, in one line: Ray's own text has many."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError

    if isinstance(problem, NodeDiedError) or "node has died" in str(problem):
        return "Ray says that the node died"
    if isinstance(problem, ActorDiedError):
        return "its Ray actor died (its process was killed, or its node is gone)"
    if isinstance(problem, ActorUnavailableError):
        return "the connection to its Ray actor broke"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"Ray cannot reach its actor: {lines[0] if lines else type(problem).__name__}"
