"""Questions to the hosts before a start: many at once, and again where a server has no room for a connection."""

import ipaddress
import itertools
import math
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import PROGRAM_FIX, Backend
from roxxel_dist.launcher.policy.outcome import backoff, how
from roxxel_dist.launcher.transport.connection import DENIED, KEY_COMMAND, PLUGIN, HostConnection, NearEnd, shorten
from roxxel_dist.launcher.transport.pool import LOOK_S, PROBE_END_S, HostPool
from roxxel_dist.process.process_stat import SESSION, processes

FIRST_ROOM, AT_ONCE = 32, 512
"""So many hosts are connected to at the same time at first, one more for each that answers until one is refused (a
bastion, an API server), and so many are asked at the same time at most."""
RETRY_S, RETRY_MOST_S = 0.25, 5.0
"""The first pause after a refused connection, and the longest one; each is twice the last, and half of it is random."""
REFUSALS = 8
"""So many in a row, and the host counts as unreachable: about 17 s."""
LEAVE_S = 0.3
"""How long a program that does not answer as an agent does may take to end by itself, before its client is killed."""
CHANGED = "HAS CHANGED"
"""Words of ssh about a host key that is another one than in known_hosts."""
EXIT_KILLED = 137
KILLED = "it was killed there: is memory short, or a limit of the container too low?"
_numbers = itertools.count(1)
"""Of the questions of this process: an answer to one that was broken off may come late."""


class Interrupted(Exception):
    """The questions were broken off because of a signal, or another event for the launcher."""


@dataclass
class Refusals:
    """The connections to a host that its server, or one on the way, has refused."""

    until: float
    """The time from which on the host counts as unreachable, by the launcher's clock."""
    count: int = 0
    again: float = 0.0
    """The time from which on the next connection may begin."""


@dataclass
class _Round:
    """One question to each of some hosts, as far as it has come."""

    questions: Mapping[str, Message]
    limit_s: float
    silent_s: float
    unasked: deque[str]
    answers: dict[str, Message] = field(default_factory=dict)
    waiting: dict[HostConnection, float] = field(default_factory=dict)
    """Those that were asked, and until when they may answer, by the launcher's clock."""
    leaving: dict[HostConnection, tuple[float, Exception]] = field(default_factory=dict)
    """Those whose program has ended, until when their clients may stay, and how the end was seen."""
    refusals: dict[str, Refusals] = field(default_factory=dict)
    """The refusals of hosts that are to be reached once more."""

    def limit_of(self, link: HostConnection) -> float:
        """Seconds for an answer: an agent that has had ranks is connected."""
        return min(self.limit_s, self.silent_s) if link.started else self.limit_s


