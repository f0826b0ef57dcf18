"""What people ask of the hosts of a job while it runs: a list that is read again, and requests to join and leave."""

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from roxxel_dist.launcher.fleet import events
from roxxel_dist.launcher.fleet.driver import Reply
from roxxel_dist.launcher.fleet.state import NUMBERS
from roxxel_dist.launcher.host.command import Command
from roxxel_dist.launcher.job.backend import Backend, HostSource
from roxxel_dist.launcher.job.spec import JobSpec
from roxxel_dist.process.durable import Mailbox
from roxxel_dist.process.exit_codes import UserError

LIST_RUN_S = 30.0
"""Seconds that a command has for its list."""
MOST = 1 << 20
"""Bytes of a list."""
PROGRAMS = (b"#!", b"\x7fELF")
"""How a file begins that is run."""
SHOWN = 200
"""Letters of what a command says that a message has."""


def hosts_in(text: str, source: str) -> tuple[list[str], int | None]:
    """The hosts of a text, and how many processes each has by it.

    A host a line; `#` begins a comment; `slots=N` after a host (as in MPI's files) must be the same for all.

    Raises:
        ValueError: a line cannot be understood; names `source` and the line.
    """
    hosts: list[str] = []
    slots: set[int | None] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match = re.fullmatch(r"slots=([1-9]\d*)", words[1]) if len(words) == 2 else None
        if len(words) > 1 and match is None:
            raise UserError(f"{source}, line {number}: {line.strip()[:SHOWN]!r}: write a host, or `host slots=N`")
        hosts.append(words[0])
        slots.add(int(match[1]) if match else None)
    if len(slots) > 1:
        raise UserError(f"{source}: every host must have the same slots=N, or none; use --procs-per-host")
    return hosts, slots.pop() if slots else None


class HostList:
    """The list of --hosts-from; each `read` reads it anew.

    Args:
        given: a file of hosts, or a command: a program, or words for `sh -c`.
    """

    def __init__(self, given: str) -> None:
        self.source: str = f"--hosts-from {given!r}"
        self._given = given
        self._ended = threading.Event()

    @property
    def is_file(self) -> bool:
        """Whether it is a file of hosts, as it is now, rather than a program."""
        try:
            if not os.path.isfile(self._given):  # a pipe is read once
                return False
            with Path(self._given).open("rb") as file:
                return not (os.access(self._given, os.X_OK) and file.read(4).startswith(PROGRAMS))
        except (OSError, ValueError):
            return os.path.exists(self._given)

    def read(self) -> tuple[list[str], int | None]:
        """The hosts, each once, and the slots of each by the list.

        Raises:
            ValueError: there is no list, or it names no host; says why.
        """
        hosts, slots = hosts_in(self._text_of_file() if self.is_file else self._printed(), self.source)
        if not hosts:
            raise UserError(f"{self.source}: no host is in the list")
        return list(dict.fromkeys(hosts)), slots

    def end(self) -> None:
        """Kill a command that runs: its `read`, in another thread, fails."""
        self._ended.set()

    def _text_of_file(self) -> str:
        try:
            return Path(self._given).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UserError(f"{self.source}: cannot be read ({reason})") from error

    def _printed(self) -> str:
        words = [os.path.abspath(self._given)] if os.path.isfile(self._given) else ["sh", "-c", self._given]
        try:
            command = Command(words, LIST_RUN_S, most=MOST, splits=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.source}: cannot be run ({error})") from error
        command.wait(self._ended.is_set)
        if command.why:
            raise UserError(f"{self.source}: {command.why}, and was killed")
        if command.end:
            what = command.end + "; there is no such file, and no such command" * (command.code == 127)
            raise UserError(f"{self.source}: failed ({what}): {command.last_line}")
        return command.text


