"""From what a user names (a file, a folder, a pattern, a prefix, a list of those) to the shards on disk."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.data.atomic_dir import finish_interrupted

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
ENDING = ".rox"
ENDINGS = (ENDING, ".npy", ".bin", ".idx")
"""Of all files of tokens; the last three are read in place (`data.foreign`)."""
BUCKET = r"(s3a?|gs|gcs|az|abfss?|wasbs?|hdfs|https?):/"  # a Path has one slash there
TEXT_ENDINGS = (".txt", ".text", ".md", ".py", ".jsonl", ".parquet")


class NoShardsError(FileNotFoundError, ValueError):
    """A path of data leads to no shards."""


def check_local(name: str, path: object) -> None:
    """Raises ValueError for a path in a bucket (`s3://…`, `gs://…`), which the system would take for a local folder.

    Args:
        name: of the field or flag that names the path.
        path: what it is; only text and `os.PathLike` are looked at.
    """
    if isinstance(path, (str, os.PathLike)) and re.match(BUCKET, str(path)):
        raise ValueError(
            f"{name} is {path}: buckets cannot be read or written; name a folder that all hosts see, where the bucket "
            f"is mounted, or which is copied from it and to it"
        )


def find_shards(source: Source) -> list[Path]:
    """The files of tokens that a source names, each once; none is opened.

    An existing path is that file or, for a folder, all `*.rox` in it. With `*`, `?` or `[` it is a pattern. Anything
    else is a prefix: `wiki` is `wiki_00000.rox` and so on, or else all of `wiki*.rox`. Where there is no `.rox` file,
    all of that holds for `.npy` and `.bin`. A `.bin` stands for its `.idx` too, and NAME for NAME.bin or NAME.npy.
    Those of one folder, pattern or prefix come in the order of their names.

    Raises:
        ValueError: a folder holds parts to train on and parts to validate with, or an interrupted write has to be
            finished in it and cannot be.
    """
    if not isinstance(source, (str, os.PathLike)):
        return list(dict.fromkeys(path for one in source for path in find_shards(one)))
    check_local("the path of the data", source)
    text = os.fspath(source)
    path = Path(text)
    folder = path if path.is_dir() else path.parent
    if folder.is_dir():
        finish_interrupted(folder)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return _tokens_of([path])
    if glob.has_magic(path.name if folder.is_dir() else text):
        here = (
            glob.escape(str(folder)) if folder.is_dir() else str(folder)
        )  # an existing folder's brackets are its name
        names = glob.glob(os.path.join(here, path.name), recursive=True)
        found = [Path(name) for name in names if os.path.isfile(name)]
        return _preferred(found) or sorted(found)
    exact = [path.with_name(path.name + ending) for ending in (".bin", ".idx", ".npy")]
    return (
        Target.of(source).shards()
        or _glob(path, "*" + ENDING)
        or _tokens_of([name for name in exact if name.exists()][:1])
        or _preferred(_glob(path, "*"))
    )


def _glob(path: Path, rest: str) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(glob.escape(str(path)) + rest) if os.path.isfile(name))


def _preferred(paths: Sequence[Path]) -> list[Path]:
    """The shards among some files, or else the other files of tokens."""
    return sorted(path for path in paths if path.suffix == ENDING) or _tokens_of(
        sorted(path for path in paths if path.suffix in ENDINGS)
    )


def _tokens_of(paths: Sequence[Path]) -> list[Path]:
    """The same with the `.bin` for each `.idx` that has one."""
    pairs = [(path, path.with_suffix(".bin")) for path in paths]
    return list(dict.fromkeys(tokens if path.suffix == ".idx" and tokens.exists() else path for path, tokens in pairs))


def _in_folder(folder: Path) -> list[Path]:
    found = _preferred([path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()])
    halves = [path for path in found if path.suffix != ENDING and path.stem in ("train", "val")]
    if not found:
        halves = [half for half in (folder / "train", folder / "val") if half.is_dir() and any(half.glob(f"*{ENDING}"))]
    if len(halves) == 2:
        raise ValueError(f"{folder} holds data to train on and to validate with: name {halves[0]} or {halves[1]}")
    return found


def is_tokens(source: Source) -> bool:
    """Whether a source names tokens that `Roxxel` opens, rather than text to make some from.

    True for files that end in `.rox`, `.npy`, `.bin` or `.idx`, and for patterns and prefixes of such (a pattern that
    matches nothing counts, so that opening it says so); for folders of `.rox` files; and for folders of the others
    where no text stands beside them. A list is tokens if all of it is.
    """
    if not isinstance(source, (str, os.PathLike)):
        return bool(source) and all(is_tokens(one) for one in source)
    path = Path(source)
    try:
        found = find_shards(path)
    except ValueError:
        return True  # opening it says what is wrong
    if path.is_dir():
        return bool(found) and (found[0].suffix == ENDING or not _has_text(path))
    if found:
        return all(name.suffix in ENDINGS for name in found)
    return path.suffix in ENDINGS or glob.has_magic(path.name)


def is_tokens_only(path: Path) -> bool:
    """Whether a path names tokens to convert: `is_tokens`, but for folders where text stands beside any tokens."""
    return is_tokens(path) and not (path.is_dir() and _has_text(path))


def _has_text(folder: Path) -> bool:
    return any(path.suffix in TEXT_ENDINGS for path in folder.iterdir() if not path.name.startswith("."))


@dataclass(frozen=True)
class Target:
    """Where `write` puts shards: `folder / (prefix + five digits + suffix)`, or one file where `numbered` is false."""

    folder: Path
    prefix: str
    suffix: str
    numbered: bool = True

    @classmethod
    def of(cls, source: Source) -> "Target":
        """The target that a source names.

        Raises:
            ValueError: it names no single place to write to.
        """
        if not isinstance(source, (str, os.PathLike)):
            raise ValueError(f"{list(source)}: a list names no place to write to; give one path or pattern")
        text = os.fspath(source)
        path = Path(text)
        if path.is_dir() or text.endswith("/"):
            return cls(path, "shard_", ENDING)
        if not path.parent.is_dir() and set("*?") & set(str(path.parent)):
            raise ValueError(f"{text}: the folder to write to cannot be a pattern; only the file name can")
        if glob.has_magic(path.name) and not path.exists():
            prefix, star, suffix = path.name.partition("*")
            if not star or glob.has_magic(prefix + suffix):
                raise ValueError(f"{text}: a pattern to write to has one `*` in the file name (the shard's number)")
            return cls(path.parent, prefix, suffix)
        if path.suffix == ENDING:
            return cls(path.parent, path.stem, ENDING, numbered=False)
        return cls(path.parent, f"{path.name}_", ENDING)

    def name(self, index: int) -> str:
        """The file name of shard `index`.

        Raises:
            ValueError: the target is one file and this is not its first shard.
        """
        if self.numbered:
            return f"{self.prefix}{index:05d}{self.suffix}"
        if index:
            raise ValueError(
                f"{self.folder / self.prefix}{self.suffix} is one file and holds one shard; to append or to write "
                f"several, give a pattern such as {self.folder / self.prefix}_*{self.suffix}"
            )
        return self.prefix + self.suffix

    @property
    def label(self) -> str:
        """A file name for the target as a whole."""
        return self.name(0)

    def shards(self) -> list[Path]:
        """The files of this target that exist."""
        if not self.numbered:
            path = self.folder / self.name(0)
            return [path] if path.exists() else []
        name = re.compile(re.escape(self.prefix) + r"\d{5,}" + re.escape(self.suffix))
        found = glob.glob(f"{glob.escape(str(self.folder / self.prefix))}*{glob.escape(self.suffix)}")
        return sorted(path for path in map(Path, found) if name.fullmatch(path.name))
