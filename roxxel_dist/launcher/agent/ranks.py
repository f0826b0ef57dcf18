"""The ranks of one host: started, or taken from spares; their output and messages; their ends.

Whoever has them polls the descriptors of `Watch`. epoll returns these in the order in which they became ready, and a
rank that runs Python reports its failure before its connections close, so the first reported failure is the first one.
"""

import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from roxxel_dist.launcher.agent.spares import Rank, RankCommand, Spare, Spares, last_words, start_rank, why_not_started
from roxxel_dist.launcher.host.protocol import Message, Outbox
from roxxel_dist.launcher.job.placement import PROXIES, is_of_agent, proxy_bypass, suspects
from roxxel_dist.launcher.job.spec import CONTRACT, Limits
from roxxel_dist.process import progress
from roxxel_dist.process.exit_codes import EXIT_USAGE, MEMORY_ENV, OK_CODES, STACK_SIGNAL
from roxxel_dist.process.process_stat import is_ending

CHUNK = 1 << 16


class Watch:
    """Descriptors that are polled, and what is called when one can be read."""

    def __init__(self) -> None:
        self.poll: select.epoll = select.epoll()
        self._on_ready: dict[int, Callable[[], None]] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._on_ready

    def add(self, fd: int, handle: Callable[[], None]) -> None:
        """Call `handle` when the descriptor can be read."""
        self._on_ready[fd] = handle
        self.poll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        del self._on_ready[fd]
        self.poll.unregister(fd)

    def call(self, fd: int) -> None:
        """Call what belongs to a descriptor that is ready, if it is still watched for reading."""
        if fd in self._on_ready:
            self._on_ready[fd]()


def ask_for_stack(pid: int, session: int) -> tuple[str, bool]:
    """Ask a process of a session for its stacks, if it listens; (its state as in /proc, whether it was asked).

    The worker answers with faulthandler, into the rank's log. A process that does not catch the signal would die of it.
    `pid` is the one in the rank's record. If that has none (0), or its process is gone, no process is asked, and the
    state is that of the session's leader.
    """
    with suppress(OSError):
        if pid > 0 and os.getsid(pid) == session:
            fields = _status(pid)
            listens = bool(int(fields["SigCgt"], 16) >> (STACK_SIGNAL - 1) & 1)
            if listens:
                os.kill(pid, STACK_SIGNAL)
            return fields["State"][:1], listens
    with suppress(OSError):
        return _status(session)["State"][:1], False
    return "X", False


