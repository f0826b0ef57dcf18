"""May the ranks of a host go on while it receives nothing from the launcher? Only if no host of the job does.

A host that receives nothing may be cut off alone. Then the launcher starts other ranks in the place of its own, which
must have ended by then (`Limits.silent_s`). Or the launcher's own link is cut: then no host receives, nothing is
started anywhere, and the ranks, which reach each other, go on for the lease. A host cannot distinguish the two. So each
host that has received nothing for `orphan_s` asks the first one, by a datagram; the first one answers when all hosts
ask at once. Where a firewall drops datagrams, there is no answer, and ranks end as if their host were cut off alone.

The launcher holds the other half: it takes a host for cut off alone only if others have received from it all the time
(`common_s`, which is less than `orphan_s - fresh_s`). Decision 23.
"""

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from roxxel_dist.launcher.job.limits import Limits

SIZE = 256
ALL = b"all"


class HostLease:
    """The lease of one host, for one attempt.

    Args:
        terms: `limit` (seconds), `hosts` (their number), `index` (of this host), `token` (a secret of the attempt) and
            `address` (of the first host, numeric), as the order `start` has them.
        limits: of the job.
    """

    def __init__(self, terms: Mapping[str, Any], limits: Limits) -> None:
        self._limits = limits
        self.limit_s: float = terms["limit"]
        self.holds: bool = False
        """Whether no host has received from the launcher since this one has."""
        self._hosts, self._index = int(terms["hosts"]), int(terms["index"])
        self._token, self._address = str(terms["token"]).encode(), str(terms["address"])
        self._asked: dict[int, float] = {}
        self._first: tuple[str, int] | None = None
        self._socket: socket.socket | None = None
        self.port: int | None = None
        """Where the first host is asked; None on other hosts, and where there is no other."""
        if self._hosts > 1:
            with suppress(OSError):
                family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
                self._socket = socket.socket(family, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
                if self._index == 0:
                    self._socket.bind(("", 0))
                    self.port = int(self._socket.getsockname()[1])

    @property
    def fd(self) -> int | None:
        """Readable when there is something to `receive`."""
        return None if self._socket is None else self._socket.fileno()

    def meet(self, port: int) -> None:
        """Take in where the first host is asked."""
        self._first = (self._address, port)

    def check(self, silent_s: float, now: float) -> None:
        """Ask, if the launcher has been silent for long. To be called every half second."""
        if silent_s < self._limits.orphan_s:
            self.holds = False
        elif self._hosts == 1:
            self.holds = True
        elif self._index == 0:
            self._asked[0] = now
            self.holds = self.holds or self._all_ask(now)
        elif self._socket is not None and self._first is not None:
            with suppress(OSError):  # no route, so no answer
                self._socket.sendto(b"%s %d" % (self._token, self._index), self._first)

    def receive(self, silent_s: float, now: float) -> None:
        """Take in one datagram: a question to the first host, or its answer."""
        if self._socket is None:
            return
        try:
            data, sender = self._socket.recvfrom(SIZE)
        except OSError:  # such as the answer of a host that listens no more
            return
        token, _, text = data.partition(b" ")
        if token != self._token or silent_s < self._limits.orphan_s:
            return
        if self._index != 0:
            self.holds = self.holds or text == ALL
        elif text.isdigit() and 0 < int(text) < self._hosts:
            self._asked |= {0: now, int(text): now}
            if self._all_ask(now):
                self.holds = True
                with suppress(OSError):
                    self._socket.sendto(b"%s %s" % (self._token, ALL), sender)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _all_ask(self, now: float) -> bool:
        fresh_s = self._limits.fresh_s
        return len(self._asked) == self._hosts and all(now - when <= fresh_s for when in self._asked.values())
