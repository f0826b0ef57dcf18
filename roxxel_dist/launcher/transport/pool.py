"""The links to the programs on the hosts: orders and heartbeats down, messages up, and which host is silent."""

import os
import secrets
import selectors
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence, Set
from typing import Self

from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Placement
from roxxel_dist.launcher.job.spec import JobSpec, Limits
from roxxel_dist.launcher.output import info
from roxxel_dist.launcher.policy.outcome import HostLost, how
from roxxel_dist.launcher.transport.connection import (
    ANOTHER_SHELL,
    ASKED,
    CHUNK,
    HostConnection,
    question_in,
    shorten,
)
from roxxel_dist.process.exit_codes import EXIT_NOT_STARTED, EXIT_PREFLIGHT, OK_CODES, UserError

PROBE_END_S = 2.0
"""How long a program without ranks may take to end."""
LOOK_S = 0.05
"""Seconds between two looks at clients that are about to end."""
EXIT_HOST_LOST = 137
"""What an agent without a code of its own counts as: its ranks were killed."""


def agent_words(backend: Backend, limits: Limits) -> tuple[str, ...]:
    """The module of the agent and its arguments, for `Backend.start`."""
    timeout = (f"{limits.silent_s:g}",) if backend.is_remote else ()
    return ("roxxel_dist.launcher.agent.agent", *timeout)


def _ranks_of(job: JobSpec, place: Placement) -> Message:
    """The part of an order that says which ranks a host has."""
    ranks = [{"rank": rank, "env": dict(env)} for rank, env in place.ranks.items()]
    return {"command": job.command, "ranks": ranks}


