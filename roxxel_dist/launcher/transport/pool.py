"""The agents of one attempt, together: starts them, hands over what they say, and notices those that say nothing."""

import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence

from roxxel_dist.cluster.exit_codes import EXIT_PREFLIGHT
from roxxel_dist.launcher.backends.base import Backend
from roxxel_dist.launcher.control.hang import STILL_S
from roxxel_dist.launcher.control.outcome import HostLost, how
from roxxel_dist.launcher.spec import JobSpec, Placement
from roxxel_dist.launcher.transport.connection import AGENT_END_S, Heartbeat, HostConnection, agent_words
from roxxel_dist.launcher.transport.protocol import Message

CHUNK = 1 << 20
SILENT_S = 10.0
"""An agent speaks each half second. Silent for longer, it is lost, with its ranks (`Backend.heartbeat_timeout_s`)."""
START_S = 60.0
"""How long an agent may take to its first word: a connection, and an interpreter from a slow file system."""
KILL_S = 10.0
"""How long killed ranks may take to be gone."""
EXIT_LOST = 137
"""What an agent without a code of its own counts as: its ranks were killed."""


class HostPool:
    """Every agent of an attempt, in rank order.

    Args:
        wake: a descriptor to be waited for too; `events` returns when it is readable.
    """

    def __init__(self, wake: int) -> None:
        self.all: list[HostConnection] = []
        self._select = selectors.DefaultSelector()
        self._select.register(wake, selectors.EVENT_READ)
        self._beat: Heartbeat | None = None
        self._kill_by: float | None = None
        self._looked = time.monotonic()

    def start(self, job: JobSpec, backend: Backend, placed: Sequence[Placement]) -> None:
        """Start an agent on each host, and have it start its ranks."""
        for place in placed:
            process = backend.start(place.host, *agent_words(backend))
            link = HostConnection(host=place.host, ranks=list(place.ranks), process=process)
            self.all.append(link)
            self._select.register(link.fd, selectors.EVENT_READ, (self._read, link))
            self._select.register(link.error_fd, selectors.EVENT_READ, (self._read_errors, link))
            ranks = [{"rank": rank, "env": dict(env)} for rank, env in place.ranks.items()]
            link.send({"type": "start", "command": job.command, "ranks": ranks, "total": job.total})
        self._beat = Heartbeat(self.all)

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
        """What happens within `wait_s` seconds, until something does.

        A message of an agent, its loss, or a line of its stderr. Nothing where `wake` is readable.
        """
        for link in self.all:
            self._want_room(link)
        for key, _ in self._select.select(wait_s):
            if key.data is not None and key.fd in self._select.get_map():  # it may be lost by the event before
                handle, link = key.data
                yield from ((link, event) for event in handle(link))
        yield from self._silent(time.monotonic())

    def _want_room(self, link: HostConnection) -> None:
        """Wait for room in the pipe of orders, as long as there are orders that found none."""
        registered = link.order_fd in self._select.get_map()
        if link.waiting and not link.done and not registered:
            self._select.register(link.order_fd, selectors.EVENT_WRITE, (self._flush, link))
        elif registered and (link.done or not link.waiting):
            self._select.unregister(link.order_fd)

    def _flush(self, link: HostConnection) -> list[Message]:
        link.flush()
        return []

    def _read(self, link: HostConnection) -> Iterator[Message | HostLost]:
        data = os.read(link.fd, CHUNK)
        if not data:
            self._select.unregister(link.fd)
            if not link.done:
                yield self._gone(link)
            return
        link.heard = time.monotonic()
        link.ready = True
        try:
            messages = link.decoder.feed(data)
        except ValueError as error:
            link.process.kill()
            yield self._lose(link, f"host {link.host}: {error}; it was left, and its ranks are killed")
            return
        for message in messages:
            if message["type"] == "done":
                link.done = True
            yield message

    def _read_errors(self, link: HostConnection) -> list[str]:
        data = os.read(link.error_fd, CHUNK)
        if not data:
            self._select.unregister(link.error_fd)
        return link.errors(data)

    def _gone(self, link: HostConnection) -> HostLost:
        """The agent ended by itself; its guard has killed its ranks (it holds the channel until it has)."""
        link.done = True
        self.order({"type": "kill", "after": 0}, within=0)  # the others, before anybody waits for an ssh that lingers
        try:
            code = link.process.wait(AGENT_END_S)
        except subprocess.TimeoutExpired:
            link.process.kill()
            code = link.process.wait()
        self._drain(link)
        reason = f": {link.said[-1]}" if link.said else ""
        if not link.ready:
            text = f"the agent on host {link.host} did not start ({how(code)}){reason}"
            return self._lose(link, text, EXIT_PREFLIGHT, with_host=True)
        text = f"the agent on host {link.host} ended before its ranks ({how(code)}){reason}; they were killed"
        return self._lose(link, text, 128 - code if code < 0 else EXIT_LOST, died=True)

    def _drain(self, link: HostConnection) -> None:
        """What the agent said on stderr just before its end; a process that it left behind is not waited for."""
        os.set_blocking(link.error_fd, False)
        try:
            while data := os.read(link.error_fd, CHUNK):
                link.errors(data)
        except BlockingIOError:
            return

    def _lose(
        self, link: HostConnection, text: str, code: int = EXIT_LOST, *, with_host: bool = False, died: bool = False
    ) -> HostLost:
        link.done = True
        for fd in (link.fd, link.error_fd):
            if fd in self._select.get_map():
                self._select.unregister(fd)
        return HostLost(host=link.host, code=code, text=text, heard=link.heard, with_host=with_host, died=died)

    def _silent(self, now: float) -> Iterator[tuple[HostConnection, HostLost]]:
        """Those that have not spoken for too long, or whose ranks do not go."""
        if now - self._looked > STILL_S:  # the launcher stood still itself, and has not listened
            for link in self.all:
                link.heard += now - self._looked
            if self._kill_by is not None:
                self._kill_by += now - self._looked
        self._looked = now
        for link in self.all:
            if link.done:
                continue
            limit = SILENT_S if link.ready else START_S
            if now - link.heard > limit:
                link.process.kill()
                text = (
                    f"host {link.host} has said nothing for {limit:g} s (its link is cut, or it is overloaded or stuck)"
                )
                yield link, self._lose(link, text, EXIT_LOST if link.ready else EXIT_PREFLIGHT, with_host=True)
            elif self._kill_by is not None and now > self._kill_by:
                ranks = ", ".join(map(str, link.ranks))
                text = f"host {link.host}: of the ranks {ranks}, not all are gone {KILL_S:g} s after they were killed"
                yield link, self._lose(link, f"{text} (a process that waits for a disk or a driver cannot be)")

    def close(self) -> None:
        """End every agent, and with it what ranks it has."""
        if self._beat is not None:
            self._beat.end()
        self._select.close()
        for link in self.all:
            link.hang_up()
        for link in self.all:
            link.close()
