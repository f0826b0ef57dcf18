"""A run by its name, a folder or an address in a bucket: which of the two, and a request to save there. No jax."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.checkpoint.metadata import CHECKPOINTS
from roxxel_dist.objects.errors import StoreNotFoundError
from roxxel_dist.objects.url import ObjectUrl, is_url
from roxxel_dist.place.bucket_folder import LEASE, BucketFolder
from roxxel_dist.place.directory import CONFIG, is_held
from roxxel_dist.process.durable import ANSWER, REQUEST, SAVE_FOLDER, save_mailbox
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectStore
    from roxxel_dist.place.bucket_run import BucketRun

RunName = str | os.PathLike[str]


def bucket_url(name: RunName | None) -> ObjectUrl | None:
    """The address of a run, or of a study, in a bucket; None for a folder and for no name. Raises UserError for an
    address that names no bucket."""
    return ObjectUrl.parse(name) if name and is_url(name) else None


def local_folder(name: RunName | None) -> Path | None:
    """The folder that a name means by itself; None for a run in a bucket and for no name."""
    return Path(name) if name and not is_url(name) else None


def bucket_folder(run: RunName, local_dir: str | Path | None = None, *, read_only: bool = True) -> BucketFolder | None:
    """The local folder of a run in a bucket, to fetch its files into; None where the run is a folder."""
    return BucketFolder(run, local_dir, read_only=read_only) if is_url(run) else None


def bucket_run(run: RunName) -> BucketRun | None:
    """A run in a bucket with its checkpoints, to be read: jax is imported for it. None where the run is a folder."""
    if not is_url(run):
        return None
    from roxxel_dist.place.bucket_run import BucketRun

    return BucketRun(run, read_only=True)


def local_run(run: RunName, local_dir: str | Path | None = None, *, read_only: bool = True) -> Path:
    """The folder of a run: as named or, of one in a bucket, a local one with its files; checkpoints come when read."""
    bucket = bucket_folder(run, local_dir, read_only=read_only)
    return Path(run) if bucket is None else bucket.pull()


POLL_S, BUCKET_POLL_S = 0.1, 1.0


class NotSaved(Exception):
    """The job did not save the requested checkpoint."""


def ask_for_checkpoint(run: str | Path, timeout_s: float) -> int:
    """Have the job that trains in `run` save within two seconds or steps, wait until that is on disk; returns the step.

    Raises ValueError: `run` is not a run directory or the address of a run, or no job trains there. OSError: `run`
    cannot be written. NotSaved: the job failed to save, ended, or did not answer in time.
    """
    if (url := bucket_url(run)) is not None:
        return _ask_through_bucket(url, timeout_s)
    folder = Path(run)
    if not folder.is_dir():
        raise UserError(f"{run} is not a run directory: there is no such folder")
    if not ((folder / CONFIG).exists() or (folder / CHECKPOINTS).is_dir()):
        raise UserError(f"{run} is not a run directory: it has no {CONFIG}")
    if not is_held(folder):
        raise UserError(f"no job trains in {run} now: its checkpoints are in {folder / CHECKPOINTS}")
    mailbox, end = save_mailbox(folder), time.monotonic() + timeout_s
    name = mailbox.post({})
    try:
        while time.monotonic() < end:
            held = is_held(folder)  # before the last look: the job may answer and end in between
            if (answer := mailbox.take_answer(name)) is not None:
                return _step_of(answer)
            if not held:
                raise NotSaved(f"the job in {folder} ended before it saved: what it has is in {folder / CHECKPOINTS}")
            time.sleep(POLL_S)
    finally:
        mailbox.withdraw(name)
    longer = argument("timeout", "SECONDS")
    raise NotSaved(f"the job in {folder} did not save within {timeout_s:g} s: see its log; wait longer with {longer}")


def _step_of(answer: Mapping[str, Any]) -> int:
    if "error" in answer:
        raise NotSaved(answer["error"])
    return answer["step"]


def _ask_through_bucket(url: ObjectUrl, timeout_s: float) -> int:
    """The same of a run in a bucket, where rank 0 looks for requests every few seconds."""
    from roxxel_dist.objects.store import ObjectStore

    store, end = ObjectStore.open(url), time.monotonic() + timeout_s
    try:
        store.head(CONFIG)
    except StoreNotFoundError:
        raise UserError(f"{store.url} is not a run: it has no {CONFIG}") from None
    request = f"{SAVE_FOLDER}/{secrets.token_hex(8)}{REQUEST}"
    store.write(request, b"{}")
    answer = request.removesuffix(REQUEST) + ANSWER
    while True:
        if (reason := _nobody(store)) or time.monotonic() > end:
            store.delete([request])
            raise NotSaved(reason or f"the job in {store.url} did not save within {timeout_s:g} s: see its log")
        time.sleep(BUCKET_POLL_S)
        with contextlib.suppress(StoreNotFoundError):
            found = json.loads(store.read(answer))
            store.delete([answer])
            return _step_of(found)


def _nobody(store: ObjectStore) -> str:
    """Why no job would answer, from the lease of the run; empty if a job trains there."""
    try:
        released = json.loads(store.read(LEASE))["released"]
    except (StoreNotFoundError, ValueError, KeyError):
        released = True
    return f"no job trains in {store.url} now: its checkpoints are there" if released else ""
