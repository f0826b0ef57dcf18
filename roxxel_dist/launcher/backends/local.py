"""Ranks on this machine."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from roxxel_dist.launcher.control.new_job import BackendOptions
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words


class LocalBackend(base.Backend):
    """One agent, a child of the launcher in a session of its own (so that Ctrl-C reaches the launcher alone)."""

    is_local = True
    hosts: Sequence[str] = (socket.gethostname(),)
    address: str | None = "127.0.0.1"
    """Loopback: nothing outside this machine can reach the job."""

    environment: Mapping[str, str] = os.environ  # ranks inherit them

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The command that `start` runs."""
        return python_words(self.python, module, *words)

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on this machine."""
        return subprocess.Popen(
            self.argv(host, module, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


@dataclass(frozen=True, kw_only=True)
class Options(BackendOptions):
    """Start a program as many processes on this machine: `launch local [options] -- CMD…`.

    CMD is `train …` (which stands for `roxxel-dist train …`), a Python script, or any program.
    """

    example: ClassVar[str] = "--nprocs 2"
    nprocs: int = 1
    """Number of processes."""

    def backend(self) -> tuple[LocalBackend, int]:
        """This machine, and how many processes."""
        return LocalBackend(), self.nprocs
