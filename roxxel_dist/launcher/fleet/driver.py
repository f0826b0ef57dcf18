"""Carries out what a fleet asks for: looks at hosts, and warm-ups; in a thread of its own while ranks run.

The controller's thread alone changes the fleet: whatever other threads find, or people ask, it takes from one queue.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.state import Fleet
from roxxel_dist.launcher.fleet.step import DEPART_S, step
from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import placements, working_hosts
from roxxel_dist.launcher.output import Console
from roxxel_dist.launcher.policy.outcome import HostLost
from roxxel_dist.launcher.preflight.run import (
    PreflightReport,
    check_job_hosts,
    checks_of,
    forget_failures,
    remember_failure,
)
from roxxel_dist.launcher.transport.connection import HostConnection
from roxxel_dist.launcher.transport.pool import HostPool
from roxxel_dist.launcher.transport.questions import Interrupted
from roxxel_dist.process.interrupt import SignalPipe

TEND_S = 0.5
"""Seconds between two looks at the agents of hosts that can be used."""
WAIT_S = 0.25
FOLLOW_S = 0.05
Reply = Callable[[Sequence[events.Do]], None]


class NotReadyError(Exception):
    """The hosts, or too few of them, can take the job. The message is for people, a line a reason.

    `unreachable`: some do not answer, so that other hosts would do.
    """

    def __init__(self, text: str, *, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class StoppedError(Exception):
    """The launcher was asked to stop; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Driver:
    """The fleet of a job that runs.

    Agents of the previous attempt are asked over their open connections; only a lost host gets a new one.

    Args:
        fleet: before the first attempt, and what is to be done then.
        backend: reaches the hosts.
        pool: has the agents of the job.
        key: of the job's folders in memory.

    Attributes:
        happened: what other threads have found, or people have asked, in order, and what takes the things to do then.
    """

    def __init__(
        self,
        fleet: tuple[Fleet, Sequence[events.Do]],
        backend: Backend,
        signals: SignalPipe,
        screen: Console,
        pool: HostPool,
        key: str = "",
    ) -> None:
        self.fleet: Fleet = fleet[0]
        self._backend, self._signals, self._screen, self._pool, self._key = backend, signals, screen, pool, key
        self.happened: queue.SimpleQueue[tuple[events.Event, Reply]] = queue.SimpleQueue()
        job = self.fleet.given
        self._devices = checks_of(job, backend.hosts, len(working_hosts(job, backend.hosts)))
        self._notes: list[str] = []
        self._thread: LookThread | None = None
        self._begin(fleet[1])

    def step(self, event: events.Event) -> list[events.Do]:
        """Let something happen; returns what is to be done, of which looks and warm-ups are begun."""
        self.fleet, todo = step(self.fleet, event, time.monotonic())
        self._begin(todo)
        return todo

    def _follow(self) -> None:
        """Let happen what other threads have found, or people have asked."""
        while not self.happened.empty():
            event, reply = self.happened.get()
            reply(self.step(event))

    def _begin(self, todo: Sequence[events.Do]) -> None:
        for do in todo:
            match do:
                case events.Say(text=text):
                    self._notes.append(text)
                case events.Look() | events.Warm() if self._thread is not None:
                    self._thread.work.put(do)
                case _:
                    pass

    def say(self) -> None:
        """Show people what they are to know."""
        for text in self._notes:
            self._screen.info(text)
        self._notes.clear()

    def select(self, gone_by: Mapping[str, float]) -> events.Start:
        """The hosts that start the next attempt, when the ranks of lost ones have ended (`Begin.gone_by`).

        Raises:
            NotReadyError: there are too few.
            StoppedError: the launcher was asked to stop.
        """
        todo = self.step(events.Begin(gone_by=gone_by))
        while True:
            self.say()
            match todo[-1]:
                case events.Look() as look:
                    report = self._look_before_start(look)
                    trusted = tuple(link.host for link in self._pool.all if link.ranks)
                    todo = self.step(events.Answered(report=report, trusted=trusted))
                case events.Wait(seconds=seconds):
                    self.pause(seconds)
                    self._follow()
                    todo = self.step(events.Tick())
                case events.Start() as start:
                    self.pause(start.wait_s)
                    return start
                case events.GiveUp(text=text, unreachable=unreachable):
                    raise NotReadyError(text, unreachable=unreachable)
                case do:
                    raise AssertionError(do)

    def pause(self, seconds: float) -> None:
        """Wait while no rank runs, and take what agents say meanwhile. Raises StoppedError."""
        end = left = time.monotonic() + seconds
        while left > 0:
            left = end - time.monotonic()
            if self._pool.is_woken(max(0.0, min(left, 1.0))) and (numbers := self._signals.take()):
                raise StoppedError(numbers[0])

    def await_end(self, hosts: Collection[str]) -> None:
        """Wait for the end of hosts that a system has asked to end, and that the job needs. Raises StoppedError."""
        end = time.monotonic() + DEPART_S
        while self._pool.are_connected(hosts) and time.monotonic() < end:
            self.pause(0.25)

    def _look_before_start(self, look: events.Look) -> PreflightReport:
        report = None
        while report is None:
            self._pool.reach_anew()
            try:
                report = self.look(look, self._pool)
            except Interrupted:
                if numbers := self._signals.take():
                    raise StoppedError(numbers[0]) from None
        for host, why in report.suspects.items():
            remember_failure(self._backend, host, why)
        if passed := self._devices.passed:
            forget_failures(self._backend, passed)
            passed.clear()
        return report

    def look(self, look: events.Look, pool: HostPool) -> PreflightReport:
        """Ask hosts over the connections of a pool."""
        self._devices.pending.update(look.check)
        return check_job_hosts(
            look.assignment.job,
            self._backend,
            look.assignment.hosts,
            port=look.port,
            pool=pool,
            busy=look.busy,
            devices=self._devices,
            known=look.known,
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Carry out looks and warm-ups while ranks run. At the end the job's pool has agents on hosts that join."""
        if self.fleet.is_fixed:
            yield
            return
        with HostPool(self._backend, limits=self.fleet.given.limits) as waiting:
            thread = self._thread = LookThread(self, self._backend, waiting, self._key)
            try:
                thread.start()
            except RuntimeError as error:
                self._thread = None
                self._notes.append(f"no other host is looked at in this attempt: {error} (ulimit -u, pids.max)")
            try:
                yield
            finally:
                self._thread = None
                has_ended = thread.end()
                self._follow()
            if has_ended:
                self._pool.adopt(waiting, [link.host for link in waiting.all])
            else:
                self._notes.append(
                    "a look at other hosts does not end, for its client does not start: it is left alone"
                )

    def tick(self) -> None:
        """Follow the other threads and the clock, while ranks run."""
        self._follow()
        self.step(events.Tick())
        self.say()

    def drain(self, *, joins_too: bool = True) -> events.Drain | None:
        """The reason why the ranks are to save and leave now; None: they stay. `joins_too`: for hosts that come too."""
        todo = self.step(events.CanDrain(joins_too=joins_too))
        return next((do for do in todo if isinstance(do, events.Drain)), None)


class LookThread(threading.Thread):
    """Carries out the looks and warm-ups of one attempt, one after the other.

    Args:
        driver: takes what is found.
        backend: reaches the hosts.
        waiting: gets the agents that wait for the next attempt.
        key: of the job's folders in memory.

    Attributes:
        work: what is to be carried out; None wakes it at its end.
    """

    def __init__(self, driver: Driver, backend: Backend, waiting: HostPool, key: str) -> None:
        super().__init__(name="fleet", daemon=True)
        self._driver, self._backend, self._waiting, self._key = driver, backend, waiting, key
        self.work: queue.SimpleQueue[events.Look | events.Warm | None] = queue.SimpleQueue()
        self._wake, self._woken = os.pipe()
        self._warmed = set[str]()
        self._is_over = False

    def end(self) -> bool:
        """Break off what goes on; whether the thread has ended.

        One that starts a client whose file system does not answer cannot be ended, and says no more.
        """
        self._is_over = True
        os.write(self._woken, b"\0")
        self.work.put(None)
        if self.is_alive():
            self.join(self._waiting.limits.agent_end_s)
        if not self.is_alive():
            os.close(self._wake)
            os.close(self._woken)
        return not self.is_alive()

    def run(self) -> None:
        """Work until the end."""
        while not self._is_over:
            do = self._next()
            try:
                if do is not None:
                    self._report(self._answer(do) if isinstance(do, events.Look) else self._warm_up(do))
            except Interrupted:
                return
            except Exception as error:  # the thread would end, and with it all looks
                self._note_mistake(do.candidates if do is not None else (), error)
            try:
                if self._waiting.all and self.work.empty():
                    self._tend()
            except Exception as error:
                self._note_mistake(tuple(link.host for link in self._waiting.all), error)

    def _next(self) -> events.Look | events.Warm | None:
        try:
            return self.work.get(timeout=TEND_S if self._waiting.all else None)
        except queue.Empty:
            return None

    def _report(self, event: events.Event) -> None:
        """Let something happen, in the controller's thread, and wait until that has followed it."""
        if self._is_over:
            return
        followed = threading.Event()
        self._driver.happened.put((event, lambda todo: followed.set()))
        while not self._is_over and not followed.wait(FOLLOW_S):
            continue

    def _note_mistake(self, hosts: tuple[str, ...], error: Exception) -> None:
        self._report(events.Mistake(hosts=hosts, error=repr(error)))

    def _answer(self, look: events.Look) -> events.Answered:
        with HostPool(self._backend, self._wake, self._driver.fleet.given.limits) as pool:
            report = self._driver.look(look, pool)
            if report.passed and self._driver.fleet.given.warm_spares != "off" and not self._is_over:
                self._waiting.adopt(pool, [host for host in look.keep if not self._waiting.is_connected(host)])
        return events.Answered(report=report)

    def _warm_up(self, warm: events.Warm) -> events.Warmed:
        """Have agents start spares for the ranks that they would have, and wait for the spares' imports."""
        plan, job = warm.plan, self._driver.fleet.given
        self._events(0)  # of the others; from here on silence counts
        placed = placements(plan.job, plan.hosts, "", self._backend.environment, visible=warm.report.visible)
        placed = [place for place in placed if self._waiting.is_connected(place.host)]
        placed = [place for place in placed if place.host not in self._warmed]
        self._waiting.warm(plan.job, placed, self._key)
        pending, failed = {place.host for place in placed}, dict[str, str]()
        self._warmed |= pending
        end = time.monotonic() + job.limits.warm_s
        while pending and time.monotonic() < end:
            if self._is_over:
                raise Interrupted
            for link, event in self._events(WAIT_S):
                match event:
                    case {"type": "warm", "why": str(why)}:
                        pending.discard(link.host)
                        failed.update({link.host: why} if why else {})
                    case str() | {"type": "note"}:
                        said = event if isinstance(event, str) else event["text"]
                        self._report(events.Say(text=f"{link.host}: {said}"))
                    case _:
                        pass
            lost = {host: why for host, why in self._lost().items() if host in pending}
            failed |= lost
            pending -= lost.keys()
        return events.Warmed(failed=failed)

    def _tend(self) -> None:
        """Let go of agents on hosts that are not to join any more, and of hosts whose agents are lost."""
        self._events(0)
        lost = self._lost()
        kept = self._driver.fleet.waiting_hosts
        gone = [link for link in self._waiting.all if link.lost or link.host not in kept]
        self._warmed -= {link.host for link in gone}
        self._waiting.disconnect(gone)
        for host, why in lost.items():
            self._report(events.Lost(host=host, why=why))

    def _events(self, wait_s: float) -> list[tuple[HostConnection, Message | HostLost | str]]:
        return list(self._waiting.events(wait_s)) if self._waiting.all else []

    def _lost(self) -> dict[str, str]:
        """Hosts whose agents have ended, or are silent, which ends them."""
        now, silent_s = time.monotonic(), self._driver.fleet.given.limits.silent_s
        for link in self._waiting.all:
            if not link.lost and now - link.last_seen > silent_s:
                link.process.kill()
                self._waiting.forget(link)
        return {
            link.host: f"its agent ended, or was silent for {silent_s:g} s{link.last_words}"
            for link in self._waiting.all
            if link.lost
        }
