"""A list of hosts that is read again and again: a file, or what a command prints (--hosts-from)."""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from roxxel_dist.launcher.host.command import Command
from roxxel_dist.process.exit_codes import UserError

COMMAND_S = 30.0
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
            command = Command(words, COMMAND_S, most=MOST, splits=True)
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
