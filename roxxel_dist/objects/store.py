"""Objects below a prefix of a bucket: read, written, listed and deleted, with retries inside a time limit."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roxxel_dist.objects.connect import connect
from roxxel_dist.objects.errors import StoreError, StoreNotFoundError, StorePreconditionError
from roxxel_dist.objects.failures import Failure, Retries, ShortBodyError, failure_of
from roxxel_dist.objects.url import ObjectUrl, checked_key
from roxxel_dist.process.durable import sync_folder
from roxxel_dist.process.exit_codes import UserError

TIMEOUT_S = 120.0
REQUEST_S = 30.0
"""The time limit of one request, its body included: 8 parts in parallel take that long at 1.1 MB/s."""
UPLOAD_REQUEST_S = 120.0
PART = 4 << 20
UPLOAD_PART = 8 << 20
MULTIPART = 16 << 20
"""Larger objects are sent in parts."""
PARTS = 9000
"""S3 allows at most 10,000 parts per object."""
THREADS = 16
UPLOAD_THREADS = 4
PROBE = ".roxxel-probe-"

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """The metadata of an object, by its key below the prefix of the store."""

    key: str
    size: int
    etag: str
    """Without quotes; it changes when the object is written again."""
    modified: float
    """Seconds since 1970, by the server's clock."""


