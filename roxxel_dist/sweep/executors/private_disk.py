"""A trial of a study in a bucket, on a host that shares no disk with the others: its files are in the host's cache."""

import os
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roxxel_dist.objects.errors import StoreError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.place.bucket_folder import BucketFolder
from roxxel_dist.process.durable import cache_folder
from roxxel_dist.sweep.trial.task import TrialTask
from roxxel_dist.sweep.trial.trial import Event, config_file, run
from roxxel_dist.sweep.wandb_bridge.server import agent_trial

SEND_S = 4.0
"""Seconds to send a trial's log: fewer than `ray_executor.END_S` leaves after the save."""


def studies_folder(cache_dir: str | None) -> Path:
    """Where this host has its files of studies in buckets: below `cache_dir`, or the user's cache."""
    return Path(cache_dir or cache_folder()).absolute() / "studies"


def on_this_host(task: TrialTask) -> TrialTask:
    """The task with the paths of this host: those of the study count from the cache."""
    root = studies_folder(task.config.get("cache_dir"))
    local_dir = root / Path(task.run_dir).parts[0]
    corpus, data = task.corpus, task.data_path
    if corpus is not None:
        corpus, data = {**corpus, "folder": str(root / corpus["folder"])}, data and str(root / data)
    directory = task.directory if task.directory and os.path.isdir(task.directory) else None
    folder = BucketFolder(str(task.run_url), local_dir).folder
    paths: dict[str, Any] = {"run_dir": str(folder), "log": str(root / task.log), "local_dir": str(local_dir)}
    return replace(task, corpus=corpus, data_path=data, directory=directory, **paths)


def run_in_bucket(fields: Mapping[str, Any]) -> Iterator[Event]:
    """As `trial.run` or `server.agent_trial`; the log and the config go to the study when the attempt has ended.

    A trial that fails names the log's address there.
    """
    task = TrialTask(**fields)
    assert task.bucket is not None
    here = on_this_host(task)
    store = ObjectStore.open(task.bucket, timeout_s=SEND_S)
    events = (run if task.wandb_sweep is None else agent_trial)(asdict(here))
    try:
        for event in events:
            if (failure := event.get("fail")) and failure.get("log"):
                yield {"fail": {**failure, "log": str(store.url.join(*_key(task.log)))}}
            else:
                yield event
    finally:
        if isinstance(events, Generator):  # the trial ends here, and not when its events are collected
            events.close()
        for path, name in ((here.log, task.log), (config_file(here), config_file(task))):
            _send(store, Path(path), "/".join(_key(name)))


def _key(path: str | Path) -> tuple[str, ...]:
    """Of the object, by the parts of a path whose first one is the study's folder."""
    return Path(path).parts[1:]


def _send(store: ObjectStore, path: Path, key: str) -> None:
    """Send one of a trial's small files, if possible; none of them is needed to go on."""
    try:
        if path.is_file():
            store.upload(path, key)
    except (StoreError, OSError) as error:
        print(f"roxxel-dist: {path} is not in {store.url}: {error}", file=sys.stderr, flush=True)
