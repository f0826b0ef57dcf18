"""One per host: obeys the controller, starts the ranks (`ranks.py`), and ends them with itself.

One thread, one epoll, which waits beside it for the start of a keeper and answers of file systems alone: pidfds report
the ends of ranks, orders and output come by pipe, and other processes do the killing (`process_tree`). The agent takes
orders from its stdin alone, and hands a system's requests to end on to the controller (HANDED_ON). When stdin ends, or
is silent for longer than the heartbeat timeout, the controller is lost: the agent ends, and with it the ranks. Where no
host receives from the controller, ranks live on for the job's lease (`HostLease`). Decision 24.
"""

import fcntl
import math
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from roxxel_dist.launcher.agent.ranks import CHUNK, HostRanks, Watch
from roxxel_dist.launcher.host.process_tree import HANDED_ON, NOT_FOLLOWED, beat, go_on_under_guard, remove
from roxxel_dist.launcher.host.protocol import LIMITS, NONCE, Decoder, Message, Outbox, mark, take_stdout
from roxxel_dist.launcher.job.spec import Limits

SIZE = 256
ALL = b"all"


class HostLease:
    """The lease of one host, for one attempt: may its ranks go on while it receives nothing from the launcher?

    Only if no host of the job does. A host that receives nothing may be cut off alone. Then the launcher starts other
    ranks in the place of its own, which must have ended by then (`Limits.silent_s`). Or the launcher's own link is cut:
    then no host receives, nothing is started anywhere, and the ranks, which reach each other, go on for the lease. A
    host cannot distinguish the two. So each host that has received nothing for `orphan_s` asks the first one, by a
    datagram; the first one answers when all hosts ask at once. Where a firewall drops datagrams, there is no answer,
    and ranks end as if their host were cut off alone.

    The launcher holds the other half: it takes a host for cut off alone only if others have received from it all the
    time (`common_s`, which is less than `orphan_s - fresh_s`). Decision 23.

    Args:
        terms: `limit` (seconds), `hosts` (their number), `index` (of this host), `token` (a secret of the attempt) and
            `address` (of the first host, numeric), as the order `start` has them.
        limits: of the job.
    """

    def __init__(self, terms: Mapping[str, Any], limits: Limits) -> None:
        self._limits = limits
        self.limit_s: float = terms["limit"]
        self.holds: bool = False
        """Whether no host has received from the launcher since this one has."""
        self._hosts, self._index = int(terms["hosts"]), int(terms["index"])
        self._token, self._address = str(terms["token"]).encode(), str(terms["address"])
        self._asked: dict[int, float] = {}
        self._first: tuple[str, int] | None = None
        self._socket: socket.socket | None = None
        self.port: int | None = None
        """Where the first host is asked; None on other hosts, and where there is no other."""
        if self._hosts > 1:
            with suppress(OSError):
                family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
                if self._index == 0:
                    self._socket.bind(("", 0))
                    self.port = int(self._socket.getsockname()[1])

    @property
    def fd(self) -> int | None:
        """Readable when there is something to `receive`."""
        return None if self._socket is None else self._socket.fileno()

    def meet(self, port: int) -> None:
        """Take in where the first host is asked."""
        self._first = (self._address, port)

    def check(self, silent_s: float, now: float) -> None:
        """Ask, if the launcher has been silent for long. To be called every half second."""
        if silent_s < self._limits.orphan_s:
            self.holds = False
        elif self._hosts == 1:
            self.holds = True
        elif self._index == 0:
            self._asked[0] = now
            self.holds = self.holds or self._all_ask(now)
        elif self._socket is not None and self._first is not None:
            with suppress(OSError):  # no route, so no answer
                self._socket.sendto(b"%s %d" % (self._token, self._index), self._first)

    def receive(self, silent_s: float, now: float) -> None:
        """Take in one datagram: a question to the first host, or its answer."""
        if self._socket is None:
            return
        try:
            data, sender = self._socket.recvfrom(SIZE)
        except OSError:  # such as the answer of a host that listens no more
            return
        token, _, text = data.partition(b" ")
        if token != self._token or silent_s < self._limits.orphan_s:
            return
        if self._index != 0:
            self.holds = self.holds or text == ALL
        elif text.isdigit() and 0 < int(text) < self._hosts:
            self._asked |= {0: now, int(text): now}
            if self._all_ask(now):
                self.holds = True
                with suppress(OSError):
                    self._socket.sendto(b"%s %s" % (self._token, ALL), sender)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _all_ask(self, now: float) -> bool:
        fresh_s = self._limits.fresh_s
        return len(self._asked) == self._hosts and all(now - when <= fresh_s for when in self._asked.values())