class ObjectStore:
    """A prefix in a bucket. Thread-safe, but a forked process must open its own store. Each operation is retried until
    `timeout_s` after its first try, and then raises; see `objects.errors`."""

    def __init__(self, url: ObjectUrl, reads: Any, uploads: Any, timeout_s: float) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._reads = reads
        self._uploads = uploads
        self._retries = Retries(timeout_s, self._meaning)
        self._conditions: bool | None = None

    @classmethod
    def open(cls, url: "str | os.PathLike[str] | ObjectUrl", *, timeout_s: float = TIMEOUT_S) -> "ObjectStore":
        """The store at an address. No request is made.

        Raises ValueError: `url` is not the address of objects, or `timeout_s` is not positive. MissingLibraryError:
        obstore is not installed. StoreDeniedError: the credential settings are not usable.
        """
        if not timeout_s > 0:
            raise UserError(f"store_timeout is {timeout_s}: it must be a number of seconds above 0")
        parsed = ObjectUrl.parse(url)
        reads = connect(parsed, request_s=min(REQUEST_S, timeout_s), retry_s=0)
        uploads = connect(parsed, request_s=min(UPLOAD_REQUEST_S, timeout_s), retry_s=timeout_s)
        return cls(parsed, reads, uploads, timeout_s)

    def __repr__(self) -> str:
        return f"ObjectStore({str(self.url)!r})"

    def head(self, key: str) -> ObjectInfo:
        """The metadata of an object. Raises StoreNotFoundError: there is none."""
        from obstore import head

        meta = self._run("look at", key, lambda path: head(self._reads, path))
        return self._info(meta)

    def read(self, key: str, *, etag: str | None = None) -> bytes:
        """A whole object, of the version `etag` where that is given.

        Raises StoreNotFoundError: there is none. StorePreconditionError: it is another one than `etag` says.
        """
        from obstore import get

        def call(path: str) -> bytes | ObjectInfo:
            result = get(self._reads, path, options=_match(etag))
            if result.meta["size"] > MULTIPART:  # in parts, so that each request is short
                return self._info(result.meta)
            return _of_length(bytes(result.bytes()), result.meta["size"])

        data = self._run("read", key, call)
        if isinstance(data, bytes):
            return data
        return b"".join(self.read_ranges(key, _parts(data.size), etag=data.etag))

    def read_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Bytes `start` to `stop` (exclusive) of an object, exactly that many.

        Raises ValueError: the range is empty or negative. StoreNotFoundError: there is no such object.
        StorePreconditionError: it has another etag than `etag`. StoreError: the object ends before `stop`.
        """
        from obstore import get

        if not 0 <= start < stop:
            raise UserError(f"bytes {start}-{stop} of {self.url.join(key)}: a range must have at least one byte")

        def call(path: str) -> bytes:
            result = get(self._reads, path, options=_match(etag) | {"range": (start, stop)})
            if result.meta["size"] < stop:
                size = result.meta["size"]
                raise StoreError(f"read {self.url.join(key)} bytes {start}-{stop}: the object has only {size} bytes")
            return _of_length(bytes(result.bytes()), stop - start)

        return self._run("read", key, call, (start, stop))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> Sequence[bytes]:
        """Several ranges of an object, in parallel, one request each; see `read_range`."""
        return self._parallel(lambda span: self.read_range(key, *span, etag=etag), ranges, THREADS)

    def list_folder(self, folder: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """The objects directly in a folder, and the names of the folders in it, both sorted: what lies deeper is not
        listed."""
        from obstore import list_with_delimiter

        url = self.url.join(folder.strip("/"))
        found = self._retries.run("list", url, lambda _: list_with_delimiter(self._reads, url.key or None))
        infos = [self._info(meta) for meta in found["objects"]]
        names = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        return sorted(infos, key=lambda info: info.key), sorted(names)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """The objects below a prefix of whole key parts: "a" includes a/b, but not ab. Sorted by key."""
        from obstore import list as pages

        infos: dict[str, ObjectInfo] = {}

        def call(_: int) -> None:
            last = self.url.join(max(infos)).key if infos else None
            for page in pages(self._reads, url.key or None, offset=last, chunk_size=1000):
                for meta in page:
                    info = self._info(meta)
                    infos[info.key] = info

        url = self.url.join(prefix.strip("/"))
        self._retries.run("list", url, call)
        return [infos[key] for key in sorted(infos)]

    def write(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Write an object, whole or not at all, and return its etag.

        With `if_absent` only if there is no such object, with `if_match` only if it has this etag. Some stores accept
        conditions but ignore them: see `supports_conditions`. Raises StorePreconditionError: the condition failed.
        """
        if len(data) > MULTIPART and not if_absent and if_match is None:
            return self._upload(key, data, len(data))
        from obstore import put

        def call(path: str, tries: int) -> str:
            try:
                mode = self._mode(path, if_absent=if_absent, if_match=if_match)
                return _plain(put(self._reads, path, data, mode=mode, use_multipart=False)["e_tag"])
            except Exception as error:
                # An earlier try may have succeeded, with its response lost.
                is_again = tries and self._meaning(error, url).kind is StorePreconditionError
                if is_again and (etag := self._etag_of(key, data)) is not None:
                    return etag
                raise

        url = self._object(key)
        return self._retries.run("write", url, lambda tries: call(url.key, tries))

    def upload(self, path: Path, key: str) -> str:
        """Write a file as an object, whole or not at all, and return its etag."""
        size = path.stat().st_size
        return self.write(key, path.read_bytes()) if size <= MULTIPART else self._upload(key, path, size)

    def download(self, key: str, path: Path, *, etag: str | None = None) -> None:
        """Write an object as a file, whole or not at all: under a hidden name beside it, fsynced, renamed.

        Raises StoreNotFoundError: there is none. StorePreconditionError: it has another etag than `etag`, or was
        replaced meanwhile.
        """
        info = self.head(key)
        etag = etag or info.etag
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            try:

                def fetch(span: tuple[int, int]) -> None:
                    view, at = memoryview(self.read_range(key, *span, etag=etag)), span[0]
                    while view:
                        done = os.pwrite(file, view, at)
                        view, at = view[done:], at + done

                self._parallel(fetch, _parts(info.size), THREADS // 2)
                os.fsync(file)
            finally:
                os.close(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing objects are not an error."""
        from obstore import delete

        def one(key: str) -> None:
            with suppress(StoreNotFoundError):
                self._run("delete", key, lambda path: delete(self._reads, path))

        self._parallel(one, keys, THREADS)

    def supports_conditions(self) -> bool:
        """Whether the store obeys `if_absent` and `if_match`; tested once, with a small object that is deleted
        again."""
        if self._conditions is None:
            key = PROBE + os.urandom(8).hex()
            try:
                self.write(key, b"probe", if_absent=True)
                self._conditions = self._refuses(key, if_absent=True) and self._refuses(key, if_match="0" * 32)
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                self._conditions = False  # the store refuses conditions
            finally:
                with suppress(StoreError):
                    self.delete([key])
        return self._conditions

    def _refuses(self, key: str, *, if_absent: bool = False, if_match: str | None = None) -> bool:
        try:
            self.write(key, b"probe again", if_absent=if_absent, if_match=if_match)
        except StorePreconditionError:
            return True
        return False

    def _object(self, key: str) -> ObjectUrl:
        checked_key(key)
        return self.url.join(key)

    def _run(self, operation: str, key: str, call: Callable[[str], T], span: tuple[int, int] | None = None) -> T:
        url = self._object(key)
        return self._retries.run(operation, url, lambda _: call(url.key), span)

    def _meaning(self, error: Exception, url: ObjectUrl) -> Failure:
        """The meaning of an error. A HEAD response has no body with details, so it also lists the bucket."""
        failure = failure_of(error, url)
        if failure.is_vague and not (failure.kind is StoreNotFoundError and self._retries.has_answered):
            from obstore import list as pages

            try:
                for _ in pages(self._reads, url.key, chunk_size=1):
                    break
            except Exception as second:
                more = failure_of(second, url)
                if more.is_of_bucket or more.kind is failure.kind:
                    return more
        return failure

    def _info(self, meta: Any) -> ObjectInfo:
        below = f"{self.url.key}/" if self.url.key else ""
        key, modified = meta["path"].removeprefix(below), meta["last_modified"].timestamp()
        return ObjectInfo(key=key, size=meta["size"], etag=_plain(meta["e_tag"]), modified=modified)

    def _mode(self, path: str, *, if_absent: bool, if_match: str | None) -> Any:
        if if_match is None:
            return "create" if if_absent else "overwrite"
        if self.url.scheme != "gs":
            return {"e_tag": _quoted(if_match)}
        from obstore import head

        meta = head(self._reads, path)  # for Google, conditions use the generation
        if _plain(meta["e_tag"]) != if_match:
            raise StorePreconditionError(
                f"write {self.url.scheme}://{self.url.bucket}/{path}: the object was replaced in the meantime"
            )
        return {"e_tag": meta["e_tag"], "version": meta["version"]}

    def _etag_of(self, key: str, data: bytes) -> str | None:
        """The etag of an object if it has the content `data`; otherwise None."""
        info = self.head(key)
        with suppress(StorePreconditionError):
            if info.size == len(data) and self.read(key, etag=info.etag) == data:
                return info.etag
        return None

    def _upload(self, key: str, source: Path | bytes, size: int) -> str:
        """Write an object in parts; obstore retries each part."""
        from obstore import put

        part = max(UPLOAD_PART, -(-size // PARTS))

        def call(path: str) -> str:
            done = put(self._uploads, path, source, chunk_size=part, max_concurrency=UPLOAD_THREADS)
            return _plain(done["e_tag"])

        return self._run("write", key, call)

    def _parallel(self, call: Callable[[T], S], values: Sequence[T], threads: int) -> Sequence[S]:
        """`call` of each value, in their order; the first error ends it."""
        if len(values) < 2:
            return list(map(call, values))
        pool = ThreadPoolExecutor(min(threads, len(values)))
        try:
            return list(pool.map(call, values))
        finally:
            pool.shutdown(cancel_futures=True)


def _parts(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + PART, size)) for start in range(0, size, PART)]


def _of_length(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ShortBodyError(f"only {len(data)} of {length} bytes arrived")
    return data


def _plain(etag: str | None) -> str:
    return (etag or "").strip('"')


def _quoted(etag: str) -> str:
    return etag if etag.startswith("W/") else f'"{etag}"'


def _match(etag: str | None) -> Any:
    return {} if etag is None else {"if_match": _quoted(etag)}
