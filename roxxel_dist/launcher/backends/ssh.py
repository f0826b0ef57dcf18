"""Ranks on hosts that OpenSSH reaches, by the user's own keys, known_hosts and configuration."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.host.process_tree import HEARTBEAT_TIMEOUT_S, start_near
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.environment import lines_of
from roxxel_dist.launcher.job.placement import python_words, ranks_on
from roxxel_dist.launcher.job.spec import HostOptions

OPTIONS = (
    "BatchMode=yes",  # a launcher cannot answer a question
    "ConnectTimeout=10",
    "ServerAliveInterval=0",  # the launcher has heartbeats, and decides how long a link may be cut
    "ControlPath=none",  # a shared connection would outlive the job, or end it with another session
    "ClearAllForwardings=yes",
    "LogLevel=ERROR",
    "RemoteCommand=none",
    "RequestTTY=no",
    "PermitLocalCommand=no",  # what it prints would be in the channel
)
REFUSAL = re.compile(
    r"(kex|ssh)_exchange_identification: |Connection (closed|reset) by|Exceeded MaxStartups"
    r"|Not allowed at this time|open failed: (resource shortage|administratively prohibited)"
    r"|Session open refused by peer"
)
"""What ssh says where a server closes a connection before anybody has logged in: it has too many of these at a time
(MaxStartups), or of sessions (MaxSessions)."""
HOST = re.compile(r"[A-Za-z0-9_.@:\[\]%][A-Za-z0-9_.@:\[\]%-]*")


@dataclass(eq=False)
class SshBackend(base.Backend):
    """One agent a host, each at the other end of an ssh session, which is the channel.

    Raises:
        ValueError: a name that cannot be a host's, or one given twice; no ssh on this machine.
    """

    heartbeat_timeout_s: ClassVar[float | None] = HEARTBEAT_TIMEOUT_S
    broken_link: ClassVar[int | None] = 255
    hosts: Sequence[str]
    """Names as `ssh` takes them (also `user@host`, or a Host of its configuration), in the order of the ranks."""
    _: KW_ONLY
    config: str | None = None
    """A file for `ssh -F`; None: ssh reads the user's own."""
    python: str = ""
    """The interpreter on the hosts; empty: the path of this one."""
    directory: str = ""
    """The working directory on the hosts; empty: that of this process."""

    def __post_init__(self) -> None:
        self.hosts = check_hosts(self.hosts)
        if shutil.which("ssh") is None:
            raise UserError("there is no `ssh` on this machine: install OpenSSH's client (openssh-client)")
        if self.config is not None:
            if not Path(self.config).is_file():
                raise UserError(f"--ssh-config {self.config}: no such file; leave it out to use ~/.ssh/config")
            self.config = str(Path(self.config).absolute())
        self.python = self.python or sys.executable
        self.directory = self.directory or os.getcwd()

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The ssh that `start` runs. The remote shell gets everything quoted."""
        remote = f"cd {shlex.quote(self.directory)} && exec {shlex.join(python_words(self.python, module, *words))}"
        options = [word for option in OPTIONS for word in ("-o", option)]
        config = () if self.config is None else ("-F", self.config)
        return ["ssh", *config, "-T", *options, "--", host, remote]

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a host. Call it from the main thread: ssh ends with the thread."""
        # That of a bastion asks by another program, where it may.
        return start_near(self.argv(host, module, *words), {**os.environ, "SSH_ASKPASS_REQUIRE": "never"})

    def is_refusal(self, stderr: Sequence[str]) -> bool:
        """Whether sshd, or a bastion before it, has closed the connection for want of room."""
        return any(REFUSAL.search(line) for line in stderr)


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """The hosts, if each can be one. Raises ValueError for a name that cannot, for one given twice, and for none."""
    if not hosts:
        raise UserError("no hosts: give --hosts a,b,c, or a --hostfile with one host in each line")
    for host in hosts:
        name, _, count = host.partition(":")
        if count.isdecimal():
            raise UserError(
                f"host {host!r}: a name alone is a host; for {count} processes on each host write {name} with "
                f"--procs-per-host {count}, and for port {count} set it in ssh's configuration (--ssh-config)"
            )
        if "[" in host and ":" not in host:
            raise UserError(f"host {host!r}: ranges are not expanded; write each host, as in --hosts a1,a2")
        if not HOST.fullmatch(host):
            raise UserError(
                f"{host!r} cannot be a host: use a name or an address as ssh takes it (letters, digits, . - _ : @)"
            )
    twice = sorted({host for host in hosts if list(hosts).count(host) > 1})
    if twice:
        raise UserError(f"host {twice[0]} is given twice: give each once, and --procs-per-host for more ranks on it")
    return tuple(hosts)


