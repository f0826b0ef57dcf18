"""One per host: starts the ranks, watches them, sends their lines to the controller, and ends them.

One thread, one epoll, and no blocking call: pidfds report the ends of ranks, orders and output come by pipe, and other
processes do the killing (`process_tree`). epoll returns descriptors in the order in which they became ready, and a rank
that runs Python reports its failure before its connections close, so the first reported failure is the first one. The
agent takes orders from its stdin alone, and hands a system's requests to end on to the controller (HANDED_ON). When
stdin ends, or is silent for longer than the heartbeat timeout, the controller is lost: the agent ends, and with it the
ranks. Where no host receives from the controller, ranks live on for the job's lease (`lease`). Decision 24.
"""

import json
import math
import os
import select
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from roxxel_dist.launcher.agent import memory_folder
from roxxel_dist.launcher.agent.lease import HostLease
from roxxel_dist.launcher.agent.spares import Rank, RankCommand, Spare, Spares, last_words, start_rank, why_not_started
from roxxel_dist.launcher.host.process_tree import HANDED_ON, NOT_FOLLOWED, beat, go_on_under_guard, remove
from roxxel_dist.launcher.host.protocol import LIMITS, NONCE, Decoder, Message, Outbox, mark, take_stdout
from roxxel_dist.launcher.job.environment import PROXIES, direct, misleads, suspects
from roxxel_dist.launcher.job.limits import Limits
from roxxel_dist.launcher.job.spec import CONTRACT
from roxxel_dist.process import progress
from roxxel_dist.process.exit_codes import (
    EXIT_USAGE,
    MEMORY_ENV,
    OK_CODES,
    STACK_SIGNAL,
)
from roxxel_dist.process.process_stat import is_ending


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


ORDERS = 0  # stdin
SILENCE = "it heard nothing from the launcher for {:g} s"
CHUNK = 1 << 16
FULL = 1 << 20
"""With more bytes than this waiting for the controller, output stays in the pipes: ranks wait, memory does not grow."""