ORDERS = 0  # stdin
SILENCE = "it heard nothing from the launcher for {:g} s"
FULL = 1 << 20
"""The most bytes that wait for the controller; beyond, output stays in the pipes: ranks wait, memory does not grow."""


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
        self._watch = Watch()
        self._watch.add(ORDERS, self._read_orders)
        self._ranks = HostRanks(self._watch, self._outbox, folder, memory, self._limits)
        self._report_at = 0.0
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._last_received = clock()
        self._echo = 0.0  # the time in the newest heartbeat, by the controller's clock
        self._lease: HostLease | None = None
        self._writable = self._ended = False
        self.why: str = ""  # why it ended before its ranks without an order

    def note(self, text: str) -> None:
        """Tell people, once."""
        self._ranks.note(text)

    def serve(self, orders: list[Message]) -> None:
        """Follow orders, these first, until the controller is gone. The ranks that are left then die with the agent."""
        self._orders.extend(orders)
        while not self._ended:
            self._obey()  # not within the events: a new descriptor may have the number of one that is closed there
            self._send()
            ready = self._watch.poll.poll(self._wait_s())
            self._end_where_lost()  # before anything is read: what waits may be old
            for fd, _ in ready:  # without a handler there is room for messages, or it was closed by the event before
                self._watch.call(fd)
            self._ranks.look()
            if time.monotonic() >= self._report_at:
                self._report()
                self._ranks.start_spares()
            self._ranks.tell()
            self._send()
        self._held.close()
        self._watch.poll.close()

    def _end_where_lost(self) -> None:
        """End if nothing was received for too long: a link that is cut, a controller or a machine that stood still."""
        limit, silent_s = self._heartbeat_timeout_s, clock() - self._last_received
        if self._lease is not None:
            if silent_s > limit:  # the machine may have been suspended since the last look
                self._lease.check(silent_s, clock())
            limit = max(limit, self._lease.limit_s) if self._lease.holds else limit
        if silent_s > limit:
            self._ended = True
            self.why = SILENCE.format(limit)

    def _wait_s(self) -> float:
        if self._ranks.has_rests:
            return 0
        dues = [self._report_at] if self._ranks.kill_at is None else [self._report_at, self._ranks.kill_at]
        return max(0.0, min(dues) - time.monotonic())

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
                self._ranks.warm(order)
            elif order["type"] == "start":
                self._start(order)
                self._last_received = clock()
            elif order["type"] == "leave":
                self._ended = True
            elif order["type"] == "alive":
                self._echo = order["at"]
            elif order["type"] == "first" and self._lease is not None:
                self._lease.meet(order["port"])
            elif order["type"] == "stop":
                self._ranks.stop(float(order["grace"]))
            elif order["type"] == "kill":
                self._ranks.kill_in(order["after"])
            elif order["type"] == "dump":
                self._report()
                self._ranks.dump()

    def _take_lease(self, terms: Message) -> None:
        lease = self._lease = HostLease(terms, self._limits)
        if lease.fd is not None:
            self._watch.add(lease.fd, lambda: lease.receive(clock() - self._last_received, clock()))
        if lease.port is not None:
            self._outbox.send({"type": "first", "port": lease.port})

    def _start(self, order: Message) -> None:
        self._held.close()
        if self._lease is not None:
            if self._lease.fd is not None:
                self._watch.remove(self._lease.fd)
            self._lease.close()
            self._lease = None
        if "lease" in order:
            self._take_lease(order["lease"])
        self._ranks.begin(order)

    def _report(self) -> None:
        """Tell how far the ranks are whose records have changed; and that this agent lives, where none has."""
        self._report_at = time.monotonic() + self._limits.report_s
        try:
            beat(self._heartbeat)
        except BrokenPipeError:  # if this process were killed too, the ranks would live on
            self.why = "its guard was killed (is memory short on this host?)"
            self._ended = True
        while self._asked and self._ranks.are_there:  # between two attempts nobody would follow it
            self._outbox.send({"type": "signal", "number": self._asked.popleft()})
        if self._lease is not None:
            self._lease.check(clock() - self._last_received, clock())
        self._outbox.send({"type": "progress", "records": self._ranks.report(), "echo": self._echo})

    def _send(self) -> None:
        self._outbox.flush()
        if bool(self._outbox) != self._writable:
            self._writable = not self._writable
            if self._writable:
                self._watch.poll.register(self._outbox.fd, select.EPOLLOUT)
            else:
                self._watch.poll.unregister(self._outbox.fd)
        self._ranks.pause(len(self._outbox) > FULL)


