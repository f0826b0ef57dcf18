"""The journal of a study in an object store: one object, which each write replaces, and parts that never change.

Lines that are `PART_BYTES` long together become a part; the first line of the object then names all parts, in order. So
what a study sends grows with its lines, and not with their square. A part is there before the object names it, and its
name is that of its contents: a driver that loses the study in between leaves one that nobody reads. A write names the
object that it replaces (If-Match): where the store obeys conditions, of two drivers that believe to be alone one is
refused at its first write, and no line of the other is lost. On other stores the lease is checked before each write.
"""

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roxxel_dist.objects import lease
from roxxel_dist.objects.errors import StoreNotFoundError, StorePreconditionError, StoreTimeoutError
from roxxel_dist.objects.lease import Lease, LeaseLostError
from roxxel_dist.objects.url import ObjectUrl
from roxxel_dist.place.directory import JOURNAL
from roxxel_dist.process.exit_codes import UserError

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectStore

PARTS, PART_BYTES = "journal", 256 << 10
"""The folder of the parts, and how long they are at least."""
FLUSH_S = 1.0
"""Seconds between writes of lines that nothing waits for."""
LEASE_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class StoredJournal:
    """The journal as it is in the store."""

    data: bytes
    etag: str | None
    """The version of its object; None where there is none."""
    parts: tuple[str, ...] = ()
    """The keys of its parts."""
    parted: int = 0
    """The bytes of `data` that are in parts."""


def read_journal(store: "ObjectStore") -> StoredJournal:
    """The journal of a study; an empty one where there is none. Raises ValueError where it is damaged, StoreError."""
    while True:
        try:
            etag = store.head(JOURNAL).etag
            data = store.read(JOURNAL, etag=etag)
        except StoreNotFoundError:
            return StoredJournal(data=b"", etag=None)
        except StorePreconditionError:  # replaced between the two
            continue
        parts, rest = _parts_of(data)
        before = b"".join(map(store.read, parts))
        _check_lines(store.url.join(JOURNAL), before + rest)
        return StoredJournal(data=before + rest, etag=etag, parts=parts, parted=len(before))


def _parts_of(data: bytes) -> tuple[tuple[str, ...], bytes]:
    """The keys of the parts that an object names, and the lines that are its own."""
    first, _, rest = data.partition(b"\n")
    if not first.startswith(b'{"parts": '):
        return (), data
    return tuple(json.loads(first)["parts"]), rest


def _check_lines(url: ObjectUrl, data: bytes) -> None:
    """Raises ValueError where an object is not whole lines of JSON."""
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            json.loads(line if line.endswith(b"\n") else b"")
        except ValueError as error:
            raise UserError(f"{url}, line {number}: damaged ({error}): take the object from a copy") from error


class JournalWriter:
    """A writer that appends lines to the journal of a study in a thread, while the context is open; on exit all are
    stored. `stored` is the journal as the store has it, `held` the lease of the study, which this process holds."""

    def __init__(self, store: "ObjectStore", stored: StoredJournal, held: Lease) -> None:
        self._store, self._lease = store, held
        self._data, self._etag, self._parts = stored.data[stored.parted :], stored.etag, stored.parts
        self._conditions = store.supports_conditions()
        self._changed = threading.Condition()
        self._pending, self._is_urgent, self._is_over = b"", False, False
        self._added, self._stored = 0, 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)

    def __enter__(self) -> "JournalWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self.check()

    def add(self, data: bytes, *, soon: bool, wait: bool) -> None:
        """Add whole lines, written within a second, or `soon`; `wait`: until the store has them. Raises what `check`
        raises."""
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
                self._write(data)
            except Exception as error:  # whatever it is, it is raised where the next line is added
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._stored += len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        """Add lines to the object that this process has read or written last."""
        parts, data = self._parts, self._data + data
        if len(self._data) >= PART_BYTES:
            key = f"{PARTS}/{hashlib.sha256(self._data).hexdigest()[:32]}.jsonl"
            self._store.write(key, self._data)
            parts, data = (*parts, key), data[len(self._data) :]
        whole = (json.dumps({"parts": parts}) + "\n").encode() * bool(parts) + data
        try:
            if self._conditions:
                etag = self._store.write(JOURNAL, whole, if_absent=self._etag is None, if_match=self._etag)
            else:
                self._wait_for_lease()
                if self._etag_there() != self._etag:
                    raise self._taken()
                etag = self._store.write(JOURNAL, whole)
        except StorePreconditionError as error:
            raise self._taken() from error
        self._data, self._etag, self._parts = data, etag, parts

    def _etag_there(self) -> str | None:
        try:
            return self._store.head(JOURNAL).etag
        except StoreNotFoundError:
            return None

    def _wait_for_lease(self) -> None:
        """Wait until the lease is renewed (late if the store was away): success means that no other process took it."""
        end = time.monotonic() + self._store.timeout_s
        while self._lease.lost is None and self._lease.age_s >= lease.STALE_S:
            if time.monotonic() >= end:
                raise StoreTimeoutError(
                    f"write {self._store.url}: the lease of the study was not renewed for {self._lease.age_s:.0f} s: "
                    "check the network, or give a larger store_timeout"
                )
            time.sleep(LEASE_POLL_S)
        self._lease.check()

    def _taken(self) -> LeaseLostError:
        return LeaseLostError(
            f"{self._store.url}: another driver has written {JOURNAL}: it has this study now, and this one ends"
        )
