"""The record of a copy: a small JSON object, or file, at its destination, from which the next try continues."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

RECORD = ".roxxel-copy.json"
"""Its name at the destination. It stays in a bucket: a copy back is verified with its digests."""
FLUSH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class CopiedFile:
    """A file that was copied.

    Attributes:
        size: bytes.
        xxh3: its xxh3-128, in hexadecimal.
        source: the version of the source file.
        etag: of the object at the destination; "" for a local file.
    """

    size: int
    xxh3: str
    source: str
    etag: str = ""


class CopyRecord:
    """The files that a copy has finished. Thread-safe.

    Args:
        data: the record of an earlier try, or None. An unreadable record counts as None.
        save: saves a record.
    """

    def __init__(self, data: bytes | None, save: Callable[[bytes], object]) -> None:
        self._save = save
        self._lock = threading.Lock()
        self._saved_at = time.monotonic()
        self.files: dict[str, CopiedFile] = {}
        try:
            self.files = {name: CopiedFile(**file) for name, file in json.loads(data or b"{}").get("files", {}).items()}
        except (ValueError, TypeError, AttributeError):
            self.files = {}

    def add(self, name: str, file: CopiedFile) -> None:
        """Add a file that is complete at the destination; the record is saved every few seconds."""
        with self._lock:
            self.files[name] = file
            if time.monotonic() - self._saved_at < FLUSH_S:
                return
            self._saved_at = time.monotonic()
            data = self._text()
            self._save(data)

    def flush(self) -> None:
        """Save it now."""
        with self._lock:
            self._save(self._text())

    def _text(self) -> bytes:
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        return json.dumps({"files": files}, indent=1).encode()
