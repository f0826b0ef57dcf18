"""A run that is kept in a bucket: the lease of the job that trains in it, its checkpoints, the mirror of the rest."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from roxxel_dist.checkpoint.digests import files_below
from roxxel_dist.checkpoint.metadata import CHECKPOINTS
from roxxel_dist.checkpoint.remote import RemoteCheckpoints
from roxxel_dist.cluster.distributed import is_primary, process_index
from roxxel_dist.objects.errors import StoreError
from roxxel_dist.place.bucket_folder import DATA, LEASE, LOGS, BucketFolder
from roxxel_dist.place.mirror import RunMirror

if TYPE_CHECKING:
    from roxxel_dist.objects.lease import Lease


class BucketRun(BucketFolder):
    """A run below a prefix of a bucket, to be trained, or to be read with its checkpoints.

    Args and errors are those of `BucketFolder`.

    Attributes:
        checkpoints: those of the run.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        local_dir: str | Path | None = None,
        *,
        read_only: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(url, local_dir, read_only=read_only, timeout_s=timeout_s)
        self.checkpoints: RemoteCheckpoints = RemoteCheckpoints(
            self._store, self.folder / CHECKPOINTS, before_table=self._before_table, check_run=self.check
        )
        self._lease: Lease | None = None
        self._mirror: RunMirror | None = None

    def take(self) -> None:
        """Take the lease, on rank 0, so that no other process trains in the run, and fetch the newest files.

        Raises ValueError if another process has it; the message names that process and its last sign of life.
        """
        from roxxel_dist.objects.lease import Lease

        job = os.environ.get("ROXXEL_RUN_ID")
        self._lease = Lease.take(self._store, LEASE, "roxxel-dist train", job=job)
        self._holds = True
        self.pull()

    def begin(self) -> None:
        """Send the files of the folder, and from now on its changes; on every rank."""
        own = f"{LOGS}/rank-{process_index()}.log"

        def is_mine(name: str) -> bool:
            if is_primary():
                return not name.startswith(f"{DATA}/") and (not name.startswith(f"{LOGS}/rank-") or name == own)
            return name == own or name.startswith("profile/")

        self._mirror = RunMirror(self._store, self.folder, is_mine, serves=is_primary())
        for name, state in self._fetched.items():
            if is_mine(name):
                self._mirror.fetched(name, state)
        self._mirror.flush()
        self._mirror.start()

    def send_data(self) -> None:
        """Send, on rank 0, the shards made from a text, before the run's config: only that makes the run valid."""
        self._store.delete([info.key for info in self._store.list(f"{DATA}/")])
        for path in files_below(self.folder / DATA):
            if not path.name.startswith("."):
                self._store.upload(path, str(path.relative_to(self.folder)))

    def fetch_data(self) -> None:
        """Fetch those shards, where this host does not have them."""
        for info in self._store.list(f"{DATA}/"):
            self._pull(info)

    def check(self) -> None:
        """Raises what ended the mirror, such as StoreError, and LeaseLostError where another job has the run."""
        if self._mirror is not None:
            self._mirror.check()
        if self._lease is not None and self._lease.lost is not None:
            self._lease.check()

    def _before_table(self) -> None:
        if self._mirror is not None:
            self._mirror.flush_rows()
        if self._lease is not None:
            self._check_renewed(self._lease)

    @staticmethod
    def _check_renewed(lease: Lease) -> None:
        """Raises LeaseLostError where another job may have the run by now; after a store that was away for long, the
        next renewal is waited for."""
        from roxxel_dist.objects.lease import RENEW_S, LeaseLostError

        end = time.monotonic() + 2 * RENEW_S
        while True:
            try:
                return lease.check()
            except LeaseLostError:
                if lease.lost is not None or time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def close(self, limit_s: float | None = None) -> None:
        """Send what is left, within so many seconds where given, and let the run go. Raises StoreError."""
        try:
            if self._mirror is not None:
                self._mirror.close(limit_s)
        finally:
            self._mirror = None
            if self._lease is not None:
                self._lease.release()
            self._lease = None

    def abandon(self, limit_s: float) -> None:
        """`close` after a failure: files that cannot be sent within so many seconds stay local."""
        with contextlib.suppress(StoreError):
            self.close(limit_s)
