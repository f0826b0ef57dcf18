"""Ranks on hosts that OpenSSH reaches, by the user's own keys, known_hosts and configuration."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from roxxel_dist.launcher.host.process_tree import HEARTBEAT_TIMEOUT_S, start_near
from roxxel_dist.launcher.spec import count_working

OPTIONS = (
    "BatchMode=yes",  # a launcher cannot answer a question
    "ConnectTimeout=10",
    "ServerAliveInterval=5",  # later than the heartbeat timeout of an agent, and soon enough for who reads a log
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
    heartbeat_timeout_s: float | None = HEARTBEAT_TIMEOUT_S

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

    def reach(self, host: str) -> tuple[str, ...]:
        """The words before a command of this program that run it on a host, for a person."""
        config = () if self._config is None else ("-F", self._config)
        return "ssh", *config, host, self._python, "-m", "roxxel_dist"

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


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start a program on many hosts, over OpenSSH: `launch ssh --hosts a,b [options] -- CMD…`.

    It asks nothing: keys must work without a passphrase (or by an ssh-agent), and hosts must be in known_hosts. Each
    host needs this Python environment, the working directory and the data at the same paths.
    """

    example: ClassVar[str] = "--hosts a,b"
    hosts: str | None = None
    """Names as ssh takes them, separated by commas: a,b,user@c. The first one has rank 0."""
    hostfile: str | None = None
    """A file with a host a line, or `host slots=N`."""
    procs_per_host: int | None = None
    """Processes to start on each host; the slots of the host file, or 1."""
    spare_hosts: int = 0
    """How many of the hosts, the last ones, wait until another one fails, and take its place."""
    min_hosts: int | None = None
    """Go on with so many hosts where others stay out of reach after a failure; not given, all are needed."""
    host_timeout: float = 60.0
    """Seconds that a host may be out of reach after a failure before the job goes on, or ends, without it."""
    ssh_config: str | None = None
    """A file for `ssh -F`; not given, ssh reads ~/.ssh/config."""
    python: str | None = None
    """The interpreter on the hosts; not given, the path of this one."""
    directory: str | None = None
    """The working directory on the hosts; not given, that of the launcher."""

    def backend(self) -> tuple[SshBackend, int]:
        """The hosts, and how many processes on those that work at a time. Raises ValueError for a slip."""
        hosts, slots = hosts_of(self.hosts, self.hostfile)
        procs = slots or 1 if self.procs_per_host is None else self.procs_per_host
        if procs < 1:
            raise ValueError(f"--procs-per-host {procs}: must be at least 1")
        found = SshBackend(hosts, config=self.ssh_config, python=self.python, directory=self.directory)
        return found, procs * count_working(len(hosts), self.spare_hosts, self.min_hosts)