def _status(pid: int) -> dict[str, str]:
    lines = Path("/proc", str(pid), "status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _message(line: str) -> Message:
    """The message of a rank; empty if a program has written other text, or numbers that the bar cannot show."""
    with suppress(ValueError, AttributeError):
        message = json.loads(line)
        if all(isinstance(message.get(name), int | float | None) for name in ("loss", "tokens_per_s", "eta_s")):
            return message
    return {}


class HostRanks:
    """The ranks of one host, and its spares.

    Args:
        outbox: takes messages for the controller.
        folder: of the agent, for the records of the ranks.
        memory: their folder in memory, if there is one.
    """

    def __init__(self, watch: Watch, outbox: Outbox, folder: Path, memory: str | None, limits: Limits) -> None:
        self._watch, self._outbox, self._limits = watch, outbox, limits
        self._progress_file = folder / "progress"
        self._folders = [str(folder), *([] if memory is None else [memory])]
        self._own = {progress.ENV: str(self._progress_file), **({} if memory is None else {MEMORY_ENV: memory})}
        self._progress = -1  # the descriptor, from `start` on
        self._ranks: list[Rank] = []
        self._programs: dict[int, RankCommand] = {}
        self._suspects: dict[str, str] = {}  # variables of the ranks that may keep them from others
        self._spares = Spares(self._folders, limits, watch=self._watch_spare, end=self._drop_spare, note=self.note)
        self._dropped: list[Rank] = []  # killed, not gone perhaps, and no ranks any more
        self._noted = set[str]()
        self._code = set[tuple[str, str]]()  # what ranks of this attempt have imported: names and checksums
        self._new_code: list[tuple[int, str, str, str]] = []
        self._stale = False  # whether spares of this start had other code
        self._warms = False  # whether spares are on their way before any rank has run here
        self._keepers: list[int] = []  # whose trees are empty: they end, and are to be reaped
        self._exited = deque[Rank]()  # in the order in which they ended; their exit codes follow a moment later
        self.kill_at: float | None = None
        """When they are killed, if that was decided."""
        self._draining = self._killed = self._paused = self._done = False

    def begin(self, order: Message) -> None:
        """Start those of an attempt, and forget the one before, of which nothing runs any more."""
        self._clear()
        self._stale = self._warms = False
        with suppress(FileExistsError):
            self._progress_file.parent.mkdir(0o700)  # a cleaner of old files may have removed it
        self._progress = progress.create(self._progress_file, order["total"])
        self._programs = self._programs_of(order)
        self._note_environment()
        for number, program in self._programs.items():
            if (rank := self._take_spare(number, program) or self._start_rank(number, program)) is None:
                break
            self._ranks.append(rank)
        self._spares.end_all()  # not ready, or for another program
        self._spares.mode = order.get("spares", "off")

    def warm(self, order: Message) -> None:
        """Start spares for ranks that may come here; `_tell_warm` says when they are ready."""
        self._warms = True
        self._spares.start_now(self._programs_of(order), order["spares"], at_once=True)

    def look(self) -> None:
        """Follow what became due: ends, kills, the rest of the output of those that are gone."""
        self._on_exits()
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self._kill()
        for rank in self._ranks:
            if rank.instead is not None and now >= rank.taken_by:
                rank.tree.kill()

    def tell(self) -> None:
        """Read the output of ranks that are gone, and say what is over."""
        self._read_rests()
        self._tell_done()
        self._tell_warm()

    @property
    def are_there(self) -> bool:
        """Whether an attempt has begun here, and this host has not ended its part of it."""
        return self._progress >= 0 and not self._done

    @property
    def has_rests(self) -> bool:
        """Whether output of ranks that are gone is still to be read."""
        return not self._paused and any(rank.tree.is_empty and rank.output >= 0 for rank in self._ranks)

    def start_spares(self) -> None:
        """Start spares where all ranks are at their steps."""
        if not self._draining:
            self._spares.start_when_ranks_work(self._alive(), self._programs)

    def report(self) -> list[tuple[int, ...]]:
        """The records of the ranks that have changed; sends the sources that ranks have imported."""
        self._keepers = [pid for pid in self._keepers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        records = []
        for rank in self._alive():
            record = progress.read(self._progress, rank.number)
            if record != rank.reported:
                rank.reported = record
                records.append((rank.number, *record))
        if self._new_code:
            self._outbox.send({"type": "code", "files": self._new_code})
            self._new_code.clear()
        return records

    def pause(self, is_full: bool) -> None:
        """Leave output in the pipes while too much waits for the controller."""
        if is_full == self._paused:
            return
        self._paused = is_full
        for rank in self._ranks:
            if rank.output >= 0 and is_full:
                self._watch.remove(rank.output)
            elif rank.output >= 0:
                self._watch.add(rank.output, partial(self._read_output, rank))

    def _clear(self) -> None:
        for rank in self._ranks:
            if not rank.exited:
                self._note_exit(rank)
            if rank.pipe >= 0:
                self._close_pipe(rank)
        if self._progress >= 0:
            os.close(self._progress)
            self._progress_file.unlink(missing_ok=True)
        self._ranks.clear()
        self._dropped.clear()
        self._exited.clear()
        self._code.clear()
        self._new_code.clear()
        self.kill_at = None
        self._draining = self._killed = self._done = False

    def _programs_of(self, order: Message) -> dict[int, RankCommand]:
        base = {name: value for name, value in os.environ.items() if name not in CONTRACT and not is_of_agent(name)}
        envs = {placed["rank"]: {**base, **placed["env"], **self._own} for placed in order["ranks"]}
        return {rank: RankCommand(order["command"], {**env, **proxy_bypass(env)}) for rank, env in envs.items()}

    def _note_environment(self) -> None:
        env = next((program.env for program in self._programs.values()), {})
        self._suspects = suspects(env)
        if names := [name for name in PROXIES if env.get(name)]:
            self.note(
                f"{', '.join(names)} is set: ranks reach jax's coordinator without the proxy "
                f"(no_grpc_proxy is {env['no_grpc_proxy']})"
            )

    def _tell_warm(self, why: str = "") -> None:
        if self._warms and (why or self._spares.are_ready):
            self._warms = False
            self._outbox.send({"type": "warm", "why": why})

    def _end_spare(self, spare: Spare) -> None:
        """A spare has ended. If no rank has run here, one that is started now would end as it did."""
        if self._warms and not spare.ready:
            why = last_words(spare) or "it printed nothing"
            self._tell_warm(f"a process that imports what a rank imports ended there: {why}")
        self._spares.end(spare)

    def _start_rank(self, number: int, program: RankCommand) -> Rank | None:
        """The rank; None where the host cannot start it, which is that rank's end, and that of the others."""
        try:
            rank = start_rank(number, program, self._folders, self._limits.guard_kill_s)
        except OSError as error:
            code, why = why_not_started(error)
            text = f"roxxel-dist: rank {number} cannot be started: {why}"
            self._outbox.send({"type": "lines", "rank": number, "time": time.time(), "text": text})
            end = {"rank": number, "pid": 0, "code": code, "killed_by_us": False, "step": 0}
            self._outbox.send({"type": "exit", **end})
            self._kill()
            return None
        self._watch.add(rank.tree.fd, partial(self._hear_keeper, rank))
        self._watch.add(rank.pipe, partial(self._read_pipe, rank))
        self._watch_as_rank(rank)
        return rank

    def _watch_as_rank(self, rank: Rank) -> None:
        self._watch.add(rank.tree.pidfd, partial(self._note_exit, rank))
        if not self._paused:
            self._watch.add(rank.output, partial(self._read_output, rank))
        self._outbox.send({"type": "started", "rank": rank.number, "pid": rank.tree.pid})

    def _take_spare(self, number: int, program: RankCommand) -> Rank | None:
        """The rank that a spare becomes; None where no spare can be it."""
        rank = self._spares.take(number, program)
        if rank is not None:
            self._watch.remove(rank.tree.pidfd)
            self._watch_as_rank(rank)
        return rank

    def _watch_spare(self, spare: Spare) -> None:
        self._watch.add(spare.rank.tree.pidfd, partial(self._end_spare, spare))
        self._watch.add(spare.rank.tree.fd, partial(self._hear_keeper, spare.rank))
        self._watch.add(spare.rank.pipe, partial(self._read_pipe, spare.rank))

    def _drop_spare(self, rank: Rank) -> None:
        self._watch.remove(rank.tree.pidfd)
        os.close(rank.tree.pidfd)
        self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        """Take no more notice of a rank than that it is gone one day."""
        rank.tree.kill()
        if rank.output in self._watch:
            self._watch.remove(rank.output)
        if rank.output >= 0:
            os.close(rank.output)
        if rank.pipe >= 0:
            self._close_pipe(rank)
        self._dropped.append(rank)

    def note(self, text: str) -> None:
        """Tell people, once."""
        if text not in self._noted:
            self._noted.add(text)
            self._outbox.send({"type": "note", "text": text})

    def stop(self, grace: float) -> None:
        """Ask every process of every rank, once, to save and leave. After `grace` seconds they are killed, or earlier
        where that was decided already."""
        self._draining = True
        self.kill_in(grace)
        for rank in self._alive():
            rank.tree.ask_to_stop()

    def dump(self) -> None:
        """Have every rank that can write the stacks of its threads to its log."""
        pids = {rank.number: progress.read(self._progress, rank.number).pid for rank in self._alive()}
        dumps = [(rank.number, *ask_for_stack(pids[rank.number], rank.tree.pid)) for rank in self._alive()]
        self._outbox.send({"type": "dumped", "ranks": dumps, "suspects": self._suspects})

    def _alive(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def kill_in(self, seconds: float) -> None:
        """Kill all ranks then, or earlier where that was decided already."""
        self.kill_at = min(self.kill_at or math.inf, time.monotonic() + seconds)

    def _kill(self) -> None:
        self.kill_at, self._killed = None, True
        for rank in self._ranks:
            rank.killed_by_us = rank.killed_by_us or (
                rank.code is None and rank not in self._exited and not is_ending(rank.tree.pid)
            )
            rank.tree.kill()

    def _note_exit(self, rank: Rank) -> None:
        self._watch.remove(rank.tree.pidfd)
        os.close(rank.tree.pidfd)
        rank.exited = True
        self._exited.append(rank)

    def _hear_keeper(self, rank: Rank) -> None:
        rank.tree.receive()
        if rank.tree.is_empty:
            self._watch.remove(rank.tree.fd)
            rank.tree.close()
            self._keepers.append(rank.tree.keeper)

    def _on_exits(self) -> None:
        exited: list[Rank] = []
        while self._exited and (code := self._exited[0].tree.code) is not None:
            rank = self._exited.popleft()
            if rank.instead is not None and not (self._killed or self._draining or self.kill_at is not None):
                fresh, place = self._start_rank(rank.number, rank.instead), self._ranks.index(rank)
                self._ranks[place : place + 1] = [] if fresh is None else [fresh]
                self._drop(rank)  # a spare that ended before it was the rank: no failure
                continue
            exited.append(rank)
            if rank.code is None:  # else it has reported itself
                self._tell_end(rank, code)
        self._react(exited)

    def _tell_end(self, rank: Rank, code: int) -> None:
        rank.code = code
        self._outbox.send(
            {
                "type": "exit",
                "rank": rank.number,
                "pid": rank.tree.pid,
                "code": code,
                "killed_by_us": rank.killed_by_us,
                "step": progress.read(self._progress, rank.number).entered,
            }
        )

    def _react(self, exited: list[Rank]) -> None:
        """If one of these ranks failed, end the others; end the processes that these ranks left."""
        if self._draining:  # what a shell left behind may still be saving: it has the grace, or the end of its output
            for rank in exited:
                if rank.output < 0:
                    rank.tree.kill()
            return
        failures = {rank.code for rank in exited if rank.code not in OK_CODES and not rank.killed_by_us}
        if failures == {EXIT_USAGE}:
            self.kill_in(self._limits.usage_s)
        elif failures:
            self._kill()
        for rank in exited:
            rank.tree.kill()

    def _read_output(self, rank: Rank) -> None:
        try:
            data = os.read(rank.output, CHUNK)
        except BlockingIOError:  # only asked for when the tree is gone: the pipe is empty for good
            data = b""
        if lines := rank.lines.feed(data) if data else rank.lines.close():
            self._outbox.send({"type": "lines", "rank": rank.number, "time": time.time(), "text": "\n".join(lines)})
        if not data:
            self._watch.remove(rank.output)
            os.close(rank.output)
            rank.output = -1
            if rank.code is not None:
                rank.tree.kill()

    def _read_rests(self) -> None:
        for rank in self._ranks:
            if rank.tree.is_empty and rank.output >= 0 and not self._paused:
                self._read_output(rank)

    def _read_pipe(self, rank: Rank) -> None:
        """A rank's failure, and the newest record for the bar."""
        data = os.read(rank.pipe, CHUNK)
        if not data:
            self._close_pipe(rank)
        status = None
        for line in rank.messages.feed(data):
            match _message(line):
                case {"spare": str()} as message:
                    self._hear_spare(rank, message)
                case {"code": list(files)}:
                    for name, path, checksum in files:
                        if (name, checksum) not in self._code:
                            self._code.add((name, checksum))
                            self._new_code.append((rank.number, name, path, checksum))
                case {"failed": int(code)}:
                    if rank.code is None and not rank.killed_by_us:
                        self._tell_end(rank, code)
                        self._react([rank])
                case {"saved": int(step)}:
                    self._outbox.send({"type": "saved", "step": step})
                case {"step": int(), "total": int(), "start": int()} as record:
                    status = record
        if status is not None and not self._paused:  # the next one is as good
            self._outbox.send({"type": "status", "rank": rank.number, "record": status})

    def _hear_spare(self, rank: Rank, message: Message) -> None:
        match message:
            case {"spare": "ready", "size": int(size)}:
                self._spares.is_ready(rank, size)
            case {"spare": "taken"}:
                rank.instead = None
            case {"spare": "stale", "changed": str(changed)} if not self._stale:
                self._stale = True
                text = f"{changed} has changed since warm spares imported it: they end, and fresh processes start"
                self._outbox.send({"type": "note", "text": text})
            case _:
                pass

    def _close_pipe(self, rank: Rank) -> None:
        self._watch.remove(rank.pipe)
        os.close(rank.pipe)
        rank.pipe = -1

    def _tell_done(self) -> None:
        if not self.are_there:
            return
        ended = all(rank.code is not None and rank.output < 0 and rank.tree.is_empty for rank in self._ranks)
        if ended and all(rank.tree.is_empty for rank in self._dropped):
            self._done = True
            self._outbox.send({"type": "done"})
