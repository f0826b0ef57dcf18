"""Ranks on hosts that OpenSSH reaches, by the user's own keys, known_hosts and configuration."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from roxxel_dist.launcher.backends.hosts import NamedBackend, NamedHosts, check_hosts
from roxxel_dist.launcher.control.new_job import BackendOptions
from roxxel_dist.launcher.host.command import answer_of
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.job.placement import python_words, shell_text
from roxxel_dist.launcher.transport.connection import causes, start_near
from roxxel_dist.process.exit_codes import UserError

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
