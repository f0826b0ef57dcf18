"""Ranks on hosts that OpenSSH reaches, by the user's own keys, known_hosts and configuration; hosts by their names."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, TypeVar

from roxxel_dist.launcher.control.inbox import first_list, hosts_in
from roxxel_dist.launcher.control.new_job import BackendOptions
from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import lines_of, python_words, ranks_on, shell_text
from roxxel_dist.launcher.job.spec import HostOptions, MemberOptions
from roxxel_dist.launcher.output import info
from roxxel_dist.launcher.transport.connection import causes, start_near
from roxxel_dist.process.exit_codes import UserError

HOST = re.compile(r"[A-Za-z0-9_.@:\[\]%][A-Za-z0-9_.@:\[\]%-]*")
NAME = re.compile(rf"{HOST.pattern}(/{HOST.pattern})*")
"""The name of a host that a command reaches: `kubectl get pods -o name` prints pod/x."""


def check_hosts(hosts: Sequence[str], *, by_ssh: bool = True) -> tuple[str, ...]:
    """The hosts, if each can be one. Raises ValueError for a name that cannot, for one given twice, and for none.

    `by_ssh`: ssh takes the names; or else a command of the user's does.
    """
    if not hosts:
        raise UserError("no hosts: give --hosts a,b,c, or a --hostfile with one host in each line")
    for host in hosts:
        name, _, count = host.partition(":")
        if count.isdecimal():
            raise UserError(
                f"host {host!r}: a name alone is a host; for {count} processes on each host write {name} with "
                f"--procs-per-host {count}"
                + f", and for port {count} set it in ssh's configuration (--ssh-config)"
                * by_ssh
            )
        if "[" in host and ":" not in host:
            raise UserError(f"host {host!r}: ranges are not expanded; write each host, as in --hosts a1,a2")
        if not (HOST if by_ssh else NAME).fullmatch(host):
            letters = f"letters, digits, . - _ : @{' /' * (not by_ssh)}"
            raise UserError(
                f"{host!r} cannot be a host: use a name or an address as {'ssh' if by_ssh else '--via'} takes it "
                f"({letters})"
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
    lines = lines_of("--hostfile", path, "a host")
    return hosts_in("\n".join(lines), f"--hostfile {path}")


def hosts_of(hosts: str | None, hostfile: str | None) -> tuple[list[str], int | None]:
    """The hosts of `--hosts a,b` or of `--hostfile`, and the slots of each by the file.

    Raises ValueError where both or none are given, or the file cannot be used.
    """
    if (hosts is None) == (hostfile is None):
        raise UserError("give --hosts a,b,c or --hostfile FILE" + (", not both" if hosts is not None else ""))
    if hostfile is not None:
        return read_hostfile(hostfile)
    return [host.strip() for host in (hosts or "").split(",") if host.strip()], None


class NamedBackend(Backend):
    """A backend of hosts that are reached by their names: others can join a job."""

    takes_hosts: bool = True
    same_machine: bool = False

    def check_joining(self, hosts: Sequence[str]) -> None:
        """Check that the names can be hosts of this backend, as `check_hosts` does."""
        check_hosts(hosts, by_ssh=self.is_by_ssh)


Named = TypeVar("Named", bound=NamedBackend)


@dataclass(frozen=True, kw_only=True)
class NamedHosts(MemberOptions, HostOptions):
    """Flags for hosts by their names, and for what is there."""

    hosts: str | None = None
    """Names of the hosts, separated by commas: a,b,c. The first one has rank 0."""
    hostfile: str | None = None
    """A file with one host in each line, or `host slots=N`."""
    procs_per_host: int | None = None
    """Processes to start on each host; the slots of the host file, or 1."""
    python: str | None = None
    """The interpreter on the hosts; not given, the path of this one."""
    directory: str | None = None
    """The working directory on the hosts; not given, that of the launcher."""
    same_machine: bool = False
    """Let several hosts be one machine, or this one, whatever their names: to try a job out. Without it such an answer
    is refused, for what reaches the hosts leads to the wrong one."""

    def named(self, make: Callable[[Sequence[str]], Named], wait_s: float) -> tuple[Named, int]:
        """The backend that `make` makes of the hosts, and how many processes on those that work at a time.

        A list of --hosts-from has `wait_s` seconds to have --min-hosts hosts. Raises ValueError for a slip.
        """
        given, slots, listed = [], None, []
        if self.hosts_from is None or self.hosts is not None or self.hostfile is not None:
            given, slots = hosts_of(self.hosts, self.hostfile)
        if self.hosts_from is not None:
            least = max((self.min_hosts or 1) - len(given), 0)
            listed, also = first_list(self.hosts_from, least, wait_s, info)
            slots = also if slots is None else slots
        backend = make([*given, *(host for host in listed if host not in given)])
        backend.given, backend.listed, backend.same_machine = given, listed, self.same_machine
        procs_per_host = slots or 1 if self.procs_per_host is None else self.procs_per_host
        return backend, ranks_on(len(backend.hosts), procs_per_host, self.spare_hosts, self.min_hosts, self.max_hosts)


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
OPTIONS_SINCE_8_7 = ("SessionType=default", "StdinNull=no", "ForkAfterAuthentication=no")
"""Those of a host that is only a tunnel; an older ssh has no such settings, and would end."""
REFUSAL = re.compile(
    r"(kex|ssh)_exchange_identification: |Connection (closed|reset) by|Exceeded MaxStartups"
    r"|Not allowed at this time|open failed: (resource shortage|administratively prohibited)"
    r"|Session open refused by peer"
)
"""What ssh says where a server closes a connection before anybody has logged in: it has too many of these at a time
(MaxStartups), or of sessions (MaxSessions)."""
BOOTING = "System is booting up"
"""What a machine says whose sshd takes connections before its users may log in (pam_nologin)."""
HINTS: base.Hints = (
    ("Permission denied (", "nobody answers a question here: use a key without a passphrase, or an ssh-agent"),
    ("Host key verification failed", "log in once by hand, and compare its key: it has to be in known_hosts"),
    ("Could not resolve hostname", "write names as ssh takes them; --procs-per-host says how many ranks a host has"),
)


@dataclass(eq=False)
class SshBackend(NamedBackend):
    """One agent a host, each at the other end of an ssh session, which is the channel.

    Raises:
        ValueError: a name that cannot be a host's, or one given twice; no ssh on this machine.
    """

    is_remote: ClassVar[bool] = True
    is_by_ssh: ClassVar[bool] = True
    hints: ClassVar[base.Hints] = HINTS + base.HINTS
    login: ClassVar[str] = (
        "does the login shell, or its start-up file (~/.bashrc), end before the program? Is it killed there, or does "
        "sshd allow no session (MaxSessions)? `ssh -v` says more"
    )
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
        remote = shell_text(self.directory, python_words(self.python, module, *words))
        given = OPTIONS + OPTIONS_SINCE_8_7 * (_version() >= (8, 7))
        options = [word for option in given for word in ("-o", option)]
        config = () if self.config is None else ("-F", self.config)
        return ["ssh", *config, "-T", *options, "--", host, remote]

    def start(self, host: str, module: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start `python -m MODULE WORDS` on a host. Call it from the main thread: ssh ends with the thread."""
        # That of a bastion asks by another program, where it may.
        return start_near(self.argv(host, module, *words), {**os.environ, "SSH_ASKPASS_REQUIRE": "never"})

    def is_broken_link(self, code: int) -> bool:
        """Whether ssh says so, or was killed itself."""
        return code == 255 or code < 0

    def is_refusal(self, stderr: Sequence[str]) -> bool:
        """Whether sshd, or a bastion before it, has closed the connection for want of room."""
        return any(REFUSAL.search(line) for line in causes(stderr) or stderr)

    def is_starting(self, stderr: Sequence[str]) -> bool:
        """Whether the machine is booting."""
        return any(BOOTING in line for line in stderr)


@cache
def _version() -> tuple[int, int]:
    """Of OpenSSH on this machine; (0, 0) where it does not say."""
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", answer_of(["ssh", "-V"], 5).stderr)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True, kw_only=True)
class Options(BackendOptions, NamedHosts):
    """Start a program on many hosts, over OpenSSH: `launch ssh --hosts a,b [options] -- CMD…`.

    It asks nothing: keys must work without a passphrase (or by an ssh-agent), and hosts must be in known_hosts. Each
    host needs this Python environment, the working directory and the data at the same paths.
    """

    example: ClassVar[str] = "--hosts a,b"
    hosts: str | None = None
    """Names as ssh takes them, separated by commas: a,b,user@c. The first one has rank 0."""
    ssh_config: str | None = None
    """A file for `ssh -F`; not given, ssh reads ~/.ssh/config."""

    def backend(self) -> tuple[SshBackend, int]:
        """The hosts, and how many processes on those that work at a time. Raises ValueError for a slip."""
        python, directory = self.python or "", self.directory or ""
        return self.named(
            lambda hosts: SshBackend(hosts, config=self.ssh_config, python=python, directory=directory),
            0.0 if self.dry_run else self.host_timeout,
        )
