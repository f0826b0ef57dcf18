"""What the flags of a backend must offer, for `roxxel-dist launch NAME` to be made of them."""

from typing import ClassVar, Protocol

from roxxel_dist.launcher.transport.connection import Backend


class Options(Protocol):
    """A frozen dataclass: each field a flag with a default, and its docstring the flag's help.

    The docstring of the class is what `--help` begins with. Fields of `job.JobSpec` (min_hosts, spare_hosts,
    host_timeout) go to the job as they are.
    """

    example: ClassVar[str]
    """Flags as they may be given, for messages."""

    def backend(self) -> tuple[Backend, int]:
        """The backend, and how many processes there are in all. Raises ValueError for a slip."""
        ...