def clock() -> float:
    """Seconds, those included in which the machine was suspended: other ranks may have been started meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Agent:
    """The loop of one host."""

    def __init__(
        self,
        inbox: Decoder,
        channel: int,
        heartbeat: int,
        folder: Path,
        memory: str | None = None,
        heartbeat_timeout_s: float = math.inf,
        asked: deque[int] | None = None,
        nonce: str = "",
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._asked = deque[int]() if asked is None else asked  # signals of a batch system, for the controller
        self._inbox = inbox
        self._orders = deque[Message]()
        self._held = ExitStack()  # what questions hold until ranks start: a port, a file
        self._outbox = Outbox(channel, nonce)
        self._heartbeat = heartbeat
        self._progress_file = folder / "progress"
        self._folders = [str(folder), *([] if memory is None else [memory])]
        self._own = {progress.ENV: str(self._progress_file), **({} if memory is None else {MEMORY_ENV: memory})}
        self._progress = -1  # the descriptor, from `start` on
        self._ranks: list[Rank] = []
        self._programs: dict[int, RankCommand] = {}
        self._suspects: dict[str, str] = {}  # variables of the ranks that may keep them from others
        self._spares = Spares(
            self._folders, self._limits, watch=self._watch_spare, end=self._drop_spare, note=self.note
        )
        self._dropped: list[Rank] = []  # killed, not gone perhaps, and no ranks any more
        self._noted = set[str]()
        self._code = set[tuple[str, str]]()  # what ranks of this attempt have imported: names and checksums
        self._new_code: list[tuple[int, str, str, str]] = []
        self._stale = False  # whether spares of this start had other code
        self._warms = False  # whether spares are on their way before any rank has run here
        self._keepers: list[int] = []  # whose trees are empty: they end, and are to be reaped
        self._exited = deque[Rank]()  # in the order in which they ended; their exit codes follow a moment later
        self._poll = select.epoll()
        self._on_ready: dict[int, Callable[[], None]] = {}
        self._watch(ORDERS, self._read_orders)
        self._kill_at: float | None = None
        self._report_at = 0.0
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._last_received = clock()
        self._echo = 0.0  # the time in the newest heartbeat, by the controller's clock
        self._lease: HostLease | None = None
        self._draining = self._killed = self._paused = self._writable = self._done = self._ended = False
        self.why: str = ""  # why it ended before its ranks without an order

    def serve(self, orders: list[Message]) -> None:
        """Follow orders, these first, until the controller is gone. The ranks that are left then die with the agent."""
        self._orders.extend(orders)
        while not self._ended:
            self._obey()  # not within the events: a new descriptor may have the number of one that is closed there
            self._send()
            ready = self._poll.poll(self._wait_s())
            self._end_where_lost()  # before anything is read: what waits may be old
            for fd, _ in ready:
                if fd in self._on_ready:  # else there is room for messages, or it was closed by the event before
                    self._on_ready[fd]()
            self._on_exits()
            now = time.monotonic()
            if self._kill_at is not None and now >= self._kill_at:
                self._kill()
            for rank in self._ranks:
                if rank.instead is not None and now >= rank.taken_by:
                    rank.tree.kill()
            if now >= self._report_at:
                self._report()
                if not self._draining:
                    self._spares.start_when_ranks_work(self._alive(), self._programs)
            self._read_rests()
            self._tell_done()
            self._tell_warm()
            self._send()
        self._held.close()
        self._poll.close()

    def _end_where_lost(self) -> None:
        """End if nothing was received for too long: a link that is cut, a controller or a machine that stood still."""
        limit = self._heartbeat_timeout_s
        if self._lease is not None and self._lease.holds:
            limit = max(limit, self._lease.limit_s)
        if clock() - self._last_received > limit:
            self._ended = True
            self.why = SILENCE.format(limit)

    def _watch(self, fd: int, handle: Callable[[], None]) -> None:
        self._on_ready[fd] = handle
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        del self._on_ready[fd]
        self._poll.unregister(fd)

    def _wait_s(self) -> float:
        if not self._paused and any(rank.tree.is_empty and rank.output >= 0 for rank in self._ranks):
            return 0
        until = self._report_at if self._kill_at is None else min(self._report_at, self._kill_at)
        return max(0.0, until - time.monotonic())

    def _read_orders(self) -> None:
        data = os.read(ORDERS, CHUNK)
        self._last_received = clock()
        if not data:
            self._ended = True
        self._orders.extend(self._inbox.feed(data))

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if "ask" in order:
                from roxxel_dist.launcher.host.probe import answer  # late: a local job asks nothing

                self._outbox.send(answer(order, self._held, self._limits))
                self._last_received = clock()  # it may have taken long
            elif order["type"] == "warm":
                self._warm(order)
            elif order["type"] == "start":
                self._clear()
                self._start(order)
                self._last_received = clock()
            elif order["type"] == "leave":
                self._ended = True
            elif order["type"] == "alive":
                self._echo = order["at"]
            elif order["type"] == "first" and self._lease is not None:
                self._lease.meet(order["port"])
            elif order["type"] == "stop":
                self._stop(float(order["grace"]))
            elif order["type"] == "kill":
                self._kill_in(order["after"])
            elif order["type"] == "dump":
                self._report()
                self._dump()

    def _clear(self) -> None:
        """Forget the attempt before, of which nothing runs any more."""
        self._held.close()
        for rank in self._ranks:
            if not rank.exited:
                self._note_exit(rank)
            if rank.pipe >= 0:
                self._close_pipe(rank)
        if self._progress >= 0:
            os.close(self._progress)
            self._progress_file.unlink(missing_ok=True)
        if self._lease is not None:
            if self._lease.fd is not None:
                self._unwatch(self._lease.fd)
            self._lease.close()
            self._lease = None
        self._ranks.clear()
        self._dropped.clear()
        self._exited.clear()
        self._code.clear()
        self._new_code.clear()
        self._kill_at = None
        self._draining = self._killed = self._done = False

    def _take_lease(self, terms: Message) -> None:
        lease = self._lease = HostLease(terms, self._limits)
        if lease.fd is not None:
            self._watch(lease.fd, lambda: lease.receive(clock() - self._last_received, clock()))
        if lease.port is not None:
            self._outbox.send({"type": "first", "port": lease.port})

    def _start(self, order: Message) -> None:
        if "lease" in order:
            self._take_lease(order["lease"])
        self._stale = self._warms = False
        self._progress = progress.create(self._progress_file, order["total"])
        self._programs = self._programs_of(order)
        self._note_environment()
        for number, program in self._programs.items():
            if (rank := self._take_spare(number, program) or self._start_rank(number, program)) is None:
                break
            self._ranks.append(rank)
        self._spares.end_all()  # not ready, or for another program
        self._spares.mode = order.get("spares", "off")

    def _programs_of(self, order: Message) -> dict[int, RankCommand]:
        base = {name: value for name, value in os.environ.items() if name not in CONTRACT and not misleads(name)}
        envs = {placed["rank"]: {**base, **placed["env"], **self._own} for placed in order["ranks"]}
        return {rank: RankCommand(order["command"], {**env, **direct(env)}) for rank, env in envs.items()}

    def _note_environment(self) -> None:
        env = next((program.env for program in self._programs.values()), {})
        self._suspects = suspects(env)
        if names := [name for name in PROXIES if env.get(name)]:
            self.note(
                f"{', '.join(names)} is set: ranks reach jax's coordinator without the proxy "
                f"(no_grpc_proxy is {env['no_grpc_proxy']})"
            )

    def _warm(self, order: Message) -> None:
        """Start spares for ranks that may come here; `_tell_warm` says when they are ready."""
        self._warms = True
        self._spares.start_now(self._programs_of(order), order["spares"], at_once=True)

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
        self._watch(rank.tree.fd, partial(self._hear_keeper, rank))
        self._watch(rank.pipe, partial(self._read_pipe, rank))
        self._watch_as_rank(rank)
        return rank

    def _watch_as_rank(self, rank: Rank) -> None:
        self._watch(rank.tree.pidfd, partial(self._note_exit, rank))
        if not self._paused:
            self._watch(rank.output, partial(self._read_output, rank))
        self._outbox.send({"type": "started", "rank": rank.number, "pid": rank.tree.pid})

    def _take_spare(self, number: int, program: RankCommand) -> Rank | None:
        """The rank that a spare becomes; None where no spare can be it."""
        rank = self._spares.take(number, program)
        if rank is not None:
            self._unwatch(rank.tree.pidfd)
            self._watch_as_rank(rank)
        return rank

    def _watch_spare(self, spare: Spare) -> None:
        self._watch(spare.rank.tree.pidfd, partial(self._end_spare, spare))
        self._watch(spare.rank.tree.fd, partial(self._hear_keeper, spare.rank))
        self._watch(spare.rank.pipe, partial(self._read_pipe, spare.rank))

    def _drop_spare(self, rank: Rank) -> None:
        self._unwatch(rank.tree.pidfd)
        os.close(rank.tree.pidfd)
        self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        """Take no more notice of a rank than that it is gone one day."""
        rank.tree.kill()
        if rank.output in self._on_ready:
            self._unwatch(rank.output)
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

    def _stop(self, grace: float) -> None:
        """Ask every process of every rank, once, to save and leave. After `grace` seconds they are killed."""
        self._draining = True
        self._kill_at = time.monotonic() + grace
        for rank in self._alive():
            rank.tree.ask_to_stop()

    def _report(self) -> None:
        """Tell how far the ranks are whose records have changed; and that this agent lives, where none has."""
        self._report_at = time.monotonic() + self._limits.report_s
        try:
            beat(self._heartbeat)
        except BrokenPipeError:  # if this process were killed too, the ranks would live on
            self.why = "its guard was killed (is memory short on this host?)"
            self._ended = True
        while self._asked:
            self._outbox.send({"type": "signal", "number": self._asked.popleft()})
        self._keepers = [pid for pid in self._keepers if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if self._lease is not None:
            self._lease.check(clock() - self._last_received, clock())
        records = []
        for rank in self._alive():
            record = progress.read(self._progress, rank.number)
            if record != rank.reported:
                rank.reported = record
                records.append((rank.number, *record))
        self._outbox.send({"type": "progress", "records": records, "echo": self._echo})
        if self._new_code:
            self._outbox.send({"type": "code", "files": self._new_code})
            self._new_code.clear()

    def _dump(self) -> None:
        """Have every rank that can write the stacks of its threads to its log."""
        pids = {rank.number: progress.read(self._progress, rank.number).pid for rank in self._alive()}
        dumps = [(rank.number, *ask_for_stack(pids[rank.number], rank.tree.pid)) for rank in self._alive()]
        self._outbox.send({"type": "dumped", "ranks": dumps, "suspects": self._suspects})

    def _alive(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _kill_in(self, seconds: float) -> None:
        """Kill all ranks then, or earlier where that was decided already."""
        self._kill_at = min(self._kill_at or math.inf, time.monotonic() + seconds)

    def _kill(self) -> None:
        self._kill_at, self._killed = None, True
        for rank in self._ranks:
            rank.killed_by_us = rank.killed_by_us or (
                rank.code is None and rank not in self._exited and not is_ending(rank.tree.pid)
            )
            rank.tree.kill()

    def _note_exit(self, rank: Rank) -> None:
        self._unwatch(rank.tree.pidfd)
        os.close(rank.tree.pidfd)
        rank.exited = True
        self._exited.append(rank)

    def _hear_keeper(self, rank: Rank) -> None:
        rank.tree.receive()
        if rank.tree.is_empty:
            self._unwatch(rank.tree.fd)
            rank.tree.close()
            self._keepers.append(rank.tree.keeper)

    def _on_exits(self) -> None:
        exited: list[Rank] = []
        while self._exited and (code := self._exited[0].tree.code) is not None:
            rank = self._exited.popleft()
            if rank.instead is not None and not (self._killed or self._draining or self._kill_at is not None):
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
            self._kill_in(self._limits.usage_s)
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
            self._unwatch(rank.output)
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
        self._unwatch(rank.pipe)
        os.close(rank.pipe)
        rank.pipe = -1

    def _tell_done(self) -> None:
        if self._progress < 0 or self._done:
            return
        ended = all(rank.code is not None and rank.output < 0 and rank.tree.is_empty for rank in self._ranks)
        if ended and all(rank.tree.is_empty for rank in self._dropped):
            self._done = True
            self._outbox.send({"type": "done"})

    def _send(self) -> None:
        self._outbox.flush()
        if bool(self._outbox) != self._writable:
            self._writable = not self._writable
            if self._writable:
                self._poll.register(self._outbox.fd, select.EPOLLOUT)
            else:
                self._poll.unregister(self._outbox.fd)
        if (len(self._outbox) > FULL) != self._paused:
            self._paused = not self._paused
            for rank in self._ranks:
                if rank.output >= 0 and self._paused:
                    self._unwatch(rank.output)
                elif rank.output >= 0:
                    self._watch(rank.output, partial(self._read_output, rank))


def main() -> None:
    """Serve the controller at the other end of stdin and stdout: `agent [SILENT_S]`."""
    heartbeat_timeout_s = float(sys.argv[1]) if len(sys.argv) > 1 else math.inf
    asked = deque[int]()
    for number in NOT_FOLLOWED:  # handlers, not SIG_IGN: the ranks would inherit that
        signal.signal(number, lambda number, _: asked.append(number) if number in HANDED_ON else None)
    channel, inbox = take_stdout(), Decoder()
    if not select.select([0], [], [], None if heartbeat_timeout_s == math.inf else heartbeat_timeout_s)[0]:
        sys.exit(SILENCE.format(heartbeat_timeout_s))
    orders = inbox.read(0)
    nonce = orders[0].get(NONCE, "") if orders else ""
    limits = Limits.received(orders[0].get(LIMITS, {})) if orders else Limits()
    if orders and "ask" in orders[0]:
        from roxxel_dist.launcher.host.probe import answer_all  # only ranks on other hosts need it

        orders = answer_all(orders, inbox, channel, nonce, limits)
    if not orders or orders[0].get("type") == "leave":
        return
    folder = Path(tempfile.mkdtemp(prefix="roxxel-"))  # in TMPDIR, where it is set
    key = orders[0].get("key")
    memory = memory_folder.new_path() if key is not None else None
    folders = [str(folder), *([] if memory is None else [memory])]
    limit_s = heartbeat_timeout_s + limits.slack_s
    heartbeat = go_on_under_guard(folders, limits.guard_kill_s, limit_s, channel, mark(nonce))
    try:
        if memory is not None and key is not None:  # only now that the guard would remove it
            memory = memory_folder.make(memory, key)
        agent = Agent(inbox, channel, heartbeat, folder, memory, heartbeat_timeout_s, asked, nonce, limits)
        if key is not None and memory is None:
            agent.note(
                f"no folder can be made in {memory_folder.SHARED_MEMORY}: nothing is kept in memory for restarts"
            )
        agent.serve(orders)
    finally:
        remove(folders)
    if agent.why:
        sys.exit(agent.why)


if __name__ == "__main__":
    main()
