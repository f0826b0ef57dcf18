"""While a job goes on with fewer hosts than it was given: can those that it lost be used again?"""

import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.preflight.run import check_job_hosts
from roxxel_dist.launcher.spec import JobSpec
from roxxel_dist.launcher.transport.pool import HostPool, Interrupted

LOOK_S = 5.0
"""Between two looks; twice as long each time that the job has grown: a host that comes and goes costs little then."""
LOOK_MOST_S = 300.0


class LostHosts:
    """Looks at hosts, in a thread, until they can be used; a context manager.

    Each is looked at as preflight does before a start, by a program of its own.

    Args:
        job: what they are to be fit for.
        backend: reaches them.
        hosts: none: nothing is looked at.
        helps: whether the job would have more devices with these.
        pause_s: between two looks.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        hosts: Sequence[str],
        helps: Callable[[Sequence[str]], bool],
        pause_s: float = LOOK_S,
    ) -> None:
        self.back: tuple[str, ...] = ()
        """Those that can be used, and help."""
        self._job, self._backend, self._hosts, self._helps, self._pause_s = job, backend, hosts, helps, pause_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._hosts:
            self._wake, self._woken = os.pipe()
            self._thread = threading.Thread(target=self._look, name="lost hosts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._thread is not None:
            self._end.set()
            os.write(self._woken, b"\0")
            self._thread.join()
            os.close(self._wake)
            os.close(self._woken)

    def _look(self) -> None:
        while not self.back and not self._end.wait(self._pause_s):
            try:
                fit = [host for host in self._hosts if self._is_fit(host)]
            except Interrupted:
                return
            if fit and self._helps(fit):
                self.back = tuple(fit)

    def _is_fit(self, host: str) -> bool:
        with HostPool(self._backend, self._wake) as pool:
            return check_job_hosts(self._job, self._backend, (host,), port=None, pool=pool).passed