class HostQuestions:
    """Asks the programs of a pool, which are started where they do not run."""

    def __init__(self, pool: HostPool) -> None:
        self.unreachable: dict[str, str] = {}
        """Hosts that do not answer, and why."""
        self.starting: list[str] = []
        """Those of them that may still start, by the words of their servers."""
        self._pool = pool
        self._room: float = min(FIRST_ROOM, AT_ONCE)
        """How many hosts may be connected to at the same time: fewer where a server refuses some."""
        self._narrowed = 0
        """The last question when the room was made smaller."""
        self._last = 0
        """The last question."""

    def ask(self, questions: Mapping[str, Message], limit_s: float | None = None) -> dict[str, Message]:
        """Ask hosts, `AT_ONCE` at a time, and wait for all answers.

        A host that does not answer within `limit_s` seconds (`Limits.answer_s`), or whose program ends, has no answer,
        and is in `unreachable`. An agent that has had ranks has `Limits.silent_s` at most, for it is connected.

        Raises:
            Interrupted: the pool was woken.
        """
        limits = self._pool.limits
        limit_s = limits.answer_s if limit_s is None else limit_s
        unasked = deque(host for host in questions if host not in self.unreachable)
        turn = _Round(questions, limit_s, limits.silent_s, unasked)
        while turn.unasked or turn.waiting or turn.leaving or turn.refusals:
            now = time.monotonic()
            for host, refused in turn.refusals.items():
                if refused.again <= now:
                    refused.again = math.inf  # until it is asked
                    turn.unasked.append(host)
            if self._has_room(turn):  # one in a turn: answers are not to wait for the start of others
                self._ask_next(turn, now)
            for link, event in self._pool.ready(self._wait_s(turn)):
                self._take(turn, link, event)
            if self._pool.woken:
                raise Interrupted
            for link, (end, event) in tuple(turn.leaving.items()):
                if link.process.poll() is not None or time.monotonic() >= end:
                    self._take_end(turn, link, event)
            self._give_up_the_late(turn)
        return {host: turn.answers[host] for host in questions if host in turn.answers}

    def _has_room(self, turn: _Round) -> bool:
        """Whether a host can be asked now: it is connected, or there is room for one more that is not."""
        if not turn.unasked or len(turn.waiting) >= AT_ONCE:
            return False
        return self._pool.is_connected(turn.unasked[0]) or sum(not link.ready for link in turn.waiting) < self._room

    def _ask_next(self, turn: _Round, now: float) -> None:
        host = turn.unasked.popleft()
        try:
            link = self._pool.connect(host)
        except OSError as error:
            turn.refusals.pop(host, None)
            self.unreachable[host] = f"no agent could be started: {error}"
            return
        self._last = link.question = next(_numbers)
        link.send({**turn.questions[host], "id": link.question})
        turn.waiting[link] = now + turn.limit_of(link)
        if host in turn.refusals:
            turn.waiting[link] = turn.refusals[host].again = turn.refusals[host].until

    def _wait_s(self, turn: _Round) -> float:
        ends = [*turn.waiting.values(), *(refused.again for refused in turn.refusals.values())]
        if turn.leaving:  # no descriptor says that a client has ended
            ends.append(time.monotonic() + LOOK_S)
        return 0.0 if self._has_room(turn) or not ends else max(0.0, min(ends) - time.monotonic())

    def _take(self, turn: _Round, link: HostConnection, event: Message | str | Exception) -> None:
        """Take in an answer, or the end of a program, whose client may stay for a moment."""
        if isinstance(event, ValueError) and link not in turn.leaving:  # something runs there, perhaps an agent
            link.hang_up()
            turn.leaving[link] = time.monotonic() + LEAVE_S, event
        elif isinstance(event, Exception):
            turn.leaving.setdefault(link, (time.monotonic() + PROBE_END_S, event))
        elif isinstance(event, dict) and "type" not in event and event.pop("id", None) == link.question:
            turn.answers[link.host] = event
            self._room += 1 / self._room if self._narrowed else 1  # a round later one more, or twice as many
            turn.refusals.pop(link.host, None)
            turn.waiting.pop(link, None)

    def _take_end(self, turn: _Round, link: HostConnection, event: Exception) -> None:
        """Take in the end of a program and of its client: the host is reached anew, or has no answer."""
        del turn.leaving[link]
        backend, until = self._pool.backend, turn.waiting.pop(link, None)
        why = str(event) or _why_it_ended(link, backend)
        if until is not None and not link.ready and backend.is_refusal(link.stderr):
            refused = turn.refusals.setdefault(link.host, Refusals(until))
            if self._try_again(link, refused):
                return
            why += f"; refused {refused.count} times: its server, or a bastion before it, takes fewer at once"
            if backend.is_by_ssh:
                why += f", or a ProxyCommand ends without a word (`ssh -v {link.host}` shows it)"
        if not link.ready and backend.is_starting(link.stderr):
            self.starting.append(link.host)
        turn.refusals.pop(link.host, None)
        self._give_up(link, why)

    def _try_again(self, link: HostConnection, refused: Refusals) -> bool:
        """Take note of a refused connection; whether there is time for another one, after a pause of random length."""
        refused.count += 1
        if link.question > self._narrowed:  # those that began before are of the same crowd
            self._room, self._narrowed = max(self._room / 2, 1.0), self._last
        now = time.monotonic()
        refused.again = now + backoff(RETRY_S, refused.count, RETRY_MOST_S) * random.uniform(0.5, 1)
        if refused.again >= refused.until or refused.count == REFUSALS:
            return False
        self._pool.disconnect([link])
        return True

    def _give_up_the_late(self, turn: _Round) -> None:
        now = time.monotonic()
        for link in [link for link, end in turn.waiting.items() if now >= end and link not in turn.leaving]:
            del turn.waiting[link]
            turn.refusals.pop(link.host, None)
            why = f"it did not answer within {turn.limit_of(link):g} s{link.last_words}: {_why_late(link)}"
            self._give_up(link, why)

    def _give_up(self, link: HostConnection, why: str) -> None:
        self.unreachable[link.host] = why
        self._pool.forget(link)
        if link.process.poll() is None:
            link.process.kill()


