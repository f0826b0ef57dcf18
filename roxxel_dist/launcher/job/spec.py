"""A job: what is known of its program, its options, its time limits and its run id.

Of most programs the launcher knows nothing, and of `train` what its words say (`program_of`). No other file of the
launcher knows the trainer. Its modules are here by their names, and are imported where they are used: in a rank, or on
a host that is asked whether it is fit.
"""

import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from roxxel_dist.process.platforms import VARIABLES, DeviceNeeds


def flag(words: Sequence[str], name: str) -> str | None:
    """The value of a flag, however it is spelled; the last one counts."""
    return {other: value for other, value, _ in split_flags(words)}.get(name)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The value of each flag, guessed without knowing which flags take one; "" if none follows."""
    return {name: value or "" for name, value, _ in split_flags(words) if name}


def split_flags(words: Sequence[str], switches: Container[str] = ()) -> Iterator[tuple[str, str | None, list[str]]]:
    """(name, value, its words) of every flag, and ("", None, [word]) of a word that belongs to none.

    A flag's name has _ where - was written. Its value is what follows `=`, or the next word, unless that is a flag too;
    of `switches` only `True` and `False` are values.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            yield "", None, [word]
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        is_switch = name.removeprefix("no_") in switches
        if equals:
            yield name, value, [word]
        elif rest and not rest[0].startswith("--") and (not is_switch or rest[0].lower() in ("true", "false")):
            yield name, rest[0], [word, rest.popleft()]
        else:
            yield name, None, [word]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts about the program of a job. The defaults are those of one that the launcher knows nothing of."""

    reports_steps: bool = False
    """Its ranks name the step that they are in, so a restart knows how far the job has come."""
    resume: str = ""
    """The flag with which the same command goes on where it was."""
    imports: tuple[str, ...] = ()
    """Modules that a rank imports before it begins, and a warm spare ahead of time. None of them touches a device."""
    needs_folder: bool = False
    """Whether all hosts must share the folder of its run."""
    folder: Path | None = None
    """That folder; None where the words do not name it, or it needs none."""
    bucket: str | None = None
    """The address where it keeps its run instead."""
    data_path: str | None = None
    """What it reads, the same on all hosts."""
    resumes: bool = False
    """Whether it goes on with what its folder has."""
    config: str | None = None
    """A file that must be the same for all ranks."""


def program_of(command: Sequence[str]) -> Program:
    """The facts that are known of a command."""
    if not command or command[0] != "train":
        return Program()
    words = command[1:]
    run_dir = flag(words, "run_dir") or ""
    resume = [(value or "").lower() != "false" for name, value, _ in split_flags(words) if name == "resume"]
    return Program(
        reports_steps=True,
        resume="--resume",
        imports=("roxxel_dist.cli.train", "roxxel_dist.run.experiment"),
        needs_folder=not is_bucket(run_dir),
        folder=Path(run_dir) if run_dir and not is_bucket(run_dir) else None,
        bucket=run_dir.rstrip("/") if is_bucket(run_dir) else None,
        data_path=flag(words, "data_path"),
        resumes=any(resume),
        config=flag(words, "config"),
    )


def is_bucket(run_dir: str) -> bool:
    """Whether a run directory is an address in a bucket."""
    return import_module("roxxel_dist.objects.url").is_url(run_dir)


def log_dir_for(command: Sequence[str], run_id: str) -> Path:
    """`X/logs` for `train … --run_dir X` (the last one counts); otherwise, and where X is in a bucket,
    `runs/run_<run_id>/logs`."""
    return (program_of(command).folder or Path("runs", f"run_{run_id}")) / "logs"


def host_checks() -> Any:
    """The trainer's own module with `data_to_read` and `why_no_run`, which a host is asked before a start."""
    return import_module("roxxel_dist.place.directory")


