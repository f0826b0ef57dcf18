"""The address of an object, or of all objects below a prefix: s3://bucket/key, gs://bucket/key, az://container/key."""

import os
import re
from dataclasses import dataclass

from roxxel_dist.process.exit_codes import UserError

SCHEMES = ("s3", "gs", "az")
# A Path replaces two slashes by one.
URL = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)|({'|'.join(SCHEMES)})://")
ANY_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,2}(.*)", re.DOTALL)


def is_url(path: object) -> bool:
    """Whether a text or a path is the address of an object. A Path with a single slash ("s3:/bucket") counts."""
    return isinstance(path, str | os.PathLike) and URL.match(str(path)) is not None


def as_written(path: "str | os.PathLike[str]") -> str:
    """The text of a path; that of an address with both slashes, of which a Path keeps one."""
    return str(ObjectUrl.parse(path)) if is_url(path) else str(path)


@dataclass(frozen=True)
class ObjectUrl:
    """The address of an object or of a prefix: s3, gs or az, the bucket (of az: the container), and the key, without a
    slash at either end; "" is the bucket itself."""

    scheme: str
    bucket: str
    key: str = ""

    @classmethod
    def parse(cls, text: "str | os.PathLike[str] | ObjectUrl") -> "ObjectUrl":
        """Parse an address. Raises ValueError: no known scheme, no bucket, or a key with an empty part, "." or ".."."""
        if isinstance(text, ObjectUrl):
            return text
        match = ANY_URL.fullmatch(str(text))
        scheme = match[1] if match else None
        if match is None or scheme not in SCHEMES:
            raise UserError(
                f"{str(text)!r} is not an address in a bucket: write s3://BUCKET/KEY, gs://BUCKET/KEY or az://BUCKET/KEY"
            )
        bucket, _, key = match[2].partition("/")
        key = key.rstrip("/")
        if not bucket:
            raise UserError(f"{str(text)!r} names no bucket: write {scheme}://BUCKET/KEY")
        return cls(scheme, bucket, checked_key(key) if key else "")

    def join(self, *parts: str) -> "ObjectUrl":
        """The address of an object below this one."""
        key = "/".join(part for part in (self.key, *parts) if part)
        return ObjectUrl(self.scheme, self.bucket, checked_key(key) if key else "")

    @property
    def name(self) -> str:
        """The last part of the key; for a bucket, its name."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "ObjectUrl":
        """The parent prefix; for a bucket, the bucket itself."""
        return ObjectUrl(self.scheme, self.bucket, self.key.rpartition("/")[0])

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")


def checked_key(key: str) -> str:
    """The key, if every store and a local folder support it. Raises ValueError: an empty part, "." or "..", or a
    control character."""
    if any(part in ("", ".", "..") for part in key.split("/")) or re.search(r"[\x00-\x1f\x7f]", key):
        rule = "no part between slashes may be empty, '.' or '..', and control characters are not allowed"
        raise UserError(f"the key {key!r} cannot be used: {rule}")
    return key
