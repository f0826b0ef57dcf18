"""What to start: JobSpec and run ids."""

import itertools
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roxxel_dist.launcher.job.limits import Limits
from roxxel_dist.launcher.job.program import Program, program_of
from roxxel_dist.process.device_counts import DeviceNeeds
from roxxel_dist.process.exit_codes import (
    EXIT_TIMEOUT_ENV,
    MEMORY_ENV,
    PIPE_ENV,
    REACHED_ENV,
    SPARE_ENV,
    STATUS_ENV,
    UserError,
)
from roxxel_dist.process.file_lock import claim
from roxxel_dist.process.platforms import VARIABLES

CONTRACT = (
    "ROXXEL_COORDINATOR", "ROXXEL_NUM_PROCESSES", "ROXXEL_PROCESS_ID", "ROXXEL_LOCAL_DEVICES", "ROXXEL_ATTEMPT",
    "ROXXEL_PROGRESS", "ROXXEL_RUN_ID", REACHED_ENV, STATUS_ENV, PIPE_ENV, EXIT_TIMEOUT_ENV,
    MEMORY_ENV, SPARE_ENV,
)  # fmt: skip
"""The variables by which a rank knows its place; those of an outer launch never reach a rank."""

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DeviceCheckMode = Literal["auto", "on", "off"]
LAST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What every way to launch understands: each field is a flag of `launch`, and its docstring the flag's help."""

    gpus_per_host: int | None = None
    """GPUs of a host, divided among its processes with CUDA_VISIBLE_DEVICES. Default: each process sees all GPUs."""
    devices_per_proc: int | None = None
    """Simulated CPU devices of each process. Default: the devices that jax finds."""
    port: int | None = None
    """Port of the coordinator; each restart uses the next of --max-restarts + 1 ports. Default: free ports."""
    max_restarts: int = 5
    """Maximum restarts in a row, after infrastructure failures (a killed rank, a lost agent, a hang), without a new
    step: a new step begins the count anew. Preemptions do not count. 0: no restart."""
    restart_on: Literal["infrastructure", "any"] = "infrastructure"
    """Which failures lead to a restart. infrastructure: the failures above, and exceptions of jax's runtime. any: also
    exceptions of the program."""
    warm_spares: Literal["auto", "on", "off"] = "auto"
    """Keep spare processes that have done the imports of a rank, for faster restarts. auto: if there is free memory."""
    step_timeout: float | None = None
    """Step timeout in seconds: after it the launcher reports the rank that is stuck, and restarts the job. Default: 10
    times the usual step, at least 60."""
    grace: float = 30.0
    """Seconds for the processes to save and exit after Ctrl-C."""
    exit_timeout: float = 60.0
    """Seconds for the other processes to end after the first process has ended without an error. 0: no limit."""
    all_ranks: bool = False
    """Show the output of all ranks, not only of rank 0."""
    check_devices: DeviceCheckMode = "auto"
    """Check the accelerators of each host before the start, and those of a host whose rank failed before a restart: the
    driver's report, a matrix product, a copy and a sum. It takes some seconds. auto: on hosts with GPUs or TPUs."""
    preflight: str | None = None
    """Run this shell command on each host before the start, and on a host whose rank failed before a restart. An exit
    code other than 0 means that the host is not used."""
    notify: str | None = field(default=None, repr=False)
    """Run this shell command for each restart, hang and host that is set aside, and at the end of the job. Its standard
    input is one JSON object."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Reaction to a lost host; flags of the ways to launch on several hosts."""

    spare_hosts: int = 0
    """Number of spare hosts, the last ones of the list. A spare host replaces a host that fails."""
    min_hosts: int | None = None
    """Minimum number of hosts: the job starts, and continues after a failure, with them if others are missing. A host
    that is back is used again. If fewer are there, the job waits --host-timeout. Default: all hosts."""
    grow_at_checkpoint: bool = False
    """With --min-hosts: add a host that is back after the next checkpoint of the run, not immediately."""
    host_lease: float = 60.0
    """Seconds that the processes continue if the launcher loses all hosts at once, because its connection is lost. If
    it loses one host alone, the processes there end after 10 s."""
    host_timeout: float = 60.0
    """Seconds to wait for an unreachable host after a failure, and at the start for --min-hosts hosts, or for pods and
    containers that are still starting. Then the job continues, or ends, without it."""


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """Hosts that come and go; flags of the ways to launch on hosts that have names."""

    hosts_from: str | None = None
    """A file with one host in each line, or a command that prints such lines, as 'kubectl get pods -o …'. It is read
    again every few seconds: hosts that are new join the job, and hosts that are gone leave it."""
    max_hosts: int | None = None
    """Maximum number of hosts that work. More hosts are spare. Default: no limit."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(MemberOptions, HostOptions, JobOptions):
    """One job: `command`, started `nprocs` times as one group. Raises ValueError for what cannot be started."""

    command: tuple[str, ...]
    """The words after `--`: `train …`, `python file.py …`, or any program."""
    nprocs: int
    """Processes (ranks) to start."""
    first_rank: int = 0
    """The first of these ranks, where a launcher of its own on another machine starts those before."""
    world: int | None = None
    """Ranks of the whole job, where launchers on other machines start some of them; None: `nprocs`."""
    run_id: str
    """Names the run directory; see `new_run_id`."""
    log_dir: Path
    """Where `rank-N.log` go; see `log_dir_for`."""
    first_attempt: int = 0
    """How often this run was launched before; not 0: its ranks resume."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, beside those of the launcher."""
    device_needs: DeviceNeeds = field(default_factory=DeviceNeeds)
    """What the program asks of the number of devices, for when hosts are lost; by default it takes any number."""

    limits: Limits = field(default_factory=Limits)
    """How long the parts of the launcher wait for each other."""

    @property
    def program(self) -> Program:
        """The facts that are known of the command."""
        return program_of(self.command)

    def jax_environment(self, outer: Mapping[str, str]) -> dict[str, str]:
        """What decides which devices jax makes in a rank, beside the variables of its host; `outer`: the launcher's,
        where ranks inherit them."""
        given = {**outer, **self.env}
        chosen = {name: given[name] for name in VARIABLES if name in given}
        if self.devices_per_proc is not None:
            chosen["JAX_PLATFORMS"] = given.get("JAX_PLATFORMS") or "cpu"
        return chosen

    @property
    def total(self) -> int:
        """Ranks of the whole job."""
        return self.nprocs if self.world is None else self.world

    @property
    def is_restartable(self) -> bool:
        """Whether this launcher starts the whole job again where it fails, not its own part of the ranks alone."""
        return self.max_restarts > 0 and self.total == self.nprocs

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise UserError(
                "no command: write what every process runs after `--`, for example `-- train --data_path data.txt`"
            )
        if any("\0" in word for word in self.command):
            raise UserError("the command holds a NUL character, which no process can receive: take it out")
        if self.preflight is not None and (not self.preflight.strip() or "\0" in self.preflight):
            raise UserError(
                f"--preflight {self.preflight!r}: name a shell command, such as --preflight 'test -d /data'"
            )
        if self.notify is not None and (not self.notify.strip() or "\0" in self.notify):
            raise UserError(f"--notify {self.notify!r}: name a shell command, such as --notify 'cat >> events'")
        if not RUN_ID.fullmatch(self.run_id):
            raise UserError(f"--run-id {self.run_id!r}: use letters, digits and . _ - (it names a folder)")
        last_port = LAST_PORT - self.max_restarts  # each restart takes the next one
        if self.port is not None and last_port < 1 and self.max_restarts <= sys.float_info.max:
            raise UserError(
                f"--max-restarts {self.max_restarts} and --port {self.port}: each restart takes the next port, and the "
                f"last one is {LAST_PORT}: leave --port out to take a free one each time, or use fewer restarts"
            )
        lease = self.limits.silent_s  # a host that is cut off alone lives as long
        positive, finite = sys.float_info.min, sys.float_info.max
        for name, least, largest, rule in (
            ("nprocs", 1, finite, "at least 1; leave it out for one process"),
            ("devices_per_proc", 1, finite, "at least 1; leave it out to use all devices"),
            ("gpus_per_host", 1, finite, "at least 1; leave it out and each process has all of them"),
            ("min_hosts", 1, finite, "at least 1; leave it out to need every host"),
            ("max_hosts", self.min_hosts or 1, finite, "at least --min-hosts, or 1; leave it out to use all hosts"),
            ("max_restarts", 0, finite, "0 (none) or more"),
            ("spare_hosts", 0, finite, "0 (none) or more"),
            ("port", 1, last_port, f"within 1 and {last_port}; leave --port out to take a free one"),
            ("step_timeout", positive, finite, "seconds, more than 0; leave it out to follow the usual time of a step"),
            ("exit_timeout", 0, finite, "seconds, 0 (no limit) or more; for example --exit-timeout 30"),
            ("grace", 0, finite, "seconds, 0 or more; for example --grace 30"),
            ("host_lease", lease, finite, f"seconds, {lease:g} or more; for example --host-lease 60"),
            ("host_timeout", 0, finite, "seconds, 0 or more; for example --host-timeout 30"),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= largest:  # so neither nan nor inf
                raise UserError(f"--{name.replace('_', '-')} {value}: must be {rule}")
        if self.gpus_per_host is not None and self.devices_per_proc is not None:
            raise UserError(
                f"--gpus-per-host {self.gpus_per_host} and --devices-per-proc {self.devices_per_proc}: simulated CPU "
                "devices are for a job without GPUs; leave one of the two out"
            )
        last_rank = self.first_rank + self.nprocs - 1
        if not 0 <= self.first_rank <= last_rank < self.total:
            raise UserError(f"the ranks {self.first_rank} to {last_rank} are not among those of a job of {self.total}")
        if reserved := sorted(set(self.env) & set(CONTRACT)):
            raise UserError(f"--env {reserved[0]}: the launcher sets this variable itself; leave it out")


def new_run_id(is_taken: Callable[[str], bool] = lambda run_id: False) -> str:
    """YYYYMMDD_HHMMSS, with _2, _3, … where that is in `runs/`, `is_taken`, or another launcher's of this second."""
    second = time.strftime("%Y%m%d_%H%M%S")
    names = itertools.chain([second], (f"{second}_{number}" for number in itertools.count(2)))
    return next(
        name for name in names if not (Path("runs", f"run_{name}").exists() or is_taken(name)) and claim(f"run-{name}")
    )
