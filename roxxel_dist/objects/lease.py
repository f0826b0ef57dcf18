"""A lease: an object that names the process that writes to a run or a study in a bucket; its owner renews it.

If two owners believe that they hold it, as after a network cut, conditional writes of the data itself protect the data.
The lease refuses a second owner early, with the name of the first.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roxxel_dist.objects.errors import StoreError, StoreNotFoundError, StorePreconditionError
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import is_alive, print_line, process_record

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectStore

RENEW_S = 15.0
"""How often an owner renews its lease."""
STALE_S = 60.0
"""A lease that was not renewed for so long is free."""
POLL_S = 1.0
"""How often a waiting process reads the lease."""
SETTLE_S = 2.0
"""In a store without conditional writes: delay before an owner reads back the lease that it wrote."""
RELEASE_S = 5.0
"""How long an owner waits at its end for a renewal in progress; it does not wait longer for an unavailable store."""

logger: logging.Logger = logging.getLogger("roxxel_dist.objects")


class LeaseHeldError(UserError):
    """Another process holds the lease and renews it."""


class LeaseLostError(RuntimeError):
    """Another process has taken the lease, or may have, because it could not be renewed for too long."""


class Lease:
    """A lease that this process holds while the context is open. Create it with `take`. Its age is measured by the
    store's clock, so hosts with different clocks agree."""

    def __init__(
        self, store: "ObjectStore", key: str, record: dict[str, Any], etag: str, began: float, *, conditions: bool
    ) -> None:
        """For `take`, which began to write the record at that time; `etag` is its ETag."""
        self._store, self._key, self._conditions = store, key, conditions
        self._record, self._etag = record, etag
        self._renewed, self._trouble = began, ""
        self._lost: str | None = None
        self._over, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._renew_until_over, name="lease", daemon=True)

    @classmethod
    def take(
        cls,
        store: "ObjectStore",
        key: str,
        owner: str,
        *,
        job: str | None = None,
        wait_s: float = 0.0,
        log: Callable[[str], None] = print_line,
    ) -> "Lease":
        """Take the lease under a key of a store, once it is free.

        It is free if it does not exist, or its owner released it, is a dead process of this host, belongs to the same
        job, or has not renewed it for 60 s. `take` waits that long for an owner that does not renew it.

        Args:
            store: a prefix that this process may write to.
            key: of the lease.
            owner: the name of the owner in messages: a command.
            job: an id that all attempts of a job share, if only one attempt lives at a time.
            wait_s: how long to wait for an owner that renews it.
            log: prints a line for the user.

        Raises LeaseHeldError: the owner renews it; the message has the owner and the age. StoreError: the store fails.
        """
        conditions = store.supports_conditions()
        if not conditions:
            log(f"{store.url}: this store has no conditional writes: make sure that only one process writes there")
        began, seen, server_time = time.monotonic(), None, None
        while True:
            other, etag, modified = _read(store, key)
            age_s = 0.0
            if other is not None and not _is_free(other, job):
                server_time = server_time or _server_time(store, key)
                age_s = max(0.0, server_time() - modified)
            if other is None or _is_free(other, job) or age_s >= STALE_S:
                if lease := cls._claim(store, key, {"owner": owner, "job": job}, etag, conditions=conditions):
                    return lease
                continue  # another process was first
            if seen is None:
                log(
                    f"waiting for {_name(other)}, which renewed its lease of {store.url} {age_s:.0f} s ago. The wait "
                    f"ends when that process ends, or has not renewed the lease for {STALE_S:g} s"
                )
            elif etag != seen and time.monotonic() - began >= wait_s:
                raise LeaseHeldError(
                    f"{store.url}: {_name(other)} writes there, and renewed its lease ({key}) {age_s:.0f} s ago: "
                    "end that process, or name another place"
                )
            seen = seen or etag
            time.sleep(POLL_S)

    @classmethod
    def _claim(
        cls, store: "ObjectStore", key: str, named: dict[str, Any], etag: str | None, *, conditions: bool
    ) -> "Lease | None":
        """The lease, written over the object with the ETag (None: no object); None if another process was first."""
        own = {"id": token_hex(8), "time": time.time(), "renewals": 0, "released": False}
        record, began = {**named, **process_record(), **own}, time.monotonic()
        try:
            if conditions:
                written = store.write(key, _encode(record), if_absent=etag is None, if_match=etag)
            else:
                written = store.write(key, _encode(record))
                time.sleep(SETTLE_S)
                if (_read(store, key)[0] or {}).get("id") != record["id"]:
                    return None
        except (StorePreconditionError, StoreNotFoundError):
            return None
        lease = cls(store, key, record, written, began, conditions=conditions)
        lease._thread.start()
        return lease

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def lost(self) -> str | None:
        """A message with the process that has taken the lease; None as long as this process has not seen one."""
        return self._lost

    @property
    def age_s(self) -> float:
        """The seconds since the start of the last successful renewal."""
        return time.monotonic() - self._renewed

    def check(self) -> None:
        """Call it before a write without a condition. Raises LeaseLostError if another process has taken the lease, or
        may have, because it was not renewed for 60 s."""
        if self._lost is None and self.age_s >= STALE_S and not self._trouble:
            self._renew()  # this process did not run: the store says whether the lease is still its own
        if self._lost is not None:
            raise LeaseLostError(self._lost)
        if self.age_s >= STALE_S:
            raise LeaseLostError(
                f"{self._store.url}: the lease ({self._key}) could not be renewed for {self.age_s:.0f} s "
                f"({self._trouble or 'this process did not run'}): another process may have it now"
            )

    def release(self) -> None:
        """Release it. It is not deleted: that would need a condition too, and so its last owner stays readable."""
        if self._end():
            with suppress(StoreError):  # it expires by itself
                self._write(released=True)

    def discard(self) -> None:
        """Release and delete it: for an owner that has written nothing else. Raises StoreError."""
        if self._end():
            self._store.delete([self._key])

    def _end(self) -> bool:
        """Stop the renewals; returns whether this process still holds the lease, as far as it knows."""
        self._over.set()
        self._thread.join(RELEASE_S)
        return self._lost is None and not self._thread.is_alive()

    def _renew_until_over(self) -> None:
        while not self._over.wait(max(POLL_S, RENEW_S - self.age_s)):
            self._renew()
            if self._lost is not None:
                return

    def _renew(self) -> None:
        with self._renewing:
            began = time.monotonic()
            try:
                self._write(released=False)
            except (StorePreconditionError, StoreNotFoundError):
                self._lost = self._taken()
                logger.error("%s", self._lost)
            except StoreError as error:  # try again: the lease is still ours unless another process can take it
                self._trouble = str(error)
            else:
                self._renewed, self._trouble = began, ""

    def _write(self, *, released: bool) -> None:
        """Renew or release the lease. Raises StorePreconditionError or StoreNotFoundError if it was lost."""
        record = {**self._record, "renewals": self._record["renewals"] + 1, "time": time.time(), "released": released}
        if self._conditions:
            self._etag = self._store.write(self._key, _encode(record), if_match=self._etag)
        else:
            other, etag, _ = _read(self._store, self._key)
            if other is None or other.get("id") != record["id"]:
                raise StorePreconditionError(f"{self._store.url}: {self._key} belongs to another process (ETag {etag})")
            self._store.write(self._key, _encode(record))
        self._record = record

    def _taken(self) -> str:
        other = None
        with suppress(StoreError):
            other = _read(self._store, self._key)[0]
        who = "nobody" if other is None else _name(other)
        return f"{self._store.url}: the lease ({self._key}) of this process was taken away: {who} has it now"


