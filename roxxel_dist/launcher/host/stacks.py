"""Asking a process for the stacks of its threads, without harm to one that does not understand the question."""

import os
from contextlib import suppress
from pathlib import Path

from roxxel_dist.cluster.exit_codes import STACK_SIGNAL

QUESTION = STACK_SIGNAL
"""The worker answers it with faulthandler, into the rank's log. A process that does not catch it would die of it."""


def ask_for_stack(pid: int, session: int) -> tuple[str, bool]:
    """Signal a process of a session, if it listens; (its state as in /proc, whether it was asked).

    `pid` is what the rank has written in its record, perhaps nothing (0) or of a process that is gone: then the state
    is that of the session's leader, and nobody is asked.
    """
    with suppress(OSError):
        if pid > 0 and os.getsid(pid) == session:
            fields = _status(pid)
            listens = bool(int(fields["SigCgt"], 16) >> (QUESTION - 1) & 1)
            if listens:
                os.kill(pid, QUESTION)
            return fields["State"][:1], listens
    with suppress(OSError):
        return _status(session)["State"][:1], False
    return "X", False


def _status(pid: int) -> dict[str, str]:
    lines = Path("/proc", str(pid), "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