def read_hostfile(path: str | Path) -> tuple[list[str], int | None]:
    """The hosts of a file, and how many processes each has by it.

    A host a line; `#` begins a comment; `slots=N` after a host (as in MPI's files) must be the same for all.

    Raises:
        ValueError: the file cannot be read, or a line cannot be understood; names file and line.
    """
    hosts: list[str] = []
    slots: set[int | None] = set()
    for number, line in enumerate(lines_of("--hostfile", path, "a host"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if len(words) > 1 and match is None:
            raise UserError(f"--hostfile {path}, line {number}: {line.strip()!r}: write a host, or `host slots=N`")
        hosts.append(words[0])
        slots.add(int(match[1]) if match else None)
    if len(slots) > 1:
        raise UserError(f"--hostfile {path}: every host must have the same slots=N, or none; use --procs-per-host")
    return hosts, slots.pop() if slots else None


def hosts_of(hosts: str | None, hostfile: str | None) -> tuple[list[str], int | None]:
    """The hosts of `--hosts a,b` or of `--hostfile`, and the slots of each by the file.

    Raises ValueError where both or none are given, or the file cannot be used.
    """
    if (hosts is None) == (hostfile is None):
        raise UserError("give --hosts a,b,c or --hostfile FILE" + (", not both" if hosts is not None else ""))
    if hostfile is not None:
        return read_hostfile(hostfile)
    return [host.strip() for host in (hosts or "").split(",") if host.strip()], None


@dataclass(frozen=True, kw_only=True)
class SshOptions(HostOptions):
    """Which hosts, and how they are reached."""

    hosts: str | None = None
    """Names as ssh takes them, separated by commas: a,b,user@c. The first one has rank 0."""
    hostfile: str | None = None
    """A file with one host in each line, or `host slots=N`."""
    procs_per_host: int | None = None
    """Processes to start on each host; the slots of the host file, or 1."""
    ssh_config: str | None = None
    """A file for `ssh -F`; not given, ssh reads ~/.ssh/config."""
    python: str | None = None
    """The interpreter on the hosts; not given, the path of this one."""
    directory: str | None = None
    """The working directory on the hosts; not given, that of the launcher."""


@dataclass(frozen=True, kw_only=True)
class Options(base.BackendOptions, SshOptions):
    """Start a program on many hosts, over OpenSSH: `launch ssh --hosts a,b [options] -- CMD…`.

    It asks nothing: keys must work without a passphrase (or by an ssh-agent), and hosts must be in known_hosts. Each
    host needs this Python environment, the working directory and the data at the same paths.
    """

    example: ClassVar[str] = "--hosts a,b"

    def backend(self) -> tuple[SshBackend, int]:
        """The hosts, and how many processes on those that work at a time. Raises ValueError for a slip."""
        hosts, slots = hosts_of(self.hosts, self.hostfile)
        backend = SshBackend(hosts, config=self.ssh_config, python=self.python or "", directory=self.directory or "")
        procs_per_host = slots or 1 if self.procs_per_host is None else self.procs_per_host
        return backend, ranks_on(len(hosts), procs_per_host, self.spare_hosts, self.min_hosts)