def _why_late(link: HostConnection) -> str:
    """Why an answer may not come: what the kernel knows of the client's connections, or else what to look at."""
    if isinstance(link.process, NearEnd) and (stuck := stuck_connection(link.process.pid)):
        return stuck
    if link.ready:
        return "is it stuck, or its network?"
    return (
        "is it stuck, does a start-up file there (~/.bashrc) not end, or are packets of full size lost on the way back "
        "(an MTU)?"
    )


def _why_silent(code: int | None, backend: Backend) -> str:
    """Why a client may have ended without a word."""
    if code is not None and code < 0:
        return f"its client was ended ({how(code)}): is memory short on this machine?"
    return KILLED if code == EXIT_KILLED else backend.login


def _why_it_ended(link: HostConnection, backend: Backend) -> str:
    """Why a program ended that should have answered: what its client said first, or last, with what to do."""
    code = link.wait(0.0 if link.process.poll() is None else LEAVE_S)
    first = link.first_causes
    why = first or link.last_error or link.decoder.noise or f"nothing was said: {_why_silent(code, backend)}"
    everything = "\n".join([*link.stderr, why])
    hint = next((hint for words, hint in backend.hints if words in (why if not first else everything)), "")
    if CHANGED in everything:
        remove = next((line.strip() for line in link.stderr if KEY_COMMAND.search(line)), f"ssh-keygen -R {link.host}")
        why, hint = f"Host key verification failed: it {CHANGED}", f"if a new machine has its name or address: {remove}"
    elif first and re.search(DENIED, link.last_error) and first != link.last_error:
        hint = f"`ssh {link.host}` shows it too"
    elif first and (not hint or hint == PROGRAM_FIX):
        hint = f"a ProxyCommand or a bastion of ssh's configuration says so; `ssh {link.host}` shows it too"
        if PLUGIN in link.last_error:
            hint = "the program that gives kubectl its credentials says so"
    elif not hint and code == EXIT_KILLED and why in (link.last_error, link.decoder.noise):
        hint = KILLED
    return f"{shorten(why)}{'; ' if hint else ''}{hint} (code {'unknown' if code is None else code})"


ESTABLISHED, SYN_SENT = 1, 2
RETRANSMIT = 1
"""The timer of a connection on which something is sent again, for nothing acknowledges it."""


def stuck_connection(session: int) -> str:
    """The connection of a session's programs that does not get on, for people; or ""."""
    for pid, fields in processes():
        if int(fields[SESSION]) == session:
            sockets = set(_sockets(pid))
            for version in ("tcp", "tcp6"):
                with suppress(OSError), open(f"/proc/{pid}/net/{version}", encoding="ascii") as file:
                    lines = (line.split() for line in file.readlines()[1:])
                    if said := next(_stuck(fields for fields in lines if fields[9] in sockets), ""):
                        return said
    return ""


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of the sockets of a process; none where it is gone, or is another user's."""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{number}").partition(":[")
                if kind == "socket":
                    yield inode.rstrip("]")


def _stuck(lines: Iterable[list[str]]) -> Iterator[str]:
    """The connections of a table in /proc that do not get on: their fields 2 to 6 are addresses, state and queues."""
    for fields in lines:
        address, port = _place(fields[2])
        place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        state, (timer, _), repeats = int(fields[3], 16), fields[5].split(":"), int(fields[6], 16)
        if state == SYN_SENT:
            yield f"{place} takes no connection"
        elif state == ESTABLISHED and int(timer, 16) == RETRANSMIT and repeats:
            count = int(fields[4].partition(":")[0], 16)
            yield (
                f"{place} has taken the connection, and does not acknowledge {count} bytes: packets of full size are "
                f"lost (an MTU: `ping -M do -s {1452 if ':' in address else 1472} {address}`), or its link is cut"
            )


def _place(text: str) -> tuple[str, int]:
    """Address and port as /proc writes them: each 4 bytes in the order of this machine."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8]) for start in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)
