"""The hosts of a job while it runs: which shall join or leave it, by a list that is read again, and by requests."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.launcher.control import member_requests
from roxxel_dist.launcher.control.host_list import HostList
from roxxel_dist.launcher.control.member_requests import Request
from roxxel_dist.launcher.fleet.candidates import NUMBERS, Candidates, LookHistory, Running
from roxxel_dist.launcher.fleet.select_hosts import HostSelector, ReadyHosts
from roxxel_dist.launcher.fleet.wanted import Change, Stays, Wanted, change_to
from roxxel_dist.launcher.fleet.warm_hosts import WarmHosts
from roxxel_dist.launcher.job.backend import Backend, HostSource
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.outcome import HostLost
from roxxel_dist.launcher.transport.pool import HostPool

FILE_S, COMMAND_S = 1.0, 5.0
"""Between two looks at a list: a file, a command."""
AGAIN_S = 0.5
"""A list that has changed is read again so much later: it holds when it is the same then."""
SWAP_S = 10.0
"""A host that is to leave stays so long for the first look at those that are to join: one restart does for both."""
END_S = 2.0
DEPART_S = 120.0
"""A host that a system has asked to end is not used again sooner: clouds and schedulers end it within two minutes."""


class Inbox:
    """Reads the list of a job and the requests to it, in a thread: a file system, or a command, may be slow.

    Args:
        job: its list, if it has one, and its folder.
        hosts: the list as it is now.
        source: another list, in place of that of the job.
    """

    def __init__(self, job: JobSpec, hosts: Sequence[str], source: HostSource | None = None) -> None:
        self.lists: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        """Lists that hold, each another one than the one before."""
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Why a list cannot be read; each once, whatever its numbers: a client may say the time."""
        self.requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._folder = member_requests.folder_of(job.log_dir)
        self._source = source if job.hosts_from is None else HostList(job.hosts_from)
        self._held = list(hosts)
        self._seen: list[str] | None = None  # once, and another one than the one that holds
        self._known = set[str]()
        self._due = 0.0
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="membership", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._source is not None:
            self._source.end()
        self._thread.join(END_S)  # not for a file system that does not answer

    def _watch(self) -> None:
        member_requests.clear(self._folder)  # of a launch before
        while not self._end.wait(AGAIN_S):
            try:
                self._look()
            except Exception as error:  # the thread would end, and with it all joins
                self._fail(f"lists and requests could not be read: {error!r}")

    def _look(self) -> None:
        for request in member_requests.read(self._folder):
            self.requests.put(request)
        if self._source is not None and time.monotonic() >= self._due:
            self._read(self._source)

    def _fail(self, why: str) -> None:
        """Have people read this, once."""
        about = NUMBERS.sub("", why)
        if about not in self._known and not self._end.is_set():
            self._known.add(about)
            self.faults.put(why)

    def _read(self, source: HostSource) -> None:
        try:
            hosts = source.read()[0]
        except UserError as error:
            self._fail(str(error))
            hosts = self._held
        if hosts == self._seen:
            self._held = hosts
            self.lists.put(hosts)
        self._seen = hosts if hosts != self._held else None
        wait_s = FILE_S if source.is_file else COMMAND_S
        self._due = time.monotonic() + (AGAIN_S if self._seen else wait_s)


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Why the ranks are to save and leave, and how the job goes on then; for people."""

    why: str
    then: str


class Membership:
    """Which hosts a job shall have, from its start to its end; a context manager.

    Args:
        job: its options.
        backend: whether hosts can join, and which were there at the start.
        key: of the job's folders in memory.
    """

    def __init__(self, job: JobSpec, backend: Backend, key: str) -> None:
        self._job, self._backend, self._key = job, backend, key
        given = backend.hosts if backend.given is None else backend.given
        self._wanted = Wanted(given=tuple(given), listed=tuple(backend.listed))
        self._stays = Stays(since=dict.fromkeys(backend.listed, time.monotonic()))
        self._inbox = Inbox(job, backend.listed, backend.more_hosts) if backend.takes_hosts else None
        self._history = LookHistory(pause_s=job.limits.look_s)
        self._candidates: Candidates | None = None
        self._notes: list[str] = []
        self._reported = set[str]()
        self._leaves_since: float | None = None
        self._departs: dict[str, float] = {}  # until when a host is on its way out, by the launcher's clock

    def __enter__(self) -> Self:
        if self._inbox is not None:
            self._inbox.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._inbox is not None:
            self._inbox.__exit__(kind, error, tb)

    def attach(self, selector: HostSelector) -> None:
        """Which hosts the job has is known there."""
        self._selector = selector

    def newcomers(self) -> Sequence[str]:
        """Hosts that the job shall have, and has not: it waits for some."""
        self._receive()
        self._stays = self._stays.forgiven()
        return self._change().newcomers

    @contextmanager
    def attempt(self, ready: ReadyHosts, pool: HostPool, port: int | None) -> Iterator[None]:
        """While these hosts work: look at those that are lost, and at newcomers.

        `pool` has the agents of the job, and those of hosts that can join at the end; `port` is of the next attempt.
        """
        selector = self._selector
        running = Running(
            hosts=selector.working,
            port=port,
            accepted=selector.warnings,
            plan=selector.plan,
            grows_with=selector.grows_with,
            devices=selector.devices,
            machines=selector.machines,
        )
        self._lost = ready.lost
        with WarmHosts(self._job, self._backend, self._key) as warm:
            with Candidates(self._job, self._backend, running, self._history, warm) as self._candidates:
                self._notes = self.notes()  # people read them once the attempt looks
                yield
            warm.hand_over(pool)
        self._notes += self._candidates.notes()

    def notes(self) -> list[str]:
        """Follow lists and requests; what people are to know of it, each once."""
        self._receive()
        selector, change = self._selector, self._change()
        if (candidates := self._candidates) is not None:
            members = {*selector.members} & {*self._hosts}
            now = time.monotonic()
            lost = [host for host in self._lost if host in members and now >= self._departs.get(host, 0.0)]
            candidates.watch(lost, change.newcomers)
            if candidates.spares and not candidates.ready:  # else `follow` takes them in, behind these
                selector.change(joins=candidates.spares)
            self._notes += candidates.notes()
        if idle := [host for host in change.leaves if host not in selector.working]:
            selector.change(leaves=idle)
            self._note(f"{', '.join(idle)} left the job; no rank ran there")
        if change.kept:
            self._note(
                f"{', '.join(change.kept)} cannot leave the job yet: of the {len(selector.there)} hosts that are "
                f"there, at least {selector.least} stay (--min-hosts)"
            )
        notes, self._notes = self._notes, []
        return notes

    def drain(self, *, joins_too: bool = True) -> Drain | None:
        """Why the ranks are to save and leave now, if they are. `joins_too`: also for hosts that come."""
        joins, leaves = self._due(None)
        joins = joins if joins_too or leaves else ()
        if not joins and not leaves:
            self._leaves_since = None
            return None
        now = time.monotonic()
        self._leaves_since = self._leaves_since or now
        is_looking = self._candidates is not None and self._candidates.is_first_look()
        if not joins and is_looking and now < self._leaves_since + SWAP_S:
            return None
        back = [host for host in joins if host in self._selector.members]
        new = [host for host in joins if host not in back]
        groups = ((back, "can be used again"), (new, "can join the job"), (leaves, "shall leave the job"))
        with_them = [f"with {', '.join(joins)}"] * bool(joins) + [f"without {', '.join(leaves)}"] * bool(leaves)
        return Drain(
            why="; ".join(f"{', '.join(hosts)} {what}" for hosts, what in groups if hosts),
            then=f"the job continues {' and '.join(with_them)}",
        )

    def follow(self, lost: HostLost | None) -> tuple[str, ...]:
        """After an attempt: change the hosts of the job; returns those that it takes in. `lost`: one that is gone."""
        joins, leaves = self._due(lost)
        spares, wanted = () if self._candidates is None else self._candidates.spares, self._hosts
        self._selector.change((*joins, *(host for host in spares if host in wanted)), leaves)
        self._candidates, self._leaves_since = None, None
        return joins

    def departs(self, hosts: Sequence[str]) -> None:
        """These hosts are about to end: they are not looked at for a while, although they answer."""
        self._departs.update(dict.fromkeys(hosts, time.monotonic() + DEPART_S))

    def grown(self, hosts: Sequence[str], *, failed: bool) -> None:
        """These hosts were taken in, as `LookHistory.grown`."""
        self._history.grown(hosts, failed=failed)

    @property
    def _hosts(self) -> tuple[str, ...]:
        """The hosts that the job shall have now."""
        return self._wanted.without(self._stays.held(time.monotonic()))

    def _due(self, lost: HostLost | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Hosts to take in, and working ones that shall leave, without one that is lost."""
        selector, wanted = self._selector, self._hosts
        ready = () if self._candidates is None else self._candidates.ready
        joins = tuple(host for host in ready if host in wanted)
        gone = {lost.host} if lost is not None and lost.with_host else set[str]()
        there = {*selector.there, *joins} - gone
        members = [*selector.members, *(host for host in joins if host not in selector.members)]
        change = change_to(wanted, members, there, selector.least)
        return joins, tuple(host for host in change.leaves if host in selector.working)

    def _change(self) -> Change:
        selector = self._selector
        return change_to(self._hosts, selector.members, selector.there, selector.least)

    def _receive(self) -> None:
        """Take what has come: lists, and requests, which get their answers."""
        if (inbox := self._inbox) is None:
            return
        while not inbox.faults.empty():
            self._note(f"{inbox.faults.get()}; the list stays as it was")
        while not inbox.lists.empty():
            hosts = inbox.lists.get()
            try:
                self._backend.check_joining(hosts)
            except UserError as error:
                self._note(f"--hosts-from: {error}; the list stays as it was")
                continue
            before = {*self._wanted.hosts}
            self._wanted, self._stays = self._wanted.with_list(hosts), self._stays.with_list(hosts, time.monotonic())
            self._history.forget({*self._wanted.hosts} ^ before)
            self._note_held()
            self._reported = {text for text in self._reported if "cannot leave" not in text}
        while not inbox.requests.empty():
            request = inbox.requests.get()
            member_requests.answer(request, *self._answer(request))

    def _note_held(self) -> None:
        for host in {*self._wanted.hosts} - {*self._hosts}:
            self._note(
                f"host {host} left the list {self._stays.short[host]} times soon after it came; it is taken in when it "
                f"has stayed there for {self._stays.joins_at(host) - self._stays.since[host]:.0f} s, or by `join`"
            )

    def _answer(self, request: Request) -> tuple[bool, str]:
        """Do what is asked, if it can be done; whether it is, and the words for it."""
        try:
            self._backend.check_joining(request.hosts)
        except UserError as error:
            return False, str(error)
        return self._join(request.hosts) if request.joins else self._leave(request.hosts)

    def _join(self, hosts: Sequence[str]) -> tuple[bool, str]:
        members = {*self._selector.members} & {*self._hosts}
        new = [host for host in hosts if host not in members]
        if not new:
            return True, f"{', '.join(hosts)} is in the job already"
        self._wanted = self._wanted.with_join(new)
        self._history.forget(new)
        if self._candidates is not None:
            self._candidates.look_now(new)
        return True, f"{', '.join(new)} is checked now, and joins the job when it passes"

    def _leave(self, hosts: Sequence[str]) -> tuple[bool, str]:
        selector, names = self._selector, ", ".join(hosts)
        if strange := [host for host in hosts if host not in self._wanted.hosts]:
            return False, f"{', '.join(strange)} is no host of the job: it has {', '.join(self._wanted.hosts)}"
        wanted = self._wanted.with_leave(hosts)
        if change_to(wanted.hosts, selector.members, selector.there, selector.least).kept or not wanted.hosts:
            return False, (
                f"{names} cannot leave: of the {len(selector.there)} hosts that are there, at least {selector.least} "
                "stay (--min-hosts); let others join before"
            )
        self._wanted = wanted
        if not {*hosts} & {*selector.working}:
            return True, f"{names} leaves the job; no rank runs there"
        return True, f"the ranks save, and the job continues without {names}"

    def _note(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._notes.append(text)
