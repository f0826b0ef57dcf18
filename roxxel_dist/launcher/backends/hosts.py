"""Hosts by their names: those of `--hosts` or of a host file, for the backends that reach each by its name."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from roxxel_dist.launcher.control.inbox import first_list, hosts_in
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.environment import lines_of
from roxxel_dist.launcher.job.placement import ranks_on
from roxxel_dist.launcher.job.spec import HostOptions, MemberOptions
from roxxel_dist.launcher.output.console import info
from roxxel_dist.process.exit_codes import UserError

HOST = re.compile(r"[A-Za-z0-9_.@:\[\]%][A-Za-z0-9_.@:\[\]%-]*")
NAME = re.compile(rf"{HOST.pattern}(/{HOST.pattern})*")
"""Of a host that a command reaches: `kubectl get pods -o name` prints pod/x."""


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
