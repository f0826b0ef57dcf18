"""The stacks that were asked for when a rank hung."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from roxxel_dist.launcher.control.hang import Hang

DUMP_S = 1.25
"""How long ranks have to answer with their stacks before one is taken for dead."""
AFTER_DUMP_S = 0.1
STACK = "most recent call first"
"""In the first line of the stack of a thread, as faulthandler writes it."""


@dataclass(kw_only=True)
class Dump:
    """Who was asked, and what came."""

    hang: Hang
    until: float
    stacks: dict[int, list[str]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    listening: set[int] = field(default_factory=set)
    hosts_left: int = 0

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Lines of a rank; what comes before its first stack is left out."""
        known = self.stacks.get(rank)
        if known is None:
            start = next((number for number, line in enumerate(lines) if STACK in line), None)
            if start is not None:
                self.stacks[rank] = list(lines[start:])
        else:
            known.extend(lines)

    def asked(self, ranks: Sequence[tuple[int, str, bool]]) -> None:
        """A host's answer: for each rank its state as in /proc, and whether it listens to the question."""
        self.hosts_left -= 1
        self.stopped |= {rank for rank, state, _ in ranks if state in "Tt"}
        self.listening |= {rank for rank, _, listens in ranks if listens}

    @property
    def complete(self) -> bool:
        """Whether everybody has answered who can."""
        return not self.hosts_left and self.listening - self.stopped <= set(self.stacks)

    @property
    def silent(self) -> set[int]:
        """Who was asked and has not answered."""
        return self.listening - set(self.stacks)
