"""A program on each of some hosts: starts them, asks them, hands over their messages, and notices the silent ones."""

import os
import random
import re
import secrets
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT, UserError
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Placement
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.hang import STILL_S
from roxxel_dist.launcher.policy.outcome import HostLost, how
from roxxel_dist.launcher.transport.connection import AGENT_END_S, CHUNK, HEARTBEAT_S, HostConnection, agent_words

SILENT_S = 10.0
"""An agent speaks each half second. Silent for longer, it is lost, with its ranks (`Backend.heartbeat_timeout_s`)."""
QUIET_S = 2.0
"""A host that has sent nothing for so long gets no heartbeat: it receives nothing much later than it sent something."""
COMMON_S = 3.0
"""If for so long no host is known to have received a heartbeat, the ranks of all may have a lease (`host.lease`)."""
GONE_S = 2.5
"""The ranks of a lost host are gone so long after its agent gives up: a guard may have to end it (`agent.SLACK_S`)."""
START_S = 60.0
"""How long an agent may take to its first word: a connection, and an interpreter from a slow file system."""
ANSWER_S = 60.0
"""How long a host may take to an answer before the start, its connection included."""
AT_ONCE = 32
"""So many hosts are asked at the same time: each may have to be reached first, and a network has its own limits."""
RETRY_S, RETRY_MOST_S = 0.25, 5.0
"""The first pause after a refused connection, and the longest one; each is twice the last, and half of it is random."""
REFUSALS = 8
"""So many in a row, and the host counts as unreachable: about 17 s."""
KILL_S = 10.0
"""How long killed ranks may take to be gone."""
PROBE_END_S = 2.0
"""How long a program without ranks may take to end."""
EXIT_LOST = 137
"""What an agent without a code of its own counts as: its ranks were killed."""


class Interrupted(Exception):
    """The questions were broken off because of a signal, or another event for the launcher."""


@dataclass
class Refusals:
    """The connections to a host that its server, or one on the way, has refused."""

    until: float
    """When the host counts as unreachable, by the launcher's clock."""
    count: int = 0
    again: float = 0.0
    """When the next connection may begin."""


