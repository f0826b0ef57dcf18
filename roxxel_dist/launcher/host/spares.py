"""Spare processes of an agent: each has done the imports of a rank, and becomes one at the next start.

A spare is started as its rank was, with the same words and variables, so that what jax reads while it is imported is
the same; whatever differs at the takeover, beside the contract's own variables, is a reason to start a fresh process.
What a spare prints stays in its pipe until it is a rank.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.cluster.exit_codes import SPARE_ENV
from roxxel_dist.launcher.host.rank import Program, Rank, start_rank
from roxxel_dist.launcher.spec import CONTRACT

SIZE_BYTES = 256 << 20
"""How large a rank is after its imports, as long as nobody has measured it: 208 MiB with jax 0.10 on CPU."""
STEPS = 3
"""Steps of every rank in an attempt before spares are started: the start itself needs the cores."""
QUIET_S = 60.0
"""Where a program does not tell its steps, they are started so long after its last word."""
TAKE_S = 5.0
"""A spare that has not become the rank by then is killed, and a fresh process started."""


@dataclass(eq=False, kw_only=True)
class Spare:
    """A process that waits to be a rank."""

    rank: Rank
    program: Program
    orders: int
    """The descriptor by which it is told."""
    ready: bool = False


def start_spare(number: int, program: Program, folders: Sequence[str]) -> Spare:
    """Start one beside the rank `number`, whose program it is. Raises ChildProcessError."""
    hears, orders = os.pipe()
    os.set_blocking(orders, False)
    with suppress(OSError):  # for a large environment
        fcntl.fcntl(orders, fcntl.F_SETPIPE_SZ, 1 << 20)
    env = {**program.env, SPARE_ENV: str(hears)}
    rank = start_rank(number, Program(program.command, env), folders, (hears,))
    return Spare(rank=rank, program=program, orders=orders)


def choose(spares: Sequence[Spare], number: int, program: Program) -> Spare | None:
    """One that can be this rank, that of its own number first."""

    def imported(program: Program) -> tuple[Sequence[str], dict[str, str]]:
        return list(program.command), {name: value for name, value in program.env.items() if name not in CONTRACT}

    fit = [spare for spare in spares if spare.ready and imported(spare.program) == imported(program)]
    return min(fit, key=lambda spare: spare.rank.number != number, default=None)


def hand_over(spare: Spare, env: dict[str, str]) -> bool:
    """Tell a spare which rank it is; whether it will hear it."""
    data = json.dumps({"env": env}).encode() + b"\n"
    try:
        return os.write(spare.orders, data) == len(data)
    except OSError:  # it is gone, or there is no room for so much
        return False


def free_bytes() -> int:
    """What processes of this host, or of the control groups that this one is in, can still have of its memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    root = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text(errors="replace").splitlines()
    own = root / next((line[4:] for line in lines if line.startswith("0::/")), "")  # of version 2
    for group in (own, *own.parents):
        if group.is_relative_to(root):
            with suppress(OSError, ValueError, KeyError):  # no limit there
                limit = int((group / "memory.max").read_text(encoding="ascii"))
                stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                used = int((group / "memory.current").read_text(encoding="ascii")) - int(stat["inactive_file"])
                free = min(free, limit - used)
    return free