SHARED_MEMORY = "/dev/shm"
NAME = re.compile("roxxel-[0-9a-f]{16}")
KEY = "key"
NEW_S = 60.0
"""A younger folder may not be locked yet by the agent that makes it."""


def new_memory() -> str | None:
    """A name for a new folder; None where this host has no shared memory that can be written."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    return os.path.join(SHARED_MEMORY, f"roxxel-{os.urandom(8).hex()}")


def create_memory(path: str, key: str) -> None:
    """Make the folder of a job in memory with its key, for this user alone. Raises OSError.

    It counts as used while this process lives, which removes it. If the agent is killed, its guard removes it; if that
    is killed as well, the keepers of the ranks do; if every process of the user was, the next job with such a folder.
    """
    os.mkdir(path, 0o700)
    fcntl.flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept open
    with open(os.open(os.path.join(path, KEY), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)


def make_memory(path: str, key: str) -> str | None:
    """The folder that `create_memory` makes, in room that abandoned folders leave; None where it cannot be made."""
    remove_abandoned_memory()
    try:
        create_memory(path, key)
    except OSError:
        return None
    return path


def remove_abandoned_memory() -> None:
    """Remove the folders of this user that no agent uses any more."""
    with suppress(OSError):
        for place in os.scandir(SHARED_MEMORY):
            if NAME.fullmatch(place.name) and place.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_abandoned(place)


def _remove_abandoned(place: "os.DirEntry[str]") -> None:
    state = place.stat(follow_symlinks=False)
    if state.st_uid != os.getuid() or time.time() - state.st_mtime < NEW_S:
        return
    folder = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove([place.path])
    finally:
        os.close(folder)


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
    limits = Limits.from_message(orders[0].get(LIMITS, {})) if orders else Limits()
    if orders and "ask" in orders[0]:
        from roxxel_dist.launcher.host.probe import answer_all  # only ranks on other hosts need it

        orders = answer_all(orders, inbox, channel, nonce, limits)
    if not orders or orders[0].get("type") == "leave":
        return
    folder = Path(tempfile.mkdtemp(prefix="roxxel-"))  # in TMPDIR, where it is set
    key = orders[0].get("key")
    memory = new_memory() if key is not None else None
    folders = [str(folder), *([] if memory is None else [memory])]
    limit_s = heartbeat_timeout_s + limits.slack_s
    try:  # no process may be left for a guard
        heartbeat = go_on_under_guard(folders, limits.guard_kill_s, limit_s, channel, mark(nonce))
        if memory is not None and key is not None:  # only now that the guard would remove it
            memory = make_memory(memory, key)
        agent = Agent(inbox, channel, heartbeat, folder, memory, heartbeat_timeout_s, asked, nonce, limits)
        if key is not None and memory is None:
            agent.note(f"no folder can be made in {SHARED_MEMORY}: nothing is kept in memory for restarts")
        agent.serve(orders)
    finally:
        remove(folders)
    if agent.why:
        sys.exit(agent.why)


if __name__ == "__main__":
    main()
