"""Spare processes of an agent: each has done the imports of a rank, and becomes one at the next start.

A spare is started as its rank was, with the same words and variables, so that what jax reads while it is imported is
the same; whatever differs at the takeover, beside the contract's own variables, is a reason to start a fresh process.
What a spare prints stays in its pipe until it is a rank.
"""

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from roxxel_dist.launcher.host.process_tree import ProcessTree, die_with_parent
from roxxel_dist.launcher.host.worker import imports_of
from roxxel_dist.launcher.job.placement import worker_argv
from roxxel_dist.launcher.job.spec import CONTRACT, Limits
from roxxel_dist.launcher.output import LineSplitter
from roxxel_dist.process import progress
from roxxel_dist.process.exit_codes import AT_ONCE, EXIT_NOT_STARTED, EXIT_USAGE, PIPE_ENV, SPARE_ENV
from roxxel_dist.process.process_stat import free_bytes

OF_THE_USER = (errno.E2BIG, errno.ENOENT, errno.ENOEXEC)
START_FIXES = {
    errno.E2BIG: "its variables and words are too large: shorten them (--env, --env-from)",
    errno.ENOENT: "the interpreter is not there: check the installation on this host",
    errno.EAGAIN: "this host allows no more processes: raise its limit (ulimit -u, pids.max), or start fewer ranks",
    errno.ENOMEM: "this host has no memory left",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
}
"""Why a rank could not be started, by errno, and what helps."""


def why_not_started(error: OSError) -> tuple[int, str]:
    """The exit code of a rank that cannot be started, and why it cannot."""
    text = error.strerror or str(error)
    if fix := START_FIXES.get(error.errno or 0):
        text += f": {fix}"
    return EXIT_USAGE if error.errno in OF_THE_USER else EXIT_NOT_STARTED, text


@dataclass(frozen=True)
class RankCommand:
    """The program of a rank, and its variables."""

    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(eq=False, kw_only=True)
class Rank:
    """One process of the job and all that it started (its tree)."""

    number: int
    tree: ProcessTree
    output: int
    pipe: int  # its messages beside its output: `progress.AgentPipe`
    lines: LineSplitter = field(default_factory=LineSplitter)
    messages: LineSplitter = field(default_factory=LineSplitter)
    code: int | None = None  # negative: a signal
    killed_by_us: bool = False  # killed by this agent, and not on its way out before
    reported: progress.Record = field(default_factory=progress.Record)  # what the controller knows
    first: progress.Record | None = None  # as it was when its first step was seen
    exited: bool = False  # its process; the exit code follows a moment later
    instead: RankCommand | None = None  # for a spare that has not confirmed yet: the program to start if it ends
    taken_by: float = 0.0  # when it must have confirmed


def _begin() -> None:
    """End with the keeper; and ignore SIGHUP, which says that a terminal is gone, and a rank has none.

    systemd sends it right behind SIGTERM, to each process of a session, and would kill what saves.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    die_with_parent()


def start_rank(
    number: int, program: RankCommand, folders: Sequence[str], kill_s: float, pass_fds: tuple[int, ...] = ()
) -> Rank:
    """Start a rank in its own session, with one pipe for its output, and one for its messages to the agent.

    `folders` are those of the agent and `kill_s` is the limit of the keeper, see `ProcessTree`; `pass_fds` are closed
    here.
    Raises OSError where it cannot be started.
    """
    ours, theirs = list[int](), [*pass_fds]
    try:
        tree = _start_tree(program, ours, theirs, folders, kill_s)
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    return Rank(number=number, tree=tree, output=ours[0], pipe=ours[1])


def _start_tree(
    program: RankCommand, ours: list[int], theirs: list[int], folders: Sequence[str], kill_s: float
) -> ProcessTree:
    """Start its program, with the descriptors `theirs`; those of two pipes come to both lists."""
    for _ in range(2):
        reads, writes = os.pipe()
        ours.append(reads)
        theirs.append(writes)
        os.set_blocking(reads, False)
    *passed, writes, pipe_write = theirs
    os.set_blocking(pipe_write, False)
    env = {**program.env, PIPE_ENV: f"{pipe_write}:{os.fstat(pipe_write).st_ino}"}

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            worker_argv(program.command),
            stdin=subprocess.DEVNULL,
            stdout=writes,
            stderr=writes,
            env=env,
            pass_fds=(pipe_write, *passed),
            start_new_session=True,
            preexec_fn=_begin,  # noqa: PLW1509 - system calls; its keeper has one thread
        )

    return ProcessTree(start, holds=tuple(theirs), folders=folders, kill_s=kill_s)


SIZE_BYTES = 256 << 20
"""The size of a rank after its imports until it has been measured: 208 MiB with jax 0.10 on CPU."""
STEPS = 3
"""Steps of every rank in an attempt before spares are started: the start itself needs the cores."""
QUIET_S = 60.0
"""Seconds from the last output of a program that does not report its steps to the start of spares."""
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
    try:
        rank = start_rank(number, RankCommand(program.command, env), folders, kill_s, (orders_read,))
    except BaseException:
        os.close(orders)
        raise
    return Spare(rank=rank, program=program, orders=orders)


def choose(spares: Sequence[Spare], number: int, program: RankCommand) -> Spare | None:
    """Choose a spare that can be this rank, that of its own number first."""

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


def send_assignment(spare: Spare, env: dict[str, str]) -> bool:
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
        self.mode: str = "off"
        """Whether spares are to be started: on, auto (where there is room), off."""
        self._spares: list[Spare] = []
        self._needs_room = False
        self._count = 0
        self._limits = limits
        self._folders, self._watch, self._end, self._note = folders, watch, end, note

    def start_when_ranks_work(self, ranks: Sequence[Rank], programs: Mapping[int, RankCommand]) -> None:
        """A spare for each rank, once in an attempt, when all are at their steps."""
        if self.mode == "off" or len(ranks) < len(programs) or not all(map(_works, ranks)):
            return
        mode, self.mode = self.mode, "off"
        self.start_now(programs, mode)

    def start_now(self, programs: Mapping[int, RankCommand], mode: str, *, at_once: bool = False) -> None:
        """A spare for each of these ranks, if `mode` allows them. `at_once`: there are no ranks that work."""
        if not imports_of(next(iter(programs.values())).command):
            if mode == "on":
                self._note("--warm-spares on: this program does not run in the launcher's Python, so it has none")
            return
        self._needs_room, self._count = mode == "auto", len(programs)
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
        if spare is None or not send_assignment(spare, dict(program.env)):
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
