"""Ranks on hosts that OpenSSH reaches, by the user's own keys, known_hosts and configuration."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.backends.near import LEASH_S, start_near

OPTIONS = (
    "BatchMode=yes",  # a launcher cannot answer a question
    "ConnectTimeout=10",
    "ServerAliveInterval=5",  # later than the leash of an agent, and soon enough for who reads a log
    "ServerAliveCountMax=3",
    "ControlPath=none",  # a shared connection would outlive the job, or end it with somebody else's session
    "ClearAllForwardings=yes",
    "LogLevel=ERROR",
)
HOST = re.compile(r"[A-Za-z0-9_.@:\[\]%][A-Za-z0-9_.@:\[\]%-]*")


class SshBackend:
    """One agent a host, each at the other end of an ssh session, which is the channel.

    Args:
        hosts: names as `ssh` takes them (also `user@host`, or a Host of its configuration), in the order of the ranks.
        config: a file for `ssh -F`; by default ssh reads the user's own.
        python: the interpreter on the hosts; by default the path of this one.
        directory: the working directory on the hosts; by default that of this process.

    Raises:
        ValueError: a name that cannot be a host's, or one given twice; no ssh on this machine.
    """

    address: str | None = None
    leash_s: float | None = LEASH_S

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        config: str | None = None,
        python: str | None = None,
        directory: str | None = None,
    ) -> None:
        self._hosts = check_hosts(hosts)
        if shutil.which("ssh") is None:
            raise ValueError("there is no `ssh` on this machine: install OpenSSH's client (openssh-client)")
        if config is not None and not Path(config).is_file():
            raise ValueError(f"--ssh-config {config}: no such file; leave it out to use ~/.ssh/config")
        self._config = None if config is None else str(Path(config).absolute())
        self._python = python or sys.executable
        self._directory = directory or os.getcwd()

    @property
    def hosts(self) -> Sequence[str]:
        """As they were given."""
        return self._hosts

    @property
    def python(self) -> str:
        """The interpreter on the hosts."""
        return self._python

    @property
    def environment(self) -> Mapping[str, str]:
        """Nothing of the launcher's own goes there by itself."""
        return {}

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The ssh that `start` runs. The remote shell gets everything quoted."""
        remote = f"cd {shlex.quote(self._directory)} && exec {shlex.join([self._python, '-u', '-m', module, *words])}"
        options = [word for option in OPTIONS for word in ("-o", option)]
        config = [] if self._config is None else ["-F", self._config]
        return ["ssh", *config, "-T", *options, "--", host, remote]

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a host. Call it from the main thread: ssh ends with the thread."""
        return start_near(self.argv(host, module, *words))

    def describe(self) -> Mapping[str, Any]:
        """What `backends.make` needs."""
        return {
            "kind": "ssh",
            "hosts": list(self._hosts),
            "config": self._config,
            "python": self._python,
            "directory": self._directory,
        }


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts, if each can be one. Raises ValueError for a name that cannot, for one given twice, and for none."""
    if not hosts:
        raise ValueError("no hosts: give --hosts a,b,c, or a --hostfile with a host a line")
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ValueError(
                f"{host!r} cannot be a host: use a name or an address as ssh takes it (letters, digits, . - _ : @)"
            )
    twice = sorted({host for host in hosts if list(hosts).count(host) > 1})
    if twice:
        raise ValueError(f"host {twice[0]} is given twice: give each once, and --procs-per-host for more ranks on it")
    return tuple(hosts)


def read_hostfile(path: str | Path) -> tuple[list[str], int | None]:
    """The hosts of a file, and how many processes each has by it.

    A host a line; `#` begins a comment; `slots=N` after a host (as in MPI's files) must be the same for all.

    Raises:
        ValueError: the file cannot be read, or a line cannot be understood; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"--hostfile {path}: cannot be read ({reason}); name a file with a host a line") from error
    hosts: list[str] = []
    slots: set[int | None] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if len(words) > 1 and match is None:
            raise ValueError(f"--hostfile {path}, line {number}: {line.strip()!r}: write a host, or `host slots=N`")
        hosts.append(words[0])
        slots.add(int(match[1]) if match else None)
    if len(slots) > 1:
        raise ValueError(f"--hostfile {path}: every host must have the same slots=N, or none; use --procs-per-host")
    return hosts, slots.pop() if slots else None


def hosts_of(hosts: str | None, hostfile: str | None) -> tuple[list[str], int | None]:
    """The hosts of `--hosts a,b` or of `--hostfile`, and the slots of each by the file.

    Raises ValueError where both or none are given, or the file cannot be used.
    """
    if (hosts is None) == (hostfile is None):
        raise ValueError("give --hosts a,b,c or --hostfile FILE" + (", not both" if hosts is not None else ""))
    if hostfile is not None:
        return read_hostfile(hostfile)
    return [host.strip() for host in (hosts or "").split(",") if host.strip()], None
