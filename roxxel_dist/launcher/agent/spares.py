"""Spare processes of an agent: each has done the imports of a rank, and becomes one at the next start.

A spare is started as its rank was, with the same words and variables, so that what jax reads while it is imported is
the same; whatever differs at the takeover, beside the contract's own variables, is a reason to start a fresh process.
What a spare prints stays in its pipe until it is a rank.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from roxxel_dist.launcher.agent.rank import Rank, RankCommand, start_rank
from roxxel_dist.launcher.host.worker import imports_of
from roxxel_dist.launcher.job.limits import Limits
from roxxel_dist.launcher.job.spec import CONTRACT
from roxxel_dist.process.exit_codes import AT_ONCE, SPARE_ENV
from roxxel_dist.process.free_memory import free_bytes

SIZE_BYTES = 256 << 20
"""The size of a rank after its imports until it has been measured: 208 MiB with jax 0.10 on CPU."""
STEPS = 3
"""Steps of every rank in an attempt before spares are started: the start itself needs the cores."""
QUIET_S = 60.0
"""If a program does not report its steps, spares are started so long after its last output."""
THREADS = "PJRT_NPROC"
"""Read when jax makes its devices, long after the imports: it follows the number of ranks, which may change."""


@dataclass(eq=False, kw_only=True)
class Spare:
    """A process that waits to be a rank."""

    rank: Rank
    program: RankCommand
    orders: int
    """The descriptor that sends it orders."""
    ready: bool = False


def start_spare(
    number: int, program: RankCommand, folders: Sequence[str], kill_s: float, *, at_once: bool = False
) -> Spare:
    """Start one beside the rank `number`, whose program it is; `folders` and `kill_s` as for `ProcessTree`.

    `at_once`: no rank needs the cores. Raises OSError.
    """
    orders_read, orders = os.pipe()
    os.set_blocking(orders, False)
    with suppress(OSError):  # for a large environment
        fcntl.fcntl(orders, fcntl.F_SETPIPE_SZ, 1 << 20)
    env = {**program.env, SPARE_ENV: f"{orders_read}{AT_ONCE * at_once}"}
    rank = start_rank(number, RankCommand(program.command, env), folders, kill_s, (orders_read,))
    return Spare(rank=rank, program=program, orders=orders)


def choose(spares: Sequence[Spare], number: int, program: RankCommand) -> Spare | None:
    """One that can be this rank, that of its own number first."""

    def imported(program: RankCommand) -> tuple[Sequence[str], dict[str, str]]:
        env = {name: value for name, value in program.env.items() if name not in (*CONTRACT, THREADS)}
        return list(program.command), env

    fit = [spare for spare in spares if spare.ready and imported(spare.program) == imported(program)]
    return min(fit, key=lambda spare: spare.rank.number != number, default=None)


def last_words(spare: Spare) -> str:
    """The last line that a spare has printed; empty where there is none."""
    lines: list[str] = []
    with suppress(BlockingIOError):
        while data := os.read(spare.rank.output, 1 << 16):
            lines = [line for line in (*lines[-1:], *spare.rank.lines.feed(data)) if line.strip()]
    return next(reversed([*lines, *spare.rank.lines.close()]), "").strip()


def hand_over(spare: Spare, env: dict[str, str]) -> bool:
    """Send a spare the number of its rank; returns whether it will receive it."""
    data = json.dumps({"env": env}).encode() + b"\n"
    try:
        return os.write(spare.orders, data) == len(data)
    except OSError:  # it is gone, or there is no room for so much
        return False


class Spares:
    """The spares of one host: begun when all its ranks are at their steps, and kept until the next start.

    Args:
        folders: of the agent, see `ProcessTree`.
        limits: of the job.
        watch: takes a spare whose descriptors are to be watched.
        end: takes the rank of a spare that is ended; kills it and forgets its descriptors.
        note: takes lines for people.
    """

    def __init__(
        self,
        folders: Sequence[str],
        limits: Limits,
        *,
        watch: Callable[[Spare], None],
        end: Callable[[Rank], None],
        note: Callable[[str], None],
    ) -> None:
        self.wanted: str = "off"
        """Whether spares are to be started: on, auto (where there is room), off."""
        self._spares: list[Spare] = []
        self._needs_room = False
        self._count = 0
        self._limits = limits
        self._folders, self._watch, self._end, self._note = folders, watch, end, note

    def start(self, ranks: Sequence[Rank], programs: Mapping[int, RankCommand]) -> None:
        """A spare for each rank, once in an attempt, when all are at their steps."""
        if self.wanted == "off" or len(ranks) < len(programs) or not all(map(_works, ranks)):
            return
        wanted, self.wanted = self.wanted, "off"
        self.begin(programs, wanted)

    def begin(self, programs: Mapping[int, RankCommand], wanted: str, *, at_once: bool = False) -> None:
        """A spare for each of these ranks, if they are `wanted`. `at_once`: there are no ranks that work."""
        if not imports_of(next(iter(programs.values())).command):
            if wanted == "on":
                self._note("--warm-spares on: this program does not run in the launcher's Python, so it has none")
            return
        self._needs_room, self._count = wanted == "auto", len(programs)
        if not self._has_room(SIZE_BYTES):
            return
        for number, program in programs.items():
            try:
                spare = start_spare(number, program, self._folders, self._limits.guard_kill_s, at_once=at_once)
            except OSError as error:  # no process can be had: a fresh start may find one
                self._note(f"no warm spares: {error}")
                return
            self._spares.append(spare)
            self._watch(spare)

    def take(self, number: int, program: RankCommand) -> Rank | None:
        """The rank that a spare becomes; None where no spare can be it."""
        spare = choose(self._spares, number, program)
        if spare is None or not hand_over(spare, dict(program.env)):
            return None
        self._spares.remove(spare)
        os.close(spare.orders)
        rank = spare.rank
        rank.number, rank.instead, rank.taken_by = number, program, time.monotonic() + self._limits.take_s
        return rank

    def is_ready(self, rank: Rank, size: int) -> None:
        """A spare has reported that its imports are done, and how many bytes it takes."""
        spare = next((spare for spare in self._spares if spare.rank is rank), None)
        if spare is not None:
            spare.ready = True
            if not self._has_room(size):
                self.end_all()

    @property
    def are_ready(self) -> bool:
        """Whether none is on its way."""
        return all(spare.ready for spare in self._spares)

    def end(self, spare: Spare) -> None:
        """Let go of a spare, which has died or is of no use."""
        self._spares.remove(spare)
        os.close(spare.orders)
        self._end(spare.rank)

    def end_all(self) -> None:
        """Let go of all that are there."""
        for spare in list(self._spares):
            self.end(spare)

    def _has_room(self, size: int) -> bool:
        needed, free = 2 * size * self._count, free_bytes() if self._needs_room else math.inf
        if free < needed:
            mebibytes = f"{int(free) >> 20:,} MiB of memory are free, and {needed >> 20:,} would be needed"
            self._note(f"no warm spares: {mebibytes} (--warm-spares on has them in any case)")
        return free >= needed


def _works(rank: Rank) -> bool:
    """Whether a rank has done some steps, or has long been silent since it joined."""
    record = rank.reported
    if record.activity == "step" and rank.first is None:
        rank.first = record
    if rank.first is not None:
        return record.entered >= rank.first.entered + STEPS
    return record.pid > 0 and not record.activity and time.time() - record.time > QUIET_S
