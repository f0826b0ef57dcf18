"""The journal of a study in an object store: numbered segments, each an object that is written once.

A segment is whole lines. Its number is the claim to be the next: where the store obeys conditions, of two drivers that
believe to be alone one is refused at its first segment, and nothing of the other's is overwritten.
"""

import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.objects import lease
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError, StoreTimeoutError
from roxxel_dist.objects.lease import Lease, LeaseLostError
from roxxel_dist.objects.url import ObjectUrl

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectStore

FOLDER = "journal/"
NAME = re.compile(r"(\d{9})(?:-(\d{9}))?\.jsonl")
FLUSH_S = 1.0
"""How often lines are written that nothing waits for."""
MANY = 1000
"""Segments that the next driver makes one of."""
THREADS = 32
"""Segments that are read at once."""
LEASE_POLL_S = 0.2
LOOKS = 5
"""How often a journal is listed again that a driver makes shorter meanwhile."""


@dataclass(frozen=True, order=True)
class Segment:
    """The lines of one write, or of all the writes that were made one of."""

    first: int
    last: int

    @property
    def key(self) -> str:
        """Of the object."""
        return f"{FOLDER}{self.first:09d}{'' if self.last == self.first else f'-{self.last:09d}'}.jsonl"


@dataclass(frozen=True, kw_only=True)
class StoredJournal:
    """The journal as it is in the store."""

    data: bytes
    segments: tuple[Segment, ...]
    """In their order."""
    covered: tuple[Segment, ...] = ()
    """Those that are in another one too."""

    @property
    def last(self) -> int:
        """The number of the last segment; 0 where there is none."""
        return self.segments[-1].last if self.segments else 0


def chain(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """(segments that follow each other from 1 on, those that are covered by one of them). Raises ValueError, with the
    number, where one is missing."""
    chosen: list[Segment] = []
    covered: list[Segment] = []
    for segment in sorted(segments, key=lambda one: (one.first, -one.last)):
        following = chosen[-1].last + 1 if chosen else 1
        if segment.last < following:
            covered.append(segment)
        elif segment.first == following:
            chosen.append(segment)
        else:
            raise UserError(f"{Segment(following, following).key} is missing")
    return chosen, covered


def read_segments(store: "ObjectStore") -> StoredJournal:
    """The journal of a study, read in parallel. Raises ValueError where a segment is missing or torn, StoreError."""
    for look in range(LOOKS):
        names = (NAME.fullmatch(info.key.removeprefix(FOLDER)) for info in store.list(FOLDER))
        try:
            chosen, covered = chain([Segment(int(name[1]), int(name[2] or name[1])) for name in names if name])
            with ThreadPoolExecutor(THREADS) as pool:
                parts = list(pool.map(lambda segment: store.read(segment.key), chosen))
        except (ValueError, StoreNotFoundError) as error:  # perhaps a driver has just made one of many
            if look < LOOKS - 1:
                time.sleep(0.2 * (look + 1))
                continue
            raise UserError(f"{store.url}: the journal is damaged: {error}; take that object from a copy") from error
        for segment, part in zip(chosen, parts, strict=True):
            _check_lines(store.url.join(segment.key), part)
        return StoredJournal(data=b"".join(parts), segments=tuple(chosen), covered=tuple(covered))
    raise AssertionError


def _check_lines(url: ObjectUrl, data: bytes) -> None:
    """Raises ValueError where a segment is not whole lines of JSON."""
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            json.loads(line if line.endswith(b"\n") else b"")
        except ValueError as error:
            raise UserError(f"{url}, line {number}: damaged ({error}): take the object from a copy") from error


def make_one_of_many(store: "ObjectStore", journal: StoredJournal) -> None:
    """Write all segments as one, if there are many, and delete those covered by another. For the lease's holder."""
    covered = list(journal.covered)
    if len(journal.segments) >= MANY:
        store.write(Segment(1, journal.last).key, journal.data, if_absent=True)
        covered += journal.segments
    if covered:
        store.delete([segment.key for segment in covered])


class SegmentWriter:
    """Writes lines as the next segments, in a thread, while the context is open; on exit all are written.

    Args:
        store: of the study.
        last: the number of the last segment that is there.
        held: the lease of the study, which this process holds.
    """

    def __init__(self, store: "ObjectStore", last: int, held: Lease) -> None:
        self._store, self._last, self._lease = store, last, held
        self._conditions = store.supports_conditions()
        self._changed = threading.Condition()
        self._pending, self._is_urgent, self._is_over = b"", False, False
        self._added, self._stored = 0, 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)

    def __enter__(self) -> "SegmentWriter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self.check()

    def add(self, data: bytes, *, soon: bool, wait: bool) -> None:
        """Whole lines to be written within a second, or `soon`; `wait`: until the store has them.

        Raises what `check` raises.
        """
        with self._changed:
            self._pending += data
            self._added += len(data)
            self._is_urgent |= soon or wait
            self._changed.notify_all()
            target = self._added
            while wait and self._failure is None and self._stored < target:
                self._changed.wait()
        self.check()

    def check(self) -> None:
        """Raises LeaseLostError where another driver has the study, StoreError where the store took no more lines."""
        if self._failure is not None:
            raise self._failure
        if self._lease.lost is not None:
            raise LeaseLostError(self._lease.lost)

    def _work(self) -> None:
        written = -FLUSH_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_over)
                pause = written + FLUSH_S - time.monotonic()
                self._changed.wait_for(lambda: self._is_urgent or self._is_over, max(0.0, pause))
                data, self._pending, self._is_urgent = self._pending, b"", False
            if not data:
                return
            written = time.monotonic()
            try:
                self._write(Segment(self._last + 1, self._last + 1), data)
            except Exception as error:  # whatever it is, it is raised where the next line is added
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._last += 1
                self._stored += len(data)
                self._changed.notify_all()

    def _write(self, segment: Segment, data: bytes) -> None:
        try:
            if self._conditions:
                self._store.write(segment.key, data, if_absent=True)
                return
            self._wait_for_lease()
            try:
                self._store.head(segment.key)
            except StoreNotFoundError:
                self._store.write(segment.key, data)
                return
        except StorePreconditionError as error:
            raise self._taken(segment) from error
        raise self._taken(segment)

    def _wait_for_lease(self) -> None:
        """Wait until the lease is renewed (late if the store was away): success means that no other process took it."""
        end = time.monotonic() + self._store.timeout_s
        while self._lease.lost is None and self._lease.age_s >= lease.STALE_S:
            if time.monotonic() >= end:
                raise StoreTimeoutError(
                    f"write {self._store.url}: the lease of the study was not renewed for {self._lease.age_s:.0f} s: "
                    "check the network, or raise store_timeout=SECONDS"
                )
            time.sleep(LEASE_POLL_S)
        self._lease.check()

    def _taken(self, segment: Segment) -> LeaseLostError:
        return LeaseLostError(
            f"{self._store.url}: another driver has written {segment.key}: it has this study now, and this one ends"
        )
