"""One host of a job whose hosts are started by another system, each with its own launcher: pods, containers.

These nodes get no orders: each knows its number, and the name of the first one.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from roxxel_dist.launcher.backends.local import LocalBackend
from roxxel_dist.launcher.control.new_job import job_of
from roxxel_dist.launcher.host.probe import is_loopback, is_owned, resolve
from roxxel_dist.launcher.job import backend as base
from roxxel_dist.launcher.output import info
from roxxel_dist.process.exit_codes import EXIT_PREFLIGHT, UserError
from roxxel_dist.process.interrupt import SignalPipe

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "hosts": ("ROXXEL_HOSTS",),
    "index": ("ROXXEL_INDEX", "JOB_COMPLETION_INDEX"),
    "first": ("ROXXEL_FIRST_HOST",),
    "port": ("ROXXEL_PORT",),
    "procs_per_host": ("ROXXEL_PROCS_PER_HOST",),
    "attempt": ("ROXXEL_RESTARTS",),
    "run_id": ("ROXXEL_RUN_NAME",),
}
"""The variables of a flag that is not given. None of them is one that a rank gets."""
DEFAULTS: Mapping[str, str | int | None] = {
    "hosts": 1,
    "index": 0,
    "first": "localhost",
    "port": 29500,
    "procs_per_host": 1,
    "attempt": 0,
    "run_id": None,
}
"""The values of flags that are not given."""
NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?|[0-9A-Fa-f:.]+")
RETRY_S = 0.5
TELL_S = 3.0


class NoFirstHostError(Exception):
    """The first host was not found in time. The message is for people."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """This host, and its job. Raises ValueError for impossible values."""

    hosts: int
    index: int
    first: str
    """The name or the address of host 0."""
    procs: int
    """Processes of each host."""

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise UserError(f"--hosts {self.hosts}: must be at least 1")
        if not 0 <= self.index < self.hosts:
            raise UserError(
                f"--index {self.index}: must be within 0 and {self.hosts - 1}, for there are {self.hosts} hosts"
            )
        if self.procs < 1:
            raise UserError(f"--procs-per-host {self.procs}: must be at least 1")
        if not NAME.fullmatch(self.first):
            raise UserError(f"--first {self.first!r} cannot be a host: give the name or the address of host 0")

    @property
    def is_coordinator(self) -> bool:
        """Whether this is host 0."""
        return self.index == 0


@dataclass(frozen=True, kw_only=True)
class Options(base.Options):
    """Start one host's ranks of a job, on that host: `launch member [options] -- CMD…`.

    The system that starts the job (JobSet, compose) starts this command on every host, ends all of them when one ends,
    and starts them again together.
    """

    example: ClassVar[str] = "--hosts 2 --index 0 --first NAME"
    hosts: int | None = None
    """Hosts of the job. Not given: ROXXEL_HOSTS, or 1."""
    index: int | None = None
    """The number of this host, from 0. Not given: ROXXEL_INDEX, or JOB_COMPLETION_INDEX, which Kubernetes sets."""
    first: str | None = None
    """The name or address by which hosts find host 0. Not given: ROXXEL_FIRST_HOST."""
    procs_per_host: int | None = None
    """Processes on each host. Not given: ROXXEL_PROCS_PER_HOST, or 1."""
    attempt: int | None = None
    """How often the whole job was started before; ranks resume where it is not 0. Not given: ROXXEL_RESTARTS, or 0."""
    run_id: str | None = None
    """The same on all hosts: names the run, and its folder runs/run_ID. Not given: ROXXEL_RUN_NAME."""
    port: int | None = None
    """The coordinator's port on host 0. Not given: ROXXEL_PORT, or 29500."""
    max_restarts: int = 0
    """Restarts of this host's ranks alone: usually the whole job is started again."""
    host_timeout: float = 600.0
    """Seconds to wait until the name of host 0 is known."""

    def launch(self, request: base.LaunchRequest) -> int:
        """Start this host's ranks of a job that pods or containers make up."""
        with request.usage_errors():
            if self.detach:
                raise UserError("--detach: a container ends with its first process, so a member stays; leave it out")
            flags = self._flags()
            node = Node(hosts=flags["hosts"], index=flags["index"], first=flags["first"], procs=flags["procs_per_host"])
            options = replace(self, run_id=flags["run_id"], port=flags["port"])
            job = replace(
                job_of(options, request, node.procs, MemberBackend(node.first, leads=node.is_coordinator)),
                first_rank=node.index * node.procs,
                world=node.hosts * node.procs,
                first_attempt=flags["attempt"],
            )
        address = node.first if self.dry_run else _wait_for_first(node, job.host_timeout)
        if isinstance(address, int):
            return address
        return request.start(options, job, MemberBackend(address, leads=node.is_coordinator))

    def _flags(self) -> dict[str, Any]:
        """The flags that the environment may give, with their values from there, or else their defaults."""
        given = flags_from_environment({name: getattr(self, name) for name in VARIABLES}, os.environ)
        flags: dict[str, Any] = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
        for name in ("index", "first", "run_id"):
            if given[name] is None and flags["hosts"] > 1:
                option, variables = f"--{name.replace('_', '-')}", " or ".join(VARIABLES[name])
                raise UserError(f"{option} is not given, nor {variables}: {flags['hosts']} hosts need it")
        if flags["attempt"] < 0:
            raise UserError(f"--attempt {flags['attempt']}: must be 0, or how often the job was started before")
        return flags


