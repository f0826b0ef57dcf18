"""A build into a bucket: the files are made in a folder of the cache, sent shard by shard, and indexed last."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from roxxel_dist.cluster.durable import cache_folder
from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import ENDING
from roxxel_dist.data.files.writer import BUILD_FILE
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX
from roxxel_dist.data.remote.publish import copy_data
from roxxel_dist.objects.copy import Sender
from roxxel_dist.objects.copy_record import RECORD
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.tree import FolderSource
from roxxel_dist.utils.progress import Progress
from roxxel_dist.utils.voice import argument

BUILDS = "builds"
FIRST = "00000" + ENDING


@dataclass(frozen=True, kw_only=True)
class BucketOut:
    """The destination of a build in a bucket.

    Attributes:
        store: the prefix of the data set.
        folder: the folder on this host where it is made; removed once the data set is in the bucket.
        shards: names of the shards in the bucket.
        is_whole: whether the data set in the bucket has an index.
        config: settings to read the bucket.
    """

    store: ObjectStore
    folder: Path
    shards: tuple[str, ...]
    is_whole: bool
    config: RemoteConfig

    @classmethod
    def open(cls, url: str | os.PathLike[str], config: RemoteConfig) -> "BucketOut":
        """The destination at an address. Raises StoreError if the bucket cannot be used."""
        store = ObjectStore.open(url, timeout_s=config.store_timeout)
        cache = Path(config.cache_dir).expanduser().absolute() if config.cache_dir else cache_folder()
        folder = cache / BUILDS / xxhash.xxh3_64_hexdigest(str(store.url).encode())
        there = [info.key for info in store.list()]
        shards = tuple(key for key in there if key.endswith(ENDING))
        is_whole = any(key.rpartition("/")[2] == INDEX for key in there)
        return cls(store=store, folder=folder, shards=shards, is_whole=is_whole, config=config)

    def holds(self, split: str, record: Callable[..., bytes]) -> bool:
        """Whether a split is in the bucket, by its `build.json`; `record` makes that file from the fingerprint."""
        try:
            data = self.store.read(f"{split}/{BUILD_FILE}".lstrip("/"))
            with self.opened(split) as dataset:
                return json.loads(data) == json.loads(record(fingerprint=dataset.fingerprint))
        except (StoreNotFoundError, ValueError):
            return False

    def opened(self, split: str) -> Roxxel:
        """The data set of a split in the bucket."""
        return Roxxel(str(self.store.url.join(split)), remote=self.config)

    def check_free(self) -> None:
        """Raises ValueError if the bucket has a data set, and no build into it was started on this host."""
        if self.is_whole or (self.shards and not self.folder.exists()):
            which = ", ".join(self.shards[:3])
            raise UserError(
                f"{self.store.url} holds another data set ({which}): choose another place, or replace it with "
                f"{argument('overwrite')}"
            )

    @contextmanager
    def sending(self, log: Progress) -> Iterator[Callable[[str, Path], None]]:
        """Send a build made within it to the bucket; call the yielded function with each complete shard.

        If the build fails, the objects that it has sent are deleted.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sent: list[str] = []
        sender = Sender(self.store)
        pool = ThreadPoolExecutor(2)

        is_away = threading.Event()

        def send(name: str, path: Path) -> None:
            try:
                if not is_away.is_set():
                    sender.send(name, path)
            except OSError:  # it is sent again at the end, where a failure is an error
                is_away.set()

        def finished(split: str, path: Path) -> None:
            name = f"{split}/{path.name}".lstrip("/")
            if not self.is_whole and not name.endswith(FIRST):
                sent.append(name)
                pool.submit(send, name, path)

        try:
            try:
                yield finished
            finally:
                pool.shutdown(cancel_futures=True)
                with suppress(StoreError):
                    sender.flush()
        except BaseException:
            with suppress(StoreError):
                self.store.delete([*sent, RECORD])
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        source = FolderSource(self.folder)
        files = source.files()
        with log.bar(f"sending to {self.store.url}", max(1, sum(file.size for file in files))) as advance:
            copy_data(source, self.store, files, advance=advance, overwrite=True)
        shutil.rmtree(self.folder)