SCALE_ENV = "ROXXEL_TIME_SCALE"
"""A variable for the tests of this package alone: `launch` scales the limits of a job by it, so that they wait less."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of a job, all in seconds. Their order matters; the README of the launcher has them in a table.

    The launcher has them with its job, and an agent gets them with its first order.
    """

    checks_s: float = 0.5
    """An answer about checks that still run on a host: its agent sends nothing else meanwhile."""
    heartbeat_s: float = 0.5
    """The pause between the heartbeats that a controller sends its agents."""
    report_s: float = 0.5
    """The pause between the reports of an agent on its ranks, which are its heartbeats too."""
    dump_s: float = 1.25
    """The answer of ranks that are asked for their stacks, before one is taken for dead."""
    quiet_s: float = 2.0
    """The age of a host's last message from which on its ranks are not blamed for a hang, and it gets no heartbeat: it
    receives nothing much later than it sent something."""
    slack_s: float = 2.0
    """An agent that has stopped is killed by its guard so much later than it would have ended by itself."""
    gone_s: float = 2.5
    """The end of the ranks of a lost host, after its agent gives up: a guard may have to end it (`slack_s`)."""
    fresh_s: float = 2.5
    """The age of a host's question whether all hosts hear nothing."""
    linger_s: float = 3.0
    """A client whose program has ended, before it is killed: srun takes a moment."""
    common_s: float = 3.0
    """The longest time in which no host is known to have received a heartbeat, before the ranks of all may have a lease
    (`HostLease`)."""
    members_s: float = 4.0
    """The wait for the hangs that the launchers of other hosts find (`launch member`)."""
    still_s: float = 5.0
    """A controller that did not look for longer was stopped itself: its clocks begin again."""
    look_s: float = 5.0
    """The pause between two looks at a host that the job goes on without, at first."""
    usage_s: float = 5.0
    """The other ranks, after a configuration error, so that the rank that prints it (rank 0) comes to it as well: on a
    busy machine ranks start seconds apart."""
    orphan_s: float = 6.0
    """The silence after which a host asks whether all hosts hear nothing."""
    guard_kill_s: float = 8.0
    """Killed processes, before a guard, or a keeper, gives them up; in a driver some die later."""
    kill_s: float = 10.0
    """Killed ranks, before the controller gives them up."""
    agent_end_s: float = 10.0
    """The end of an agent, likewise."""
    silent_s: float = 10.0
    """The silence of an agent to the controller, and of the controller to an agent that a cut link can part from it:
    then the ranks there are lost, and end."""
    notify_end_s: float = 10.0
    """The commands of `--notify` that still run at the end of a job."""
    take_s: float = 5.0
    """A spare that is told to be a rank, before it is killed and a fresh process started."""
    tool_s: float = 20.0
    """A vendor's tool on a host (nvidia-smi)."""
    notify_s: float = 30.0
    """A command of `--notify`."""
    devices_s: float = 60.0
    """The check of a host's devices."""
    command_s: float = 60.0
    """The command of `--preflight`."""
    start_s: float = 60.0
    """The first word of an agent: a connection, and an interpreter from a slow file system."""
    answer_s: float = 60.0
    """An answer of a host before the start, its connection included."""
    warm_s: float = 60.0
    """The imports of a host that is to join, before it joins without spares."""
    life_s: float = 600.0
    """A host that is asked nothing more before the start, before its agent ends. Hosts are asked in groups, and each
    may take a minute; it also ends an agent behind a cut link."""

    OF_PROGRAMS: ClassVar[frozenset[str]] = frozenset(
        {"take_s", "tool_s", "notify_s", "devices_s", "command_s", "start_s", "answer_s", "warm_s", "life_s"}
    )
    """Those of a program that starts, computes or belongs to somebody else: no scale makes it faster."""

    def scaled(self, factor: float) -> "Limits":
        """The limits times a factor, in the same order; those of programs as they are."""
        names = {field.name for field in fields(self)} - self.OF_PROGRAMS
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> "Limits":
        """The limits that a launcher has sent; what one of another version does not name has its default."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in names})


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
    """Options of every way to launch: each field is a flag of `launch`, and its docstring the flag's help."""

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
    """The folder of `rank-N.log`; see `log_dir_for`."""
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
        """The variables that decide which devices jax makes in a rank, beside those of its host.

        `outer`: the launcher's, where ranks inherit them.
        """
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