class HostPool:
    """An agent on each of some hosts. Use it as a context: at its end the agents, and all that they held, are gone.

    Agents outlive the attempts of a job: those that are not lost are asked again, and start ranks again.

    Args:
        backend: starts the agents.
        wake: a descriptor to be waited for too: `events` says when it can be read.
        limits: of the job.
    """

    def __init__(self, backend: Backend, wake: int | None = None, limits: Limits | None = None) -> None:
        self._by_host: dict[str, HostConnection] = {}
        self.all: Collection[HostConnection] = self._by_host.values()
        """In the order of their start."""
        self.backend: Backend = backend
        self.limits: Limits = limits or Limits()
        self._words = agent_words(backend, self.limits)
        self._select = selectors.DefaultSelector()
        if wake is not None:
            self._select.register(wake, selectors.EVENT_READ)
        self._heartbeat: threading.Thread | None = None
        self._ending = threading.Event()
        self._at_work: set[HostConnection] = set()
        """Those from which something is expected in this attempt."""
        self._leaving: dict[HostConnection, float] = {}
        """Those at work whose program has ended, and until when their client may stay."""
        self._backlog: set[HostConnection] = set()
        """Those with orders that wait for room; a heartbeat may add one, from its thread."""
        self._kill_at: float | None = None
        """When the ranks are killed, as it was ordered."""
        self._kill_by: float | None = None
        self._looked = 0.0
        self._lease_s: float | None = None
        self.woken: bool = False
        """Whether `wake` could be read when it was looked at last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        if self._heartbeat is not None:
            self._heartbeat.join()
        self._select.close()
        self._close(self.all, PROBE_END_S if self._heartbeat is None else self.limits.agent_end_s)

    def _close(self, links: Collection[HostConnection], limit_s: float) -> None:
        """Hang up on programs, and wait for the ends of all of them together."""
        for link in links:
            link.hang_up()
        end = time.monotonic() + limit_s
        for link in links:
            link.read_to_end(end)
        linger = min(end, time.monotonic() + self.limits.linger_s)
        for link in links:
            link.close(max(0.0, (end if link.gone is None else linger) - time.monotonic()))

    def is_connected(self, host: str) -> bool:
        """Whether there is a program on a host."""
        return host in self._by_host

    def are_connected(self, hosts: Collection[str]) -> bool:
        """Whether any of these hosts still sends."""
        now = time.monotonic()
        links = [self._by_host[host] for host in hosts if host in self._by_host]
        return any(not link.lost and now - link.last_seen <= self.limits.silent_s for link in links)

    def is_woken(self, wait_s: float) -> bool:
        """Take what comes within so many seconds while no rank runs; whether `wake` was among it."""
        for link, event in self.ready(wait_s):
            if isinstance(event, Exception):
                self.forget(link)
        return self.woken

    def connect(self, host: str) -> HostConnection:
        """The program on a host, which is started where it does not run. Raises OSError where it cannot be."""
        if host in self._by_host:
            return self._by_host[host]
        link = HostConnection(host=host, process=self.backend.start(host, *self._words), limits=self.limits)
        self._add(link)
        return link

    def _add(self, link: HostConnection) -> None:
        self._by_host[link.host] = link
        link.backlog = self._backlog
        link.send()  # on with what waits
        for fd in (link.fd, link.error_fd):
            self._select.register(fd, selectors.EVENT_READ, link)

    def _unregister(self, link: HostConnection) -> None:
        self._backlog.discard(link)
        for fd in (link.fd, link.error_fd, link.order_fd):
            if fd in self._select.get_map():
                self._select.unregister(fd)

    def reach_anew(self) -> None:
        """Let go of hosts that were lost, or have not answered: the next question, or start, connects to them again."""
        while events := list(self.ready(0)):
            for link in (link for link, event in events if isinstance(event, Exception)):
                self.forget(link)
        self.disconnect([link for link in self.all if link.lost])

    def disconnect(self, links: Sequence[HostConnection]) -> None:
        """End these programs; the next question, or start, connects to their hosts again."""
        for link in links:
            self.forget(link)
            del self._by_host[link.host]
        self._close(links, self.limits.agent_end_s)

    def start(
        self, job: JobSpec, placed: Sequence[Placement], key: str, spares: str, address: str = "127.0.0.1"
    ) -> HostLost | None:
        """Have an agent on each host start its ranks; those of other hosts end.

        Returns the host whose agent cannot be reached from here, if there is one: then nothing is started.

        `key` is that of the job's folders in memory, `spares` the job's --warm-spares, or off. `address` is the first
        host's, as all others reach it.
        """
        host = placed[0].host
        try:
            self._begin_heartbeat()
            for host in (place.host for place in placed):
                self.connect(host)
        except (OSError, RuntimeError) as error:  # no process, or no thread, can be had; one may be in a moment
            return HostLost(host=host, code=EXIT_NOT_STARTED, text=f"host {host}: no agent could be started: {error}")
        self._lease_s = max(job.host_lease, self.limits.silent_s) if self.backend.is_remote else None
        lease = {"limit": self._lease_s, "hosts": len(placed), "token": secrets.token_hex(16), "address": address}
        self._looked = time.monotonic()  # no heartbeat was expected since the last question
        self._kill_at = self._kill_by = None
        for index, place in enumerate(placed):
            link = self.connect(place.host)
            link.ranks, link.last_seen, link.ready = list(place.ranks), time.monotonic(), link.started
            link.unfinished = {*place.ranks}
            link.started, link.done, link.echoed, link.leased = True, False, link.last_seen, False
            self._at_work.add(link)
            more: Message = {"key": key} if job.is_restartable else {}
            if self._lease_s is not None:
                more["lease"] = {**lease, "index": index}
            what = {**_ranks_of(job, place), "total": job.total, "spares": spares}
            link.send({"type": "start", **what, **more})
        hosts = {place.host for place in placed}
        self.disconnect([link for link in self.all if link.host not in hosts])
        return None

    def warm(self, job: JobSpec, placed: Sequence[Placement], key: str) -> None:
        """Have an agent on each of these hosts start spares for ranks that it may be told to start later."""
        self._looked = time.monotonic()
        for place in placed:
            link = self.connect(place.host)
            link.started = True
            self._end_work(link)
            link.echoed = link.last_seen = time.monotonic()
            link.send({"type": "warm", **_ranks_of(job, place), "key": key, "spares": job.warm_spares})
        self._begin_heartbeat()

    def adopt(self, other: "HostPool", hosts: Collection[str]) -> None:
        """Take over the programs that another pool has on these hosts, in the place of own ones there."""
        names = {*hosts}
        links = [link for link in other.all if link.host in names and not link.lost]
        for link in links:
            other.release(link)
        self.disconnect([self._by_host[link.host] for link in links if link.host in self._by_host])
        for link in links:
            self._add(link)

    def release(self, link: HostConnection) -> None:
        """Have no more to do with a program."""
        del self._by_host[link.host]
        self._end_work(link)
        self._unregister(link)

    def _begin_heartbeat(self) -> None:
        if self._heartbeat is None:
            heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            heartbeat.start()  # raises RuntimeError where there is no room for one
            self._heartbeat = heartbeat

    def _beat(self) -> None:
        """Tell agents, in a thread, that their controller lives: its loop may have to wait, for a disk for instance."""
        said = ""
        while not self._ending.wait(self.limits.heartbeat_s):
            for link in tuple(self.all):
                try:
                    is_quiet = self._lease_s is not None and self._looked - link.last_seen > self.limits.quiet_s
                    if link.started and not link.lost and not link.waiting and not is_quiet:
                        link.send({"type": "alive", "at": time.monotonic()})
                except Exception as error:  # without heartbeats every agent would end its ranks
                    if repr(error) != said:
                        said = repr(error)
                        info(f"no heartbeat was sent to host {link.host} ({said}); the next one is sent in any case")

    @property
    def at_work(self) -> Set[HostConnection]:
        """The agents that have not ended their work, and are not lost."""
        return self._at_work

    def order(self, message: Message, within: float | None = None) -> None:
        """Tell all that are at work. `within`: seconds in which all ranks have to be gone after it."""
        if within is not None:
            end = time.monotonic() + within + self.limits.kill_s
            self._kill_by = end if self._kill_by is None else min(self._kill_by, end)
        for link in self._at_work - self._leaving.keys():
            link.send(message)

    def kill(self, after: float = 0) -> None:
        """Have all ranks killed in so many seconds: an order to each host, and another one only for an earlier moment.

        The end of each rank asks for it, also of those that it has ended.
        """
        at = time.monotonic() + after
        if self._kill_at is None or at < self._kill_at:
            self._kill_at = at
            self.order({"type": "kill", "after": after}, within=after)

    def events(self, wait_s: float) -> Iterator[tuple[HostConnection, Message | HostLost | str]]:
        """The events that arrive together, after waiting for at most `wait_s` seconds, or until `wake` can be read.

        A message of an agent, its loss, or a line for the user.
        """
        for link, event in self.ready(min(wait_s, LOOK_S) if self._leaving else wait_s):
            self._take_pause(time.monotonic())
            if isinstance(event, Exception) and link.done:  # after its work: the next attempt reaches it again
                self.forget(link)
            elif isinstance(event, EOFError):
                self._await_client(link)
            elif isinstance(event, Exception):
                link.process.kill()
                yield link, self._lose(link, f"host {link.host}: {event}; it was left, and its ranks are killed")
            else:
                if isinstance(event, dict):
                    self._take_note(link, event)
                yield link, event
        now = time.monotonic()
        for link, end in tuple(self._leaving.items()):
            if now >= end or link.process.poll() is not None:
                yield link, self._ended(link)
        if now - self._looked >= self.limits.heartbeat_s / 4:  # a clock: each look is one at all hosts
            yield from self._check_timeouts(now)

    def silence(self, now: float) -> float:
        """Seconds since any host sent something; 0 where no link can be cut, and while none has sent a word yet."""
        seen = [link.last_seen for link in self.all if link.ready and not link.lost]
        return 0.0 if self._lease_s is None or not seen else now - max(seen)

    def is_whole(self, now: float) -> bool:
        """Whether every host sends."""
        return not any(link.lost or now - link.last_seen > self.limits.quiet_s for link in self.all)

    def _take_note(self, link: HostConnection, message: Message) -> None:
        """Act on what concerns the link itself."""
        match message:
            case {"type": "progress", "echo": sent}:
                link.echoed = max(link.echoed, sent)
                if time.monotonic() - link.echoed < self.limits.common_s:
                    link.leased = False
            case {"type": "exit", "rank": rank, "code": code} if code in OK_CODES:
                link.unfinished.discard(rank)
            case {"type": "done"}:
                self._end_work(link)
            case {"type": "first"}:
                for other in self.all:
                    if other is not link:
                        other.send(message)
            case _:
                pass

    def ready(self, wait_s: float) -> Iterator[tuple[HostConnection, Message | str | Exception]]:
        """The events that arrive together, after waiting for at most `wait_s` seconds, or until `wake` can be read.

        A message, a line of stderr, EOFError if a program has ended, or closed its stdout, ValueError for an invalid
        message.
        """
        self.woken = False
        for link in tuple(self._backlog):
            if not link.lost and link.order_fd not in self._select.get_map():
                self._select.register(link.order_fd, selectors.EVENT_WRITE, link)
        for key, _ in self._select.select(wait_s):
            link: HostConnection | None = key.data
            if link is None:
                self.woken = True
            elif key.fd not in self._select.get_map():  # lost by the event before
                continue
            elif key.fd == link.order_fd:
                link.send()
                if not link.waiting:
                    self._select.unregister(link.order_fd)
            else:
                for event in self._read(link, key.fd):
                    yield link, event

    def _read(self, link: HostConnection, fd: int) -> Iterator[Message | str | Exception]:
        data = os.read(fd, CHUNK)
        if not data:
            self._select.unregister(fd)
        asked = "" if link.ready else question_in(data)
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
            try:
                yield from link.messages(data)
            except ValueError as error:
                yield error
            if link.gone is not None and not link.lost:  # its client may stay, whatever it waits for
                yield EOFError()
        if asked and not link.lost:
            yield UserError(f"it waits for an answer that nobody gives here ({asked}): have it ask nothing")

    def _await_client(self, link: HostConnection) -> None:
        """The agent ended by itself; its client, such as ssh, may stay for a moment, and has its exit code."""
        if link not in self._leaving:
            wait_s = self.limits.agent_end_s if link.gone is None else self.limits.linger_s
            self._leaving[link] = time.monotonic() + wait_s
            if link.unfinished:
                self.kill()  # the others: they need not wait for it

    def _ended(self, link: HostConnection) -> HostLost:
        """The agent ended by itself; its guard has killed its ranks (it holds the channel until it has)."""
        code = link.end(0.0)
        reason = f": {shorten(link.last_error)}" if link.last_error else ""
        is_broken = link.gone is None and self.backend.is_broken_link(code)
        code = code if link.gone is None else link.gone
        if 128 < code < 128 + signal.NSIG:  # of a guard, whose agent ended by a signal
            code = 128 - code
        if not link.ready:
            text = f"the agent on host {link.host} did not start ({how(code)}){reason}"
            return self._lose(link, text, EXIT_PREFLIGHT, with_host=True, gone=not is_broken)
        if is_broken:
            text = f"the connection to host {link.host} broke ({how(code)}){reason}; the agent there kills its ranks"
            return self._lose(link, text, by_link=True)
        text = f"the agent on host {link.host} ended before its ranks ({how(code)}){reason}; they were killed"
        return self._lose(link, text, 128 - code if code < 0 else EXIT_HOST_LOST, died=True, gone=True)

    def _lose(
        self, link: HostConnection, text: str, code: int = EXIT_HOST_LOST, *, gone: bool = False, **more: bool
    ) -> HostLost:
        self.forget(link)
        seen = link.last_seen
        gone_by = 0.0 if gone else seen + self.limits.quiet_s + self._limit_s(link) + self.limits.gone_s
        return HostLost(host=link.host, code=code, text=text, last_seen=seen, gone_by=gone_by, **more)

    def _limit_s(self, link: HostConnection) -> float:
        """Seconds that the host may be silent."""
        if not link.ready:
            return self.limits.start_s
        return self._lease_s if link.leased and self._lease_s is not None else self.limits.silent_s

    def forget(self, link: HostConnection) -> None:
        """Take no more from a program: it is lost."""
        self._end_work(link)
        link.lost = True
        self._unregister(link)

    def _end_work(self, link: HostConnection) -> None:
        link.done = True
        self._at_work.discard(link)
        self._leaving.pop(link, None)

    def _take_pause(self, now: float) -> None:
        """Begin the clocks again where the launcher itself stood still; before it acts on what came meanwhile."""
        pause = now - self._looked
        if pause <= self.limits.still_s:
            return
        self._looked = now
        for link in self.all:
            link.last_seen = min(now, link.last_seen + pause)
            link.leased = link.leased or not link.lost
        if self._kill_by is not None:
            self._kill_by += pause

    def _check_timeouts(self, now: float) -> Iterator[tuple[HostConnection, HostLost]]:
        """Declare hosts lost whose agent was silent beyond its limit, or whose killed ranks are not gone in time."""
        self._take_pause(now)
        self._looked = now
        living = [link for link in self.all if not link.lost]
        if living and now - max(link.echoed for link in living) > self.limits.common_s:
            for link in living:
                link.leased = True
        for link in self._at_work - self._leaving.keys():
            limit = self._limit_s(link)
            if now - link.last_seen > limit:
                link.process.kill()
                who, code = f"host {link.host}", EXIT_HOST_LOST
                text = f"{who} has sent nothing for {limit:g} s (its network link is cut, or it is overloaded or stuck)"
                if link.leased and link.ready and len(self.all) > 1:
                    text = f"{who} has sent nothing for {limit:g} s (--host-lease; nor had other hosts at first: the "
                    text += "link of this machine was cut)"
                yield link, self._lose(link, text, code if link.ready else EXIT_PREFLIGHT, with_host=True)
            elif self._kill_by is not None and now > self._kill_by:
                ranks = ", ".join(map(str, link.ranks))
                text = f"host {link.host}: of the ranks {ranks}, not all are gone {self.limits.kill_s:g} s after they "
                text += "were killed"
                yield link, self._lose(link, f"{text} (a process that waits for a disk or a driver cannot be)")