def first_list(given: str, least: int, wait_s: float, say: Callable[[str], None]) -> tuple[list[str], int | None]:
    """The hosts of a list that is read for the first time, and the slots of each; as `HostList.read`.

    While it has fewer than `least` hosts, it is read again, for at most `wait_s` seconds.
    """
    source, end, waits = HostList(given), time.monotonic() + wait_s, False
    while True:
        try:
            hosts, slots = source.read()
        except UserError:
            if not (waits or source.is_file) or time.monotonic() >= end:
                raise
            hosts, slots = [], None
        if len(hosts) >= least or time.monotonic() >= end:
            return hosts, slots
        if not waits:
            say(f"{source.source} has {len(hosts)} of {least} hosts: waiting up to {wait_s:g} s (--host-timeout)")
        waits = True
        time.sleep(1.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Hosts that shall join a job, or leave it."""

    name: str
    """Its name in the mailbox."""
    joins: bool
    """Join; or else leave."""
    hosts: tuple[str, ...]


def mailbox(logs: str | Path) -> Mailbox:
    """The requests to the job with these logs; an answer is {"done": whether it was followed, "text": words}."""
    return Mailbox(Path(logs, "members"))


def requests_in(box: Mailbox) -> Iterator[Request]:
    """Take the requests that are there."""
    for name, content in box.take_requests():
        if isinstance(content.get("hosts"), list):
            yield Request(name=name, joins=bool(content.get("joins")), hosts=tuple(map(str, content["hosts"])))


FILE_S, COMMAND_S = 1.0, 5.0
"""Seconds between two looks at a list: a file, a command."""
AGAIN_S = 0.5
"""A list that has changed is read again so much later: it holds when it is the same then."""
END_S = 2.0


def ignore(todo: Sequence[events.Do]) -> None:
    """Do nothing: nobody waits for an answer."""


class Inbox:
    """Reads the list of a job and the requests to it, in a thread: a file system, or a command, may be slow.

    Args:
        job: its list, if it has one, and its folder.
        backend: which hosts can join; it has the list as it is now, and may have another one.
        happened: takes the lists that hold, each another one than the one before; requests, and what takes the answer;
            and, once each, why a list cannot be read, whatever its numbers: a client may say the time.
        since: requests that were made before (seconds since 1970) were meant for a launch before this one.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        happened: "queue.SimpleQueue[tuple[events.Event, Reply]]",
        since: float = math.inf,
    ) -> None:
        self._happened, self._since = happened, since
        self._mailbox = mailbox(job.log_dir)
        self._check_joining = backend.check_joining
        self._source = backend.more_hosts if job.hosts_from is None else HostList(job.hosts_from)
        self._held = list(backend.listed)
        self._seen: list[str] | None = None  # once, and another one than the one that holds
        self._known = set[str]()
        self._due = 0.0
        self._end = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="inbox", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._fail(f"lists and requests are not read: {error} (ulimit -u, pids.max)")
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._source is not None:
            self._source.end()
        if self._thread.is_alive():
            self._thread.join(END_S)  # not for a file system that does not answer

    def _watch(self) -> None:
        with suppress(OSError):
            self._mailbox.clear(self._since)  # of a launch before
        while not self._end.wait(AGAIN_S):
            try:
                self._look()
            except Exception as error:  # the thread would end, and with it all joins
                self._fail(f"lists and requests could not be read: {error!r}")

    def _look(self) -> None:
        for request in requests_in(self._mailbox):
            self._hand_on(request)
        if self._source is not None and time.monotonic() >= self._due:
            self._poll_list(self._source)

    def _fail(self, why: str) -> None:
        """Have people read this, once."""
        about = NUMBERS.sub("", why)
        if about not in self._known and not self._end.is_set():
            self._known.add(about)
            self._happened.put((events.Say(text=f"{why}; the list stays as it was"), ignore))

    def _poll_list(self, source: HostSource) -> None:
        """Read the list; one that has changed holds when it is the same at the next look, which comes sooner."""
        try:
            hosts = source.read()[0]
        except UserError as error:
            self._fail(str(error))
            hosts = self._held
        if hosts == self._seen:
            self._held = hosts
            try:
                self._check_joining(hosts)
                self._happened.put((events.Asked(by="list", hosts=tuple(hosts)), ignore))
            except UserError as error:
                self._fail(f"--hosts-from: {error}")
        self._seen = hosts if hosts != self._held else None
        wait_s = FILE_S if source.is_file else COMMAND_S
        self._due = time.monotonic() + (AGAIN_S if self._seen else wait_s)

    def _hand_on(self, request: Request) -> None:
        """Put a request where the controller takes it, or refuse it."""

        def reply(todo: Sequence[events.Do]) -> None:
            answer = next(do for do in todo if isinstance(do, events.Answer))
            with suppress(OSError):  # who asked may be gone, and a full disk ends no job
                self._mailbox.answer(request.name, {"done": answer.done, "text": answer.text})

        try:
            self._check_joining(request.hosts)
        except UserError as error:
            reply([events.Answer(done=False, text=str(error))])
            return
        self._happened.put((events.Asked(by="join" if request.joins else "leave", hosts=request.hosts), reply))
