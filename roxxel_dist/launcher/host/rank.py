"""What an agent knows of one of its ranks."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roxxel_dist.cluster import progress
from roxxel_dist.launcher.host.process_tree import Tree, die_with_parent
from roxxel_dist.launcher.output.logs import Lines


@dataclass(eq=False, kw_only=True)
class Rank:
    """One process of the job and all that it started (its tree)."""

    number: int
    tree: Tree
    output: int
    lines: Lines = field(default_factory=Lines)
    code: int | None = None  # negative: a signal
    culled: bool = False  # killed by this agent, and not on its way out before
    told: progress.Record = field(default_factory=progress.Record)  # what the controller knows

    @property
    def settled(self) -> bool:
        """Whether it has ended, all its output was read, and nothing is left of it."""
        return self.code is not None and self.output < 0 and self.tree.gone


def start_rank(number: int, command: Sequence[str], env: Mapping[str, str]) -> Rank:
    """Start a rank in a session of its own, with one pipe for all it says."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            env=env,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - a system call; its keeper has one thread
        )

    try:
        tree = Tree(start, holds=(writes,))
    finally:
        os.close(writes)
    return Rank(number=number, tree=tree, output=reads)
