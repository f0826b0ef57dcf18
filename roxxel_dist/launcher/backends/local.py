"""Ranks on this machine."""

import socket
import subprocess
import sys
from collections.abc import Sequence


class LocalBackend:
    """One agent, a child of the launcher in a session of its own (so that Ctrl-C reaches the launcher alone)."""

    @property
    def hosts(self) -> Sequence[str]:
        """This machine."""
        return (socket.gethostname(),)

    @property
    def coordinator_host(self) -> str:
        """Loopback: nothing outside this machine can reach the job."""
        return "127.0.0.1"

    def start(self, host: str) -> subprocess.Popen[bytes]:
        """Start the agent of this machine."""
        return subprocess.Popen(
            [sys.executable, "-m", "roxxel_dist.launcher.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