class HostPool:
    """An agent on each of some hosts. Use it as a context: at its end the agents, and all that they held, are gone.

    Agents outlive the attempts of a job: those that are not lost are asked again, and start ranks again.

    Args:
        backend: starts the agents.
        wake: a descriptor to be waited for too; `events` returns when it can be read, and `ask` raises `Interrupted`.
    """

    def __init__(self, backend: Backend, wake: int | None = None) -> None:
        self._by_host: dict[str, HostConnection] = {}
        self.all: Collection[HostConnection] = self._by_host.values()
        """In the order of their start."""
        self.unreachable: dict[str, str] = {}
        """Hosts that do not answer questions, and why."""
        self._backend = backend
        self._words = agent_words(backend)
        self._select = selectors.DefaultSelector()
        if wake is not None:
            self._select.register(wake, selectors.EVENT_READ)
        self._heartbeat: threading.Thread | None = None
        self._ending = threading.Event()
        self._kill_by: float | None = None
        self._looked = 0.0
        self._lease_s: float | None = None
        self._questions = 0
        self._room: float = AT_ONCE
        """How many hosts may be connected to at the same time: fewer where a server refuses some."""
        self._narrowed = 0
        """The last question when the room was made smaller."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
        self._select.close()
        for link in self.all:
            link.hang_up()
        end = time.monotonic() + (PROBE_END_S if self._heartbeat is None else AGENT_END_S)
        for link in self.all:
            link.close(max(0.0, end - time.monotonic()))

    def connect(self, host: str) -> HostConnection:
        """The program on a host, which is started where it does not run. Raises OSError where it cannot be."""
        if host in self._by_host:
            return self._by_host[host]
        self._by_host[host] = link = HostConnection(host=host, process=self._backend.start(host, *self._words))
        for fd in (link.fd, link.error_fd):
            self._select.register(fd, selectors.EVENT_READ, link)
        return link

    def reach_anew(self) -> None:
        """Let go of hosts that were lost, or have not answered: the next question, or start, connects to them again."""
        while events := [(link, event) for link, event in self._ready(0) if link is not None]:
            for link, event in events:
                if isinstance(event, Exception):
                    self._forget(link)
        self._disconnect([link for link in self.all if link.lost])
        self.unreachable.clear()

    def _disconnect(self, links: Sequence[HostConnection]) -> None:
        for link in links:
            self._forget(link)
            del self._by_host[link.host]
            link.hang_up()
        end = time.monotonic() + AGENT_END_S
        for link in links:
            link.close(max(0.0, end - time.monotonic()))

    def ask(self, questions: Mapping[str, Message], limit_s: float = ANSWER_S) -> dict[str, Message]:
        """Ask hosts, `AT_ONCE` at a time, and wait for all answers; `received` in each is the time here when it came.

        A host that does not answer within `limit_s` seconds, or whose program ends, has no answer, and is in
        `unreachable`. An agent that has had ranks has `SILENT_S` at most, for it is connected.

        Raises:
            Interrupted: the descriptor `wake` can be read.
        """
        answers: dict[str, Message] = {}
        unasked = deque(host for host in questions if host not in self.unreachable)
        waiting: dict[HostConnection, float] = {}
        refusals: dict[str, Refusals] = {}  # of hosts that are to be reached once more
        while unasked or waiting or refusals:
            now = time.monotonic()
            for host in [host for host, refused in refusals.items() if refused.again <= now and host not in unasked]:
                unasked.append(host)
            may_ask = len(waiting) < AT_ONCE and self._has_room(unasked, waiting)
            if unasked and may_ask:  # one in a turn: answers are not to wait for the start of others
                host = unasked.popleft()
                try:
                    link = self._ask(host, questions[host])
                except OSError as error:
                    refusals.pop(host, None)
                    self.unreachable[host] = f"no agent could be started: {error}"
                    continue
                waiting[link] = now + (min(limit_s, SILENT_S) if link.started else limit_s)
                if host in refusals:
                    waiting[link] = refusals[host].again = refusals[host].until
            at_once = unasked and len(waiting) < AT_ONCE and self._has_room(unasked, waiting)
            ends = [*waiting.values(), *(refused.again for host, refused in refusals.items() if host not in unasked)]
            wait_s = 0.0 if at_once or not ends else max(0.0, min(ends) - time.monotonic())
            for link, event in self._ready(wait_s):
                if link is None:
                    raise Interrupted
                if isinstance(event, Exception):
                    why = str(event) or _why_it_ended(link)
                    if link in waiting and not link.ready and self._backend.is_refusal(link.stderr):
                        refused = refusals.setdefault(link.host, Refusals(waiting.pop(link)))
                        if self._try_again(link, refused):
                            continue
                        why += (
                            f"; refused {refused.count} times: its server, or a bastion before it, takes fewer at once"
                        )
                    refusals.pop(link.host, None)
                    self._give_up(link, why)
                elif isinstance(event, dict) and "type" not in event and event.pop("id", None) in (None, link.question):
                    answers[link.host] = event | {"received": time.time()}
                    refusals.pop(link.host, None)
                    self._room += 1 / self._room  # as many more in each round, until a connection is refused
                else:
                    continue
                waiting.pop(link, None)
            self._give_up_the_late(waiting, refusals, limit_s)
        return {host: answers[host] for host in questions if host in answers}

    def _ask(self, host: str, question: Message) -> HostConnection:
        link = self.connect(host)
        self._questions += 1
        link.question = self._questions  # an answer to one that was broken off may still come
        link.send({**question, "id": link.question})
        return link

    def _has_room(self, unasked: Sequence[str], waiting: Collection[HostConnection]) -> bool:
        """Whether the next host is connected, or there is room for one more that is not."""
        is_connected = bool(unasked) and unasked[0] in self._by_host
        return is_connected or sum(not link.ready for link in waiting) < self._room

    def _try_again(self, link: HostConnection, refused: Refusals) -> bool:
        """Take note of a refused connection; whether there is time for another one, after a pause of random length."""
        refused.count += 1
        if link.question > self._narrowed:  # those that began before are of the same crowd
            self._room, self._narrowed = max(self._room / 2, 1.0), self._questions
        now = time.monotonic()
        refused.again = now + min(RETRY_S * 2**refused.count, RETRY_MOST_S) * random.uniform(0.5, 1)
        if refused.again >= refused.until or refused.count == REFUSALS:
            return False
        self._disconnect([link])
        return True

    def _give_up_the_late(
        self, waiting: dict[HostConnection, float], refusals: dict[str, Refusals], limit_s: float
    ) -> None:
        for link in [link for link, end in waiting.items() if time.monotonic() >= end]:
            del waiting[link]
            refusals.pop(link.host, None)
            limit = min(limit_s, SILENT_S) if link.started else limit_s
            stuck = "is it stuck, or its network?"
            if not link.ready:
                stuck = "is it stuck, or its network, or does a start-up file there (~/.bashrc) not end?"
            self._give_up(link, f"it did not answer within {limit:g} s{_last_words(link)}: {stuck}")

    def _give_up(self, link: HostConnection, why: str) -> None:
        self.unreachable[link.host] = why
        self._forget(link)
        if link.process.poll() is None:
            link.process.kill()

    def start(
        self, job: JobSpec, placed: Sequence[Placement], key: str, spares: str, address: str = "127.0.0.1"
    ) -> None:
        """Have an agent on each host start its ranks; those of other hosts end.

        `key` is that of the job's folders in memory, `spares` the job's --warm-spares, or off. `address` is the first
        host's, as all others reach it.
        """
        self._lease_s = None if self._backend.heartbeat_timeout_s is None else max(job.host_lease, SILENT_S)
        lease = {"limit": self._lease_s, "hosts": len(placed), "token": secrets.token_hex(16), "address": address}
        self._looked = time.monotonic()  # no heartbeat was expected since the last question
        self._kill_by = None
        for index, place in enumerate(placed):
            link = self.connect(place.host)
            link.ranks, link.last_seen, link.ready = list(place.ranks), time.monotonic(), link.started
            link.started, link.done, link.echoed, link.leased = True, False, link.last_seen, False
            ranks = [{"rank": rank, "env": dict(env)} for rank, env in place.ranks.items()]
            more: Message = {"key": key} if job.is_restartable else {}
            if self._lease_s is not None:
                more["lease"] = {**lease, "index": index}
            what = {"command": job.command, "ranks": ranks, "total": job.total, "spares": spares}
            link.send({"type": "start", **what, **more})
        if self._heartbeat is None:
            self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heartbeat.start()
        hosts = {place.host for place in placed}
        self._disconnect([link for link in self.all if link.host not in hosts])

    def _beat(self) -> None:
        """Tell agents, in a thread, that their controller lives: its loop may have to wait, for a disk for instance."""
        while not self._ending.wait(HEARTBEAT_S):
            for link in tuple(self.all):
                is_quiet = self._lease_s is not None and self._looked - link.last_seen > QUIET_S
                if link.started and not link.lost and not link.waiting and not is_quiet:
                    link.send({"type": "alive", "at": time.monotonic()})

    @property
    def done(self) -> bool:
        """Whether every agent has ended its work, or is lost."""
        return all(link.done for link in self.all)

    def order(self, message: Message, within: float | None = None) -> None:
        """Tell all of them. `within`: seconds in which all ranks have to be gone after it."""
        if within is not None:
            end = time.monotonic() + within + KILL_S
            self._kill_by = end if self._kill_by is None else min(self._kill_by, end)
        for link in self.all:
            if not link.done:
                link.send(message)

    def events(self, wait_s: float) -> Iterator[tuple[HostConnection, Message | HostLost | str]]:
        """The events that arrive together, after waiting for at most `wait_s` seconds.

        A message of an agent, its loss, or a line for the user. A readable `wake` ends the wait without an event.
        """
        for link, event in self._ready(wait_s):
            if link is None or event is None:
                continue
            if isinstance(event, Exception) and link.done:  # after its work: the next attempt reaches it again
                self._forget(link)
            elif isinstance(event, EOFError):
                yield link, self._ended(link)
            elif isinstance(event, Exception):
                link.process.kill()
                yield link, self._lose(link, f"host {link.host}: {event}; it was left, and its ranks are killed")
            else:
                if isinstance(event, dict):
                    self._take_note(link, event)
                yield link, event["text"] if isinstance(event, dict) and event["type"] == "note" else event
        yield from self._silent(time.monotonic())

    def silence(self, now: float) -> float:
        """Seconds since any host sent something; 0 where no link can be cut, and while none has sent a word yet."""
        seen = [link.last_seen for link in self.all if link.ready and not link.lost]
        return 0.0 if self._lease_s is None or not seen else now - max(seen)

    def is_whole(self, now: float) -> bool:
        """Whether every host sends."""
        return not any(link.lost or now - link.last_seen > QUIET_S for link in self.all)

    def _take_note(self, link: HostConnection, message: Message) -> None:
        """Act on what concerns the link itself."""
        match message:
            case {"type": "done"}:
                link.done = True
            case {"type": "progress", "echo": sent}:
                link.echoed = max(link.echoed, sent)
                if time.monotonic() - link.echoed < COMMON_S:
                    link.leased = False
            case {"type": "first"}:
                for other in self.all:
                    if other is not link:
                        other.send(message)
            case _:
                pass

    def _ready(self, wait_s: float) -> Iterator[tuple[HostConnection, Message | str | Exception] | tuple[None, None]]:
        """The events that arrive together, after waiting for at most `wait_s` seconds; (None, None) for `wake`.

        A message, a line of stderr, EOFError if a program has closed its stdout, ValueError for an invalid message.
        """
        for link in self.all:
            blocked = link.order_fd in self._select.get_map()
            if link.waiting and not link.lost and not blocked:  # the pipe has had no room for its orders
                self._select.register(link.order_fd, selectors.EVENT_WRITE, link)
            elif blocked and not link.waiting:
                self._select.unregister(link.order_fd)
        for key, _ in self._select.select(wait_s):
            link: HostConnection | None = key.data
            if link is None:
                yield None, None
            elif key.fd not in self._select.get_map():  # lost by the event before
                continue
            elif key.fd == link.order_fd:
                link.send()
            else:
                yield from ((link, event) for event in self._read(link, key.fd))

    def _read(self, link: HostConnection, fd: int) -> Iterator[Message | str | Exception]:
        data = os.read(fd, CHUNK)
        if not data:
            self._select.unregister(fd)
        if fd == link.error_fd:
            for line in link.errors(data):
                yield line
                if not link.ready and ASKED.search(line):
                    yield UserError(f"a shell there runs what is meant for the agent ({line.strip()}); {ANOTHER_SHELL}")
        elif not data:
            if not link.lost:
                yield EOFError()
        else:
            link.last_seen = time.monotonic()
            link.ready = True
            try:
                for message in link.decoder.feed(data):
                    if "ask" in message:
                        raise UserError(f"it sends back what it is sent{_last_words(link)}: no program runs there")
                    yield message
            except ValueError as error:
                yield error

    def _ended(self, link: HostConnection) -> HostLost:
        """The agent ended by itself; its guard has killed its ranks (it holds the channel until it has)."""
        link.done = True
        self.order({"type": "kill", "after": 0}, within=0)  # the others, before anybody waits for an ssh that lingers
        code = link.wait(AGENT_END_S)
        if code is None:
            code = link.process.wait()
        if 128 < code < 128 + signal.NSIG:  # of a guard, whose agent ended by a signal
            code = 128 - code
        reason = f": {link.stderr[-1]}" if link.stderr else ""
        if not link.ready:
            text = f"the agent on host {link.host} did not start ({how(code)}){reason}"
            return self._lose(link, text, EXIT_PREFLIGHT, with_host=True, gone=code != self._backend.broken_link)
        if code == self._backend.broken_link:
            text = f"the connection to host {link.host} broke ({how(code)}){reason}; the agent there kills its ranks"
            return self._lose(link, text)
        text = f"the agent on host {link.host} ended before its ranks ({how(code)}){reason}; they were killed"
        return self._lose(link, text, 128 - code if code < 0 else EXIT_LOST, died=True, gone=True)

    def _lose(
        self,
        link: HostConnection,
        text: str,
        code: int = EXIT_LOST,
        *,
        with_host: bool = False,
        died: bool = False,
        gone: bool = False,
    ) -> HostLost:
        self._forget(link)
        gone_by = 0.0 if gone else link.last_seen + QUIET_S + self._limit_s(link) + GONE_S
        return HostLost(
            host=link.host,
            code=code,
            text=text,
            last_seen=link.last_seen,
            with_host=with_host,
            died=died,
            gone_by=gone_by,
        )

    def _limit_s(self, link: HostConnection) -> float:
        """Seconds that the host may be silent."""
        if not link.ready:
            return START_S
        return self._lease_s if link.leased and self._lease_s is not None else SILENT_S

    def _forget(self, link: HostConnection) -> None:
        link.done = link.lost = True
        for fd in (link.fd, link.error_fd, link.order_fd):
            if fd in self._select.get_map():
                self._select.unregister(fd)

    def _silent(self, now: float) -> Iterator[tuple[HostConnection, HostLost]]:
        """Those that have not spoken for too long, or whose ranks do not go."""
        stood_still = now - self._looked > STILL_S  # the launcher itself, and has not listened
        if stood_still:
            for link in self.all:
                link.last_seen += now - self._looked
            if self._kill_by is not None:
                self._kill_by += now - self._looked
        self._looked = now
        living = [link for link in self.all if not link.lost]
        if living and (stood_still or now - max(link.echoed for link in living) > COMMON_S):
            for link in living:
                link.leased = True
        for link in self.all:
            if link.done:
                continue
            limit = self._limit_s(link)
            if now - link.last_seen > limit:
                link.process.kill()
                text = (
                    f"host {link.host} has sent nothing for {limit:g} s (its network link is cut, or it is "
                    "overloaded or stuck)"
                )
                if link.leased and link.ready and len(self.all) > 1:
                    text = (
                        f"host {link.host} has sent nothing for {limit:g} s (--host-lease; nor had other hosts at "
                        "first: the link of this machine was cut)"
                    )
                yield link, self._lose(link, text, EXIT_LOST if link.ready else EXIT_PREFLIGHT, with_host=True)
            elif self._kill_by is not None and now > self._kill_by:
                ranks = ", ".join(map(str, link.ranks))
                text = f"host {link.host}: of the ranks {ranks}, not all are gone {KILL_S:g} s after they were killed"
                yield link, self._lose(link, f"{text} (a process that waits for a disk or a driver cannot be)")


ASKED = re.compile(r"\bask:[a-z]")
"""What a shell that reads a question as a command names in its error, without quotes and perhaps without braces."""
ANOTHER_SHELL = "a start-up file (~/.bashrc) must not start another shell where the login has no terminal"
HINTS = (
    ("cd:", "name a working directory that is there with --directory"),
    ("Permission denied (", "nobody answers a question here: use a key without a passphrase, or an ssh-agent"),
    ("Host key verification failed", "log in once by hand, and compare its key: it has to be in known_hosts"),
    ("Could not resolve hostname", "write names as ssh takes them; --procs-per-host says how many ranks a host has"),
    ("heard nothing from the launcher", "does a start-up file there (~/.bashrc) read its standard input?"),
    ("No module named", "install roxxel-dist there, or name the Python that has it with --python"),
    ("not found", "install roxxel-dist there, or name the Python that has it with --python"),
    ("No such file", "install roxxel-dist there, or name the Python that has it with --python"),
)
"""Words in the last line of a program that did not start, and what a person can do."""


def _why_it_ended(link: HostConnection) -> str:
    """Why a program ended that should have answered: the last line of its stderr, with what to do."""
    code = link.wait(PROBE_END_S)
    lines = [line.strip() for line in link.stderr if ": terminating, " not in line]  # of ssh, after what is wrong
    why = lines[-1] if lines else link.decoder.noise
    if not why:
        why = "nothing was said: does the login shell, or its start-up file (~/.bashrc), end before the program?"
    hint = next((hint for words, hint in HINTS if words in why), "")
    return f"{why}{'; ' if hint else ''}{hint} (code {'unknown' if code is None else code})"


def _last_words(link: HostConnection) -> str:
    """The last line of a program that runs and does not answer, for a message."""
    line = link.stderr[-1].strip() if link.stderr else link.decoder.noise
    return f" (its last line: {line})" if line else ""
