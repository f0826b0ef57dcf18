"""What a backend offers: hosts, programs on them, and the flags of its command."""

from collections.abc import Mapping, Sequence
from typing import IO, Any, ClassVar, Protocol


class RemoteProcess(Protocol):
    """The near end of a program on a host: as much of `subprocess.Popen` as the launcher needs."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Where orders go."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Where messages come from."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """What is said beside them."""
        ...

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, when it has. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


class Backend(Protocol):
    """Where the ranks run."""

    @property
    def hosts(self) -> Sequence[str]:
        """One agent each; ranks are dealt to them in blocks."""
        ...

    @property
    def address(self) -> str | None:
        """Where rank 0 is for all ranks, if that is known before anybody has looked."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """What is known of the variables that a host gives to its ranks, beside those of the job."""
        ...

    @property
    def heartbeat_timeout_s(self) -> float | None:
        """Seconds without a word from here after which an agent kills its ranks; None where a pipe tells it at once."""
        ...

    @property
    def python(self) -> str:
        """The interpreter on the hosts."""
        ...

    def argv(self, host: str, module: str, *words: str) -> list[str]:
        """What `start` runs on this machine."""
        ...

    def start(self, host: str, module: str, *words: str) -> RemoteProcess:
        """Start `python -m MODULE WORDS` on a host, in the job's working directory; stdin, stdout, stderr are pipes."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Plain values, from which `backends.make` makes an equal one."""
        ...


class Options(Protocol):
    """A frozen dataclass: each field a flag with a default, and its docstring the flag's help.

    The docstring of the class is what `--help` begins with. Fields of `spec.JobSpec` (min_hosts, spare_hosts,
    host_timeout) go to the job as they are.
    """

    example: ClassVar[str]
    """Flags as they may be given, for messages."""

    def backend(self) -> tuple[Backend, int]:
        """The backend, and how many processes there are in all. Raises ValueError for a slip."""
        ...
