"""A build into a bucket: the files are made in a folder of the cache, sent shard by shard, and indexed last."""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import BUILD_FILE, ENDING
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.remote.index import INDEX, write_index
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.process.durable import cache_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars
from roxxel_dist.utils.voice import argument

BUILDS = "builds"
THREADS = 4
"""Files that are sent at a time."""
FIRST = "00000" + ENDING


class SentFiles:
    """The files of a build that are in the bucket. Thread-safe. A file beside the folder of the build keeps them, a
    line each, so that what a build has sent before it was killed is not sent again."""

    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store, self._path, self._lock = store, folder.with_name(f"{folder.name}.sent"), threading.Lock()
        self._files: dict[str, list[str]] = {}  # name: digest, etag
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            with suppress(ValueError):  # a kill tore it
                self._files |= json.loads(line)

    def send(self, name: str, path: Path) -> None:
        """Send a file; it may be moved afterwards."""
        entry = [_digest(path), self._store.upload(path, name)]
        with self._lock:
            self._files[name] = entry
            with self._path.open("a") as file:
                file.write(f"{json.dumps({name: entry})}\n")

    def has(self, name: str, path: Path, etag: str | None) -> bool:
        """Whether the object of this etag has the bytes of a file."""
        return etag is not None and self._files.get(name) == [_digest(path), etag]

    def check(self, names: Iterable[str]) -> None:
        """Raises StoreError if the store has other objects than those sent."""
        there = {info.key: info.etag for info in self._store.list()}
        for name in names:
            if there.get(name) != self._files[name][1]:
                raise StoreError(
                    f"{self._store.url.join(name)}: it was replaced or deleted while the build was sent: start the "
                    "command again when no other program writes there"
                )

    def forget(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@dataclass(frozen=True, kw_only=True)
class BucketOut:
    """The destination of a build in a bucket."""

    store: ObjectStore
    folder: Path
    """Where it is made on this host; removed once the data set is in the bucket."""
    shards: tuple[str, ...]
    is_whole: bool
    """Whether the data set in the bucket has an index."""
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

    def record(self, split: str) -> bytes:
        """The `build.json` of a split in the bucket; empty where there is none."""
        try:
            return self.store.read(f"{split}/{BUILD_FILE}".lstrip("/"))
        except StoreNotFoundError:
            return b""

    def holds(self, split: str, record: Callable[..., bytes]) -> bool:
        """Whether a split is in the bucket, by its `build.json`; `record` makes that file from the fingerprint."""
        try:
            data = json.loads(self.record(split))
            with self.open_split(split) as dataset:
                return data == json.loads(record(fingerprint=dataset.fingerprint))
        except (StoreNotFoundError, ValueError):
            return False

    def open_split(self, split: str) -> Roxxel:
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
    def send_build(self, log: ProgressBars) -> Iterator[Callable[[str, Path], None]]:
        """Send a build made within it to the bucket; call the yielded function with each complete shard. If the build
        fails, the objects that it has sent are deleted."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sent, files = list[str](), SentFiles(self.store, self.folder)
        pool, is_away = ThreadPoolExecutor(2), threading.Event()

        def send(name: str, path: Path) -> None:
            try:
                if not is_away.is_set():
                    files.send(name, path)
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
        except BaseException:
            with suppress(StoreError):
                self.store.delete(sent)
            shutil.rmtree(self.folder, ignore_errors=True)
            files.forget()
            raise
        self._complete(files, log)
        shutil.rmtree(self.folder)
        files.forget()

    def _complete(self, sent: SentFiles, log: ProgressBars) -> None:
        """Send what is not there; without the first shard of a split, and its index, the others are not valid."""
        paths = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        paths = {name: paths[name] for name in sorted(paths) if not re.search(r"(^|/)\.", name)}
        splits = sorted({name.rpartition("/")[0] for name in paths if name.endswith(ENDING)})
        there = {info.key: info.etag for info in self.store.list()}
        replaced = [key for key in there if key.endswith(ENDING) and key.rpartition("/")[0] in splits]
        self.store.delete([key for key in there if key in {f"{split}/{INDEX}".lstrip("/") for split in splits}])
        self.store.delete([key for key in replaced if key not in paths])
        absent = [name for name in paths if not sent.has(name, paths[name], there.get(name))]
        total = sum(paths[name].stat().st_size for name in absent)
        with log.bar(f"sending to {self.store.url}", max(1, total)) as advance:

            def send(name: str) -> None:
                sent.send(name, paths[name])
                advance(paths[name].stat().st_size)

            for is_first in (False, True):
                pool = ThreadPoolExecutor(THREADS)
                try:
                    list(pool.map(send, [name for name in absent if name.endswith(FIRST) is is_first]))
                finally:
                    pool.shutdown(cancel_futures=True)
        sent.check(paths)
        for split in splits:
            write_index(ObjectStore.open(self.store.url.join(split), timeout_s=self.store.timeout_s))
