"""What a backend offers: hosts, programs on them, and a command of its own under `launch`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, ClassVar, Protocol

from roxxel_dist.launcher.job.spec import JobOptions, JobSpec
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.platforms import DeviceNeeds


class RemoteProcess(Protocol):
    """The near end of a program on a host: as much of `subprocess.Popen` as the launcher needs."""

    stdin: IO[bytes] | None
    """The stream of orders."""
    stdout: IO[bytes] | None
    """The stream of messages."""
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit code; None while the program runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


class HostSource(Protocol):
    """A list of hosts that changes."""

    @property
    def is_file(self) -> bool:
        """Whether a look costs little."""
        ...

    def read(self) -> tuple[list[str], int | None]:
        """The hosts, each once, and the slots of each by the list. Raises UserError where there is no list."""
        ...

    def end(self) -> None:
        """Let a `read` in another thread fail."""
        ...


Hints = tuple[tuple[str, str], ...]
"""Words in the last line of a program that did not start, and what a person can do."""
PROGRAM_FIX = "install roxxel-dist there, or name the Python that has it with --python"
HINTS: Hints = (
    ("No space left", "make room on that host"),
    ("Cannot allocate memory", "that host has no memory left: end what uses it, or raise the limit of its container"),
    ("cd:", "name a working directory that is there with --directory"),
    ("heard nothing from the launcher", "does a start-up file there (~/.bashrc) read its standard input?"),
    ("No module named", PROGRAM_FIX),
    (": not found", PROGRAM_FIX),
    ("command not found", PROGRAM_FIX),
    ("No such file", PROGRAM_FIX),
)


class Backend(ABC):
    """A place where ranks run."""

    is_local: ClassVar[bool] = False
    """Whether its only host is this machine, which the launcher checks without an agent."""
    is_coordinator: bool = True
    """Whether rank 0 is on one of these hosts."""
    hosts: Sequence[str]
    """Each runs one agent; ranks are assigned to hosts in blocks."""
    same_machine: bool = True
    """Whether several hosts may be one machine, and this one whatever their names: a scheduler's nodes may."""
    is_by_ssh: ClassVar[bool] = False
    """Whether ssh takes the hosts' names, and knows each host by its key."""
    given: Sequence[str] | None = None
    """Those of them that no list takes away; None: all."""
    listed: Sequence[str] = ()
    """Those of --hosts-from, as it was read first."""
    takes_hosts: bool = False
    """Whether hosts can join a job, and leave it."""
    more_hosts: HostSource | None = None
    """A list, beside that of --hosts-from, of hosts that join the job and leave it."""
    cluster: str = ""
    """Names the cluster that they are in, where the backend may reach several: their hosts may have the same names."""
    python: str = sys.executable
    """The interpreter on the hosts."""
    directory: str = ""
    """The working directory on the hosts; empty: that of this process."""
    address: str | None = None
    """The address of rank 0 for all ranks, if that is known before anybody has looked."""
    is_remote: ClassVar[bool] = False
    """Whether a cut link can part an agent from this process: then it ends, with its ranks, after a silence
    (`Limits.silent_s`); else a pipe is closed at once."""

    environment: Mapping[str, str] = MappingProxyType({})
    """The known variables that a host gives to its ranks, in addition to those of the job."""
    hints: ClassVar[Hints] = HINTS
    """What to do where a program did not start; the first words that are found count."""
    login: ClassVar[str] = "does the login shell, or its start-up file (~/.bashrc), end before the program?"
    """What to ask where a program ended without a word."""

    @abstractmethod
    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """The command that `start` runs on this machine."""

    @abstractmethod
    def start(self, host: str, module: str, *words: str) -> RemoteProcess:
        """Start `python -m MODULE WORDS` on a host, in the job's working directory; stdin, stdout, stderr are pipes."""

    def is_broken_link(self, code: int) -> bool:
        """Whether a near end that ended so has lost its connection, which says nothing of the program there."""
        return False

    def ends_with(self, host: str) -> bool:
        """Whether a system that asks this host to end asks the whole job."""
        return False

    def left_s(self, host: str) -> float | None:
        """Seconds until a system that asks this host to end kills what is left there; None where that is not known."""
        return None

    def check_joining(self, hosts: Sequence[str]) -> None:
        """Check by their names that hosts can be some of this backend's. Raises UserError."""
        raise UserError(
            f"{', '.join(hosts)} cannot join: only ssh, exec and slurm --grow-jobs take hosts while a job runs"
        )

    def is_refusal(self, stderr: Sequence[str]) -> bool:
        """Whether these last lines of a program that did not start say that a server had no room for a connection."""
        return False

    def is_starting(self, stderr: Sequence[str]) -> bool:
        """Whether these last lines of a program that did not start say that its host is there, and may still start."""
        return False


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A `launch NAME` command line, and what its own room does for every backend."""

    command: tuple[str, ...]
    """The words after `--`."""
    words: list[str]
    """The words before it, without those that `Command.split_words` took out."""
    passed: Mapping[str, str | None]
    """The words that it took out."""
    device_needs: DeviceNeeds
    """What a `train` command asks of the number of devices, as its config was at the launch."""
    start: Callable[["Options", JobSpec, Backend], int]
    """Run the job, leave it to a detached controller (--detach), or print it (--dry-run); the exit code."""
    usage_errors: Callable[[], AbstractContextManager[None]]
    """A context in which a ValueError of this package is a message for the user, and exit code 2."""


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """The command `launch NAME`: each field is a flag, and its docstring the flag's help.

    The docstring of the class is what `--help` begins with.
    """

    own_first: ClassVar[bool] = True
    """Whether `--help` shows the flags that the class declares itself before those of its bases."""
    example: ClassVar[str]
    """Flags as they may be given, for messages."""

    @classmethod
    def split_words(cls, words: list[str]) -> tuple[dict[str, str | None], list[str]]:
        """Split the arguments: those for another program, those for this command. Raises ValueError for a slip."""
        return {}, words

    @abstractmethod
    def launch(self, request: LaunchRequest) -> int:
        """Do what was asked for, and return the exit code."""


@dataclass(frozen=True, kw_only=True)
class Options(JobOptions, Command):
    """The flags of a command that starts ranks. A subclass adds its own. Fields of `spec.JobSpec` go to the job as they
    are."""

    env: tuple[str, ...] = ()
    """K=V: an environment variable for every rank, such as NCCL_DEBUG=INFO. K alone passes on the value of the
    launcher. Repeatable."""
    env_from: str | None = None
    """A file with one K=V in each line, for every rank. --env overrides it."""
    run_id: str | None = None
    """Name of the run and of its folder runs/run_ID. Default: the time."""
    detach: bool = False
    """Run the launcher in the background of this machine: return when the job has started, and print its run id. See
    `ps`, `logs`, `attach` and `stop`."""
    dry_run: bool = False
    """Print the command of each rank, with secrets masked. Start nothing."""
    json: bool = False
    """With --dry-run: print JSON."""
