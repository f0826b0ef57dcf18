"""The controller's end of an agent, and what a place for ranks must offer."""

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from roxxel_dist.launcher.channel import Decoder, Message, encode

AGENT_END_S = 10.0


class Backend(Protocol):
    """Where the ranks run."""

    @property
    def hosts(self) -> Sequence[str]:
        """One agent each; ranks are dealt to them in blocks."""
        ...

    @property
    def coordinator_host(self) -> str:
        """The address of rank 0's host, as the other ranks reach it."""
        ...

    def start(self, host: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host, its stdin and stdout being pipes to here."""
        ...


@dataclass(eq=False, kw_only=True)
class Link:
    """The controller's end of one agent."""

    host: str
    ranks: list[int]
    process: subprocess.Popen[bytes]
    decoder: Decoder = field(default_factory=Decoder)
    done: bool = False

    def send(self, message: Message) -> None:
        """Give an order; an agent that is gone needs none."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(encode(message))
            self.process.stdin.flush()

    def close(self) -> int:
        """End the agent (and what ranks it has), and say how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            return self.process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
