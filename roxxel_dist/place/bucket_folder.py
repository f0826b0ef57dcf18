"""The local folder of a run that is kept in a bucket: its path, and the files that are fetched into it. No jax.

The objects have the names of the files of a local run directory. On a host, training and reading use different folders.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META, TABLE
from roxxel_dist.data.files.discovery import ENDING
from roxxel_dist.objects.errors import StoreNotFoundError
from roxxel_dist.objects.url import ObjectUrl, is_url
from roxxel_dist.place.directory import CONFIG, DATA, LOGS, TOKENIZER
from roxxel_dist.process.durable import cache_folder, make_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK, is_held

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectInfo

LEASE = "run.lease"
NOT_FETCHED = ("profile/", "plots/")
"""Folders of a run that training never reads again, so they are not fetched; nor are hidden files."""
AT_ONCE = 16 << 20
"""Bytes of a file that are read into memory to be sent or fetched, so that it is one state of it."""
PIECE = 1 << 20
THREADS = 8
TRAINED, READ = "runs", "read"
"""Below the cache: the folders of runs that are trained, and of those that are only read."""


FileState = tuple[int, int]
"""Size, and time of the last change: with others it is another state of a file."""


def state_of(path: Path) -> FileState:
    """Raises OSError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def begins_with(path: Path, beginning: Path) -> bool:
    """Whether a file has the bytes of another one at its beginning. Raises OSError."""
    with path.open("rb") as file, beginning.open("rb") as other:
        while expected := other.read(PIECE):
            if file.read(len(expected)) != expected:
                return False
    return True