class MemberBackend(LocalBackend):
    """A `LocalBackend` with rank 0 on another machine or where another machine reaches it.

    Args:
        address: where rank 0 is for the ranks of this machine: an address of its own, or a name.
        leads: whether rank 0 is one of them.
    """

    def __init__(self, address: str, *, leads: bool) -> None:
        self.address: str | None = address
        self.is_coordinator: bool = leads


def flags_from_environment(
    flags: Mapping[str, str | int | None], environment: Mapping[str, str]
) -> dict[str, str | int | None]:
    """The flags, those that are None filled in from the environment (`VARIABLES`).

    Raises:
        ValueError: a variable that must be a number is none; it is named.
    """
    filled = dict(flags)
    for name, variables in VARIABLES.items():
        variable = next((variable for variable in variables if environment.get(variable)), None)
        if filled.get(name) is not None or variable is None:
            continue
        text = environment[variable]
        is_text = name in ("first", "run_id")
        if not is_text and not re.fullmatch(r"\d{1,9}", text):
            raise UserError(f"{variable} is {text!r}: must be a number, as of --{name.replace('_', '-')}")
        filled[name] = text if is_text else int(text)
    return filled


def find_first(node: Node, limit_s: float, log: Callable[[str], None], pause: Callable[[float], bool]) -> str | None:
    """The address of rank 0 for the ranks of this node: on host 0 its own address, on others the name.

    A name may take some time to resolve, and may still mean a host of an earlier attempt. Other hosts get the name, not
    its current address, so that a failed connection resolves it again.

    Args:
        node: which host this is.
        limit_s: seconds to wait.
        log: takes lines for people.
        pause: waits so many seconds; True if the launcher was asked to stop.

    Returns:
        The address or name; None if `pause` returned True.

    Raises:
        NoFirstHostError: the time is over.
    """
    begun = time.monotonic()
    said = False
    while True:
        address, why = _look(node)
        if address:
            return address
        waited = time.monotonic() - begun
        if waited >= limit_s:
            raise NoFirstHostError(f"{why}; waited {limit_s:g} s (--host-timeout)")
        if waited >= TELL_S and not said:
            said = True
            log(f"{why}; waiting up to {limit_s:g} s (--host-timeout)")
        if pause(min(RETRY_S, limit_s - waited)):
            return None


def _look(node: Node) -> tuple[str, str]:
    """(where rank 0 is, or why that is not known)."""
    addresses = resolve(node.first)
    if not addresses:
        return "", f"--first {node.first}: no such name; a headless service or the hosts file must tell it"
    is_literal = node.first == "localhost" or node.first in addresses
    outside = [address for address in addresses if is_literal or not is_loopback(address)]
    if not outside:
        text = "which other hosts cannot reach; have /etc/hosts name its real address"
        return "", f"--first {node.first} resolves to {addresses[0]}, {text}"
    if not node.is_coordinator:
        return node.first, ""
    for address in outside:
        if is_owned(address):
            return address, ""
    return "", f"--first {node.first} is {outside[0]}, which is no address of this machine, and --index 0 is this one"


def _wait_for_first(node: Node, limit_s: float) -> str | int:
    """Where rank 0 is; or the exit code, where that was not found out."""
    numbers: list[int] = []
    with SignalPipe(info) as signals:  # the first process of a container would not even end without a handler

        def pause(seconds: float) -> bool:
            numbers.extend(signals.wait(seconds))
            return bool(numbers)

        try:
            address = find_first(node, limit_s, info, pause)
        except NoFirstHostError as problem:
            info(str(problem))
            return EXIT_PREFLIGHT
    return 128 + numbers[0] if address is None else address
