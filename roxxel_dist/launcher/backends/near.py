"""The near end of an agent on another host: a program of this machine (ssh, srun) that is the channel to it."""

import subprocess
from collections.abc import Mapping, Sequence

from roxxel_dist.launcher.host.process_tree import die_with_parent

LEASH_S = 10.0
"""For agents that a cut link can part from their launcher."""


def start_near(argv: Sequence[str], env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start it, with pipes, in a session of its own. Call it from the main thread: it ends with the thread.

    A launcher that is killed cannot close what is behind a cut link; the program would stay until TCP gives up.
    """
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - a system call, no lock
    )
