"""The near end of a program on a host: a client, such as ssh, whose pipes are the channel."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from roxxel_dist.launcher.host.process_tree import die_with_parent

STARTER = ThreadPoolExecutor(1, "start")
"""Its thread lives as long as this process: the job takes over clients that a thread of an attempt has asked for."""


class NearEnd(subprocess.Popen[bytes]):
    """A client with pipes, in a session of its own; what it has started there ends with it."""

    def kill(self) -> None:
        """End it now: a script around the client, and the client."""
        if self.poll() is None:  # so its number is still that of its group
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def start_near(argv: Sequence[str], env: Mapping[str, str] | None = None) -> NearEnd:
    """Start a client. It ends with this process, also if the thread that asks for it ends before.

    A launcher that is killed cannot close what is behind a cut link; the client would stay until TCP gives up.
    """
    if threading.current_thread() is threading.main_thread():
        return _start(argv, env)
    return STARTER.submit(_start, argv, env).result()


def _start(argv: Sequence[str], env: Mapping[str, str] | None) -> NearEnd:
    """It ends with the thread that calls this."""
    return NearEnd(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,  # a system call, no lock
    )
