"""The files of a folder, or the objects below a prefix, as the source of a copy."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.objects.copy_record import RECORD, CopiedFile, CopyRecord
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError
from roxxel_dist.objects.store import ObjectStore
from roxxel_dist.objects.url import checked_key

CHUNK = 1 << 20
LEASE_SUFFIX = ".lease"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to copy.

    Attributes:
        name: relative to the source, with slashes.
        size: bytes.
        version: changes when the file is written again.
    """

    name: str
    size: int
    version: str


class Source(Protocol):
    """Where files are copied from."""

    def files(self) -> list[SourceFile]:
        """All files, sorted by name, except hidden ones and leases."""
        ...

    @contextmanager
    def local(self, file: SourceFile) -> Iterator[tuple[Path, str]]:
        """The path of the file's bytes on this host, within the context, and their xxh3-128."""
        ...


class FolderSource:
    """The files below a local folder.

    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            how = "is a file: name its folder" if folder.exists() else "is not there: correct the path"
            raise UserError(f"{folder} {how}")
        self.folder = folder

    def files(self) -> list[SourceFile]:
        """See `Source`."""
        contents = []
        for folder, folders, names in os.walk(self.folder, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.folder).as_posix()
                if _is_content(key):
                    contents.append(source_file(checked_key(key), path))
        return sorted(contents, key=lambda file: file.name)

    @contextmanager
    def local(self, file: SourceFile) -> Iterator[tuple[Path, str]]:
        """See `Source`. Raises ValueError if the file was written meanwhile."""
        path = self.folder / file.name
        yield path, digest(path)
        if source_file(file.name, path) != file:
            raise UserError(
                f"{path} was written to while it was copied: start the command again when no program writes to it"
            )

    def __str__(self) -> str:
        return str(self.folder)


class BucketSource:
    """The objects below a prefix, verified with the record of an earlier copy if there is one."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        data = None
        with suppress(StoreNotFoundError):
            data = store.read(RECORD)
        self._record = CopyRecord(data, lambda _: None)

    def files(self) -> list[SourceFile]:
        """See `Source`."""
        infos = [info for info in self.store.list() if _is_content(info.key)]
        return [SourceFile(name=checked_key(info.key), size=info.size, version=info.etag) for info in infos]

    @contextmanager
    def local(self, file: SourceFile) -> Iterator[tuple[Path, str]]:
        """See `Source`."""
        with tempfile.TemporaryDirectory(prefix="roxxel-copy-") as folder:
            path = Path(folder, "object")
            yield path, self.fetch(file, path)

    def fetch(self, file: SourceFile, path: Path) -> str:
        """Download an object to a path, and return its xxh3-128.

        Raises:
            StorePreconditionError: it was replaced meanwhile.
            StoreError: it was damaged twice, by the digest in the record of an earlier copy.
        """
        known = self._record.files.get(file.name)
        xxh3 = ""
        for _ in range(2):
            self.store.download(file.name, path, etag=file.version or None)
            xxh3 = digest(path)
            if known is None or known.etag != file.version or xxh3 == known.xxh3:
                return xxh3
        path.unlink()
        raise StoreError(f"copy {self.store.url.join(file.name)}: it does not agree with its digest: write it again")

    def __str__(self) -> str:
        return str(self.store.url)


def source_file(name: str, path: Path) -> SourceFile:
    """The `SourceFile` of a local file; its version does not change if it is moved."""
    status = path.stat()
    return SourceFile(name=name, size=status.st_size, version=f"{status.st_mtime_ns}-{status.st_ino}")


def digest(path: Path) -> str:
    """The xxh3-128 of a file, in hexadecimal."""
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def is_same(copied: CopiedFile | None, file: SourceFile) -> bool:
    """Whether a record matches this version of a file."""
    return copied is not None and (copied.size, copied.source) == (file.size, file.version)


def _is_content(key: str) -> bool:
    return not any(part.startswith(".") for part in key.split("/")) and not key.endswith(LEASE_SUFFIX)
