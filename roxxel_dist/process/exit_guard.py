"""A process that has done its work ends, whatever a library still waits for.

A client that hangs may have registered functions that run at the end of the process, or threads that are waited for.
"""

import os
import sys
import threading
from typing import NoReturn

EXIT_WAIT_S = 10.0
"""How long the interpreter has for its end after something was found to hang."""
_hanging: list[str] = []


def expect_a_hang(what: str) -> None:
    """Something of this process hangs, so its end may too: limit that."""
    _hanging.append(what)


def limit_the_end(code: int) -> None:
    """Call it last, before `sys.exit(code)`: if something hangs, this process ends so after `EXIT_WAIT_S`."""
    if _hanging:
        timer = threading.Timer(EXIT_WAIT_S, _leave, (code,))
        timer.daemon = True
        timer.start()


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