def is_renewed(store: "ObjectStore", key: str) -> bool:
    """Whether a lease has an owner that renews it, assuming equal clocks of this host and the store. Raises
    StoreError."""
    record, _, modified = _read(store, key)
    return record is not None and not _is_free(record, None) and time.time() - modified < STALE_S


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode()


def _read(store: "ObjectStore", key: str) -> tuple[dict[str, Any] | None, str | None, float]:
    """(the record of a lease, its ETag, the time of the write by the store's clock); (None, None, 0) without an
    object."""
    while True:
        try:
            info = store.head(key)
            data = store.read(key, etag=info.etag)
        except StoreNotFoundError:
            return None, None, 0.0
        except StorePreconditionError:
            continue  # renewed between the two requests
        record: dict[str, Any] = {"released": True}  # an object that is not a lease counts as free
        with suppress(ValueError):
            read = json.loads(data)
            record = read if isinstance(read, dict) and {"pid", "host", "owner"} <= read.keys() else record
        return record, info.etag, info.modified


def _is_free(record: dict[str, Any], job: str | None) -> bool:
    """Whether a lease can be taken at once, whatever its age."""
    return bool(record.get("released")) or (job is not None and record.get("job") == job) or is_alive(record) is False


def _name(record: dict[str, Any]) -> str:
    if "owner" not in record:
        return "another process"
    return f"{record['owner']} (pid {record['pid']} on host {record['host']})"


def _server_time(store: "ObjectStore", key: str) -> Callable[[], float]:
    """A clock with the store's seconds since 1970: the time that an object written now would get."""
    probe = f"{key}.{token_hex(8)}"
    store.write(probe, b"what time is it")
    begin, modified = time.monotonic(), store.head(probe).modified
    store.delete([probe])
    return lambda: modified + time.monotonic() - begin