class BucketFolder:
    """A run below a prefix of a bucket, as this host has it.

    Args:
        url: the prefix, as the user writes it.
        local_dir: where the run has a folder on this host; by default in the user's cache.
        read_only: it is only read, and may be training here or elsewhere.
        timeout_s: the time limit of the store; its own where not given.

    Attributes:
        folder: the local run directory; its name says which run it is, so several runs may share `local_dir`.

    Raises:
        ValueError: `url` is no address of a prefix, or `local_dir` is one.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        local_dir: str | Path | None = None,
        *,
        read_only: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        from roxxel_dist.objects.store import ObjectStore

        self.url: ObjectUrl = ObjectUrl.parse(url)
        if not self.url.key:
            raise UserError(f"run_dir is {self.url}, a whole bucket: name a prefix in it, as in {self.url}/runs/mine")
        if local_dir is not None and is_url(local_dir):
            raise UserError(f"local_dir is {local_dir}: name a folder on a disk of each host")
        base = cache_folder() / (READ if read_only else TRAINED) if local_dir is None else Path(local_dir).absolute()
        self.folder: Path = base / self.url.scheme / self.url.bucket / self.url.key
        self._store = ObjectStore.open(self.url, **({} if timeout_s is None else {"timeout_s": timeout_s}))
        self._read_only = read_only
        self._holds = False  # whether this process is the only one of this host that trains in the folder
        self.objects: dict[str, ObjectInfo] = {}
        """What the bucket had at the last `pull`."""
        self._etags: dict[str, str] = {}  # of what a reader has fetched
        self._fetched: dict[str, FileState | None] = {}
        """The local file of a name, where it was what its object was; None where it was a newer state of it."""

    def __str__(self) -> str:
        return str(self.url)

    def pull(self) -> Path:
        """Bring what a reader, or a rank that begins, needs beside checkpoints into the folder, and return that.

        Local files that the bucket lacks are removed, except logs. A file that has grown here since it was sent stays,
        unless the run is only read: it is the newer one. While another process trains in the folder, nothing changes.

        Raises ValueError where a data set is there, and no run.
        """
        make_folder(self.folder)
        if not self._read_only and not self._holds and is_held(self.folder / LOCK, unknown=False):
            return self.folder
        self.objects = {info.key: info for info in self._list()}
        objects = {key: info for key, info in self.objects.items() if self._is_fetched(key)}
        if CONFIG not in objects:
            if shards := [key for key in objects if key.endswith(ENDING) and "/" not in key]:
                raise UserError(f"{self.url} holds a data set ({shards[0]}), and no run: name the address of a run")
            if TOKENIZER in objects and not self._read_only:  # a run sends its config before
                raise UserError(
                    f"run_dir is {self.url}, which has {TOKENIZER}, which no run made and a run would replace: name "
                    f"another prefix"
                )
            # No config: a run that never began left these objects, and those that lie deeper belong to other runs.
            deeper = (f"{LOGS}/", f"{CHECKPOINTS}/")
            objects = {key: info for key, info in objects.items() if "/" not in key or key.startswith(deeper)}
        for path in self._local_files():
            name = str(path.relative_to(self.folder))
            if name not in objects and not name.startswith((f"{LOGS}/", *NOT_FETCHED)):
                path.unlink(missing_ok=True)
        with ThreadPoolExecutor(THREADS) as threads:
            states = list(threads.map(self._pull, objects.values()))
        self._fetched = dict(zip(objects, states, strict=True))
        return self.folder

    def _list(self) -> list[ObjectInfo]:
        """The objects that a pull is about."""
        return self._store.list()

    def pull_newest_meta(self) -> Path | None:
        """Bring the `meta.json` of the newest checkpoint that counts into the folder; returns that of the checkpoint,
        None where there is none."""
        names = [info.key.split("/") for info in self._store.list(f"{CHECKPOINTS}/")]
        steps = [int(step) for _, step, *name in names if step.isdecimal() and name == [TABLE]]
        if not steps:
            return None
        checkpoint = self.folder / CHECKPOINTS / str(max(steps))
        make_folder(checkpoint)
        write_file(checkpoint / META, self._store.read(f"{CHECKPOINTS}/{checkpoint.name}/{META}"))
        return checkpoint

    def _is_fetched(self, key: str) -> bool:
        hidden = any(part.startswith(".") for part in key.split("/"))
        return not (hidden or key == LEASE or key.startswith((f"{CHECKPOINTS}/", *NOT_FETCHED)))

    def _local_files(self) -> list[Path]:
        top = [path for path in self.folder.iterdir() if path.name != CHECKPOINTS]
        paths = [file for path in top for file in (path.rglob("*") if path.is_dir() else [path])]
        return [path for path in paths if path.is_file() and not path.name.startswith(".")]

    def _pull(self, info: ObjectInfo) -> FileState | None:
        """Fetch one file; None where the local one is a newer state of it."""
        path = self.folder / info.key
        if self._read_only and self._etags.get(info.key) == info.etag and path.exists():
            return state_of(path)
        state = self._fetch(info, path)
        if self._read_only and state is not None:
            os.utime(path, (info.modified, info.modified))
            self._etags[info.key] = info.etag
        return state

    def _fetch(self, info: ObjectInfo, path: Path) -> FileState | None:
        make_folder(path.parent)
        with contextlib.suppress(StoreNotFoundError):  # deleted since it was listed
            if info.key.startswith(f"{DATA}/") and path.is_file() and path.stat().st_size == info.size:
                return state_of(path)  # shards prove themselves
            if info.size > AT_ONCE:
                return self._pull_large(info.key, path)
            data = self._store.read(info.key)
            here = path.read_bytes() if path.is_file() else None
            if here == data:
                return state_of(path)
            if here is not None and here.startswith(data) and not self._read_only:
                return None
            write_file(path, data)
            return state_of(path)
        path.unlink(missing_ok=True)
        return None

    def _pull_large(self, key: str, path: Path) -> FileState | None:
        """As `_pull`, for a file that is not read into memory: the object lies beside the local one meanwhile."""
        if not path.is_file():
            self._store.download(key, path)
            return state_of(path)
        fetched = path.with_name(f".{path.name}.fetched")
        try:
            self._store.download(key, fetched)
            if self._read_only or not begins_with(path, fetched):
                fetched.replace(path)
            elif path.stat().st_size > fetched.stat().st_size:
                return None
        finally:
            fetched.unlink(missing_ok=True)
        return state_of(path)
