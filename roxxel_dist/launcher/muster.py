"""Before each attempt: which hosts are there, whether they are fit for the job, and which of them work."""

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roxxel_dist.launcher.crew import Crew, crew, micro_batches
from roxxel_dist.launcher.job import JobSpec
from roxxel_dist.launcher.link import Backend
from roxxel_dist.launcher.preflight import Interrupted, Ready, look
from roxxel_dist.launcher.report import say
from roxxel_dist.launcher.signals import Signals

AGAIN_S = 2.0


class NotReadyError(Exception):
    """The hosts, or too many of them, cannot take the job. The message is for people, a line a reason."""


@dataclass(frozen=True, kw_only=True)
class Mustered:
    """Who is ready to start."""

    crew: Crew
    coordinator: str
    """address:port of rank 0's coordinator, as all of them reach it."""


class Muster:
    """Looks at the hosts of a job before each of its attempts.

    The first time everything must be as it should. Later a host may be out of reach for `job.host_timeout` seconds
    before the job goes on without it, if it may.
    """

    def __init__(self, job: JobSpec, backend: Backend, signals: Signals) -> None:
        self._job = job
        self._backend = backend
        self._signals = signals
        self._told: set[str] = set()

    def ready(self, attempt: int) -> Mustered:
        """Those who start this attempt.

        Raises:
            NotReadyError: there are too few.
            Interrupted: a signal came in the meantime; it is still in `signals`.
        """
        job, hosts = self._job, tuple(self._backend.hosts)
        until = time.monotonic() + (job.host_timeout if attempt else 0)
        while True:
            seen = look(job, self._backend, hosts, port=_port(job, attempt), wake=self._signals.fd)
            self._warn(seen)
            over = time.monotonic() >= until
            problems = [finding.text for finding in seen.findings if finding.level == "error"]
            present = [host for host in hosts if host not in seen.unreachable]
            if not problems and (not seen.unreachable or (over and attempt and self._enough(present))):
                return self._start_with(present, seen, attempt)
            problems += _unreachable(seen)
            if over:
                raise NotReadyError("\n".join(problems))
            self._tell(problems)
            if select.select([self._signals.fd], [], [], AGAIN_S)[0]:
                raise Interrupted

    def _enough(self, present: Sequence[str]) -> bool:
        least = self._job.min_hosts
        return least is not None and len(present) >= least

    def _start_with(self, present: Sequence[str], seen: Ready, attempt: int) -> Mustered:
        hosts = tuple(self._backend.hosts)
        if len(present) == len(hosts):
            return Mustered(crew=Crew(hosts=hosts, job=self._job), coordinator=_endpoint(seen))
        chosen = crew(self._job, hosts, present, micro_batches(self._job.command))
        self._tell([chosen.note])
        if hosts[0] in present and len(chosen.hosts) == len(present):
            return Mustered(crew=chosen, coordinator=_endpoint(seen))
        seen = look(chosen.job, self._backend, chosen.hosts, port=_port(self._job, attempt), wake=self._signals.fd)
        if seen.unreachable:
            raise NotReadyError("\n".join(_unreachable(seen)))
        return Mustered(crew=chosen, coordinator=_endpoint(seen))

    def _warn(self, seen: Ready) -> None:
        self._tell([finding.text for finding in seen.findings if finding.level == "warning"], "warning: ")

    def _tell(self, lines: Sequence[str], prefix: str = "") -> None:
        """Each thing once."""
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                say(prefix + line)


def _endpoint(seen: Ready) -> str:
    return f"[{seen.address}]:{seen.port}" if ":" in seen.address else f"{seen.address}:{seen.port}"


def _unreachable(seen: Ready) -> list[str]:
    return [f"host {host} cannot be used: {why}" for host, why in seen.unreachable.items()]


def _port(job: JobSpec, attempt: int) -> int | None:
    """Each attempt has a port of its own: a rank of the last one may live on behind a cut link."""
    return None if job.port is None else job.port + attempt
