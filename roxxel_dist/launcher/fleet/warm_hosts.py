"""Hosts that are to join a job: their agents have spares, so that the restart does not wait for their imports."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from roxxel_dist.launcher.host.protocol import Message
from roxxel_dist.launcher.job.backend import Backend
from roxxel_dist.launcher.job.placement import Assignment, placements
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.launcher.policy.outcome import HostLost
from roxxel_dist.launcher.transport.pool import HostConnection, HostPool
from roxxel_dist.launcher.transport.questions import Interrupted

WAIT_S = 0.25


class WarmHosts:
    """Agents on hosts that are to join, from their preflight to the next attempt; a context manager.

    Args:
        job: what their ranks will run.
        backend: has reached them.
        key: of the job's folders in memory.
    """

    def __init__(self, job: JobSpec, backend: Backend, key: str) -> None:
        self._job, self._backend, self._key = job, backend, key
        self._pool = HostPool(backend, limits=job.limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.__exit__(kind, error, tb)

    @property
    def hosts(self) -> Sequence[str]:
        """Those that have an agent here."""
        return [link.host for link in self._pool.all]

    def take(self, pool: HostPool, hosts: Collection[str]) -> None:
        """Keep the agents that these hosts have in a pool, if there are to be spares."""
        if self._job.warm_spares != "off":
            self._pool.adopt(pool, hosts)

    def warm(
        self,
        plan: Assignment,
        visible: Mapping[str, str],
        hosts: Collection[str],
        *,
        say: Callable[[str], None],
        is_over: Callable[[], bool],
    ) -> dict[str, str]:
        """Have those of these hosts that have agents here start spares for their ranks in a plan, and wait for them.

        Returns those that can have no ranks, and why; raises Interrupted if it is over. `say` takes words for people.
        """
        waiting, failed, end = {*hosts} & {*self.hosts}, dict[str, str](), time.monotonic() + self._job.limits.warm_s
        if waiting:
            self._events(0)  # of the others; from here on silence counts
            placed = placements(plan.job, plan.hosts, "", self._backend.environment, visible=visible)
            self._pool.warm(plan.job, [place for place in placed if place.host in waiting], self._key)
        while waiting and time.monotonic() < end:
            if is_over():
                raise Interrupted
            for link, event in self._events(WAIT_S):
                match event:
                    case {"type": "warm", "why": str(why)}:
                        waiting.discard(link.host)
                        failed.update({link.host: why} if why else {})
                    case str():
                        say(f"{link.host}: {event}")
                    case _:
                        pass
            lost = {host: why for host, why in self._lost().items() if host in waiting}
            failed.update(lost)
            waiting.difference_update(lost)
        return failed

    def keep(self, hosts: Collection[str]) -> dict[str, str]:
        """Let go of all others; returns those of these that are lost, and why."""
        self._events(0)
        lost = {host: why for host, why in self._lost().items() if host in hosts}
        if gone := [link for link in self._pool.all if link.lost or link.host not in hosts]:
            self._pool.disconnect(gone)
        return lost

    def hand_over(self, pool: HostPool) -> None:
        """Give the agents to the pool of the job, which ends those that the next attempt does not use."""
        pool.adopt(self._pool, self.hosts)

    def _events(self, wait_s: float) -> list[tuple[HostConnection, Message | HostLost | str]]:
        events = self._pool.events(wait_s) if self._pool.all else ()
        return [(link, event) for link, event in events if link is not None and event is not None]

    def _lost(self) -> dict[str, str]:
        """Hosts whose agents have ended, or are silent, which ends them."""
        now, silent_s = time.monotonic(), self._job.limits.silent_s
        for link in self._pool.all:
            if not link.lost and now - link.last_seen > silent_s:
                link.process.kill()
                self._pool.forget(link)
        return {
            link.host: f"its agent ended, or was silent for {silent_s:g} s{link.last_words}"
            for link in self._pool.all
            if link.lost
        }
