"""A process of its own in which the compiler of a target runs; this one touches no accelerator for it.

The compiler is a large C++ library that may look for devices, hold locks and abort: none of that reaches the caller.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from roxxel_dist.devices.targets import Target
from roxxel_dist.process import interrupt
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import print_line

FIRST_WORD_S = 10.0
"""A compilation that takes longer is reported, and again each time it has taken twice as long."""
CHILD = "import sys; from roxxel_dist.run.estimate.target_process import child; child(int(sys.argv[1]))"


Report = Callable[[str, bool], None]
"""(what is compiled, whether that is done)."""


class TargetError(RuntimeError):
    """The process of a target's compiler ended without a result."""


def call_for_target(target: Target, function: Callable[..., Any], *args: Any) -> Any:
    """`function(report, target, *args)` in a process with the target's environment; returns what it returns.

    Both, and the result, are pickled. `report` tells what begins to be compiled, and what is done.

    Raises:
        ValueError: raised by the function as a mistake of the user's, with the same message.
        TargetError: the process failed (its traceback is on stderr), or was killed.
    """
    ours, theirs = Pipe()
    with contextlib.ExitStack() as held:
        held.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            env={**os.environ, **target.environment()},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        theirs.close()

        def stop() -> None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

        held.callback(process.wait)
        held.callback(stop)
        held.enter_context(interrupt.cleanup(stop))
        running: dict[str, float] = {}  # what is compiled now -> when that began
        word_after = FIRST_WORD_S
        try:
            ours.send((list(sys.path), os.getcwd()))
            ours.send_bytes(pickle.dumps((target, function, args)))
            while True:
                begun = min(running.values(), default=None)
                left = None if begun is None else max(0.0, begun + word_after - time.monotonic())
                if begun is not None and not ours.poll(left):
                    what = " and ".join(running)
                    print_line(f"compiling {what} for {target.name}: {time.monotonic() - begun:.0f} s so far")
                    word_after *= 2
                    continue
                kind, value = ours.recv()
                match kind:
                    case "begun":
                        running[value] = time.monotonic()
                        word_after = FIRST_WORD_S if len(running) == 1 else word_after
                    case "done":
                        running.pop(value, None)
                    case "refused":
                        raise UserError(value)
                    case "failed":
                        raise TargetError(value)
                    case "result":
                        return value
        except (EOFError, ConnectionError) as error:
            raise TargetError(_how_it_ended(process.wait(), " and ".join(running), target)) from error


def _how_it_ended(code: int, what: str, target: Target) -> str:
    during = f"while it compiled {what}" if what else "before it compiled anything"
    if code >= 0:
        return f"the process that compiles for {target.name} ended with {code} {during}: see its output"
    name = signal.Signals(-code).name
    fix = ": this machine may have too little memory for it" if -code == signal.SIGKILL else ": see its output"
    return f"the process that compiles for {target.name} was ended by {name} {during}{fix}"


def child(descriptor: int) -> None:
    """The main function of the other process."""
    connection = Connection(descriptor)
    sys.path[:], folder = connection.recv()
    os.chdir(folder)
    target, function, args = pickle.loads(connection.recv_bytes())
    threading.Thread(target=_leave_with_caller, args=(connection,), daemon=True).start()
    lock = threading.Lock()

    def send(kind: str, value: Any) -> None:
        with lock:
            connection.send((kind, value))

    def report(what: str, is_done: bool) -> None:
        send("done" if is_done else "begun", what)

    try:
        result = function(report, target, *args)
    except UserError as error:
        return send("refused", str(error))
    except Exception as error:
        import traceback

        traceback.print_exc()
        return send("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    send("result", result)


def _leave_with_caller(connection: Connection) -> None:
    """The caller sends nothing more: it is there, or it is gone, and a compilation cannot be broken off otherwise."""
    with contextlib.suppress(EOFError, OSError):
        connection.poll(None)
    os._exit(1)
