"""From what a user names (a file, a folder, a pattern, a prefix, a list of those) to the shards on disk."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roxxel_dist.data.commit import finish_interrupted

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
ENDING = ".rox"


def find_shards(source: Source) -> list[Path]:
    """The files that a source names, each once, in no special order; none is opened.

    An existing path is that file or, for a folder, all `*.rox` in it. With `*`, `?` or `[` it is a pattern. Anything
    else is a prefix: `wiki` is `wiki_00000.rox` and so on, or else all of `wiki*.rox`.

    Raises:
        ValueError: an interrupted write has to be finished in the folder and cannot be.
    """
    if not isinstance(source, (str, os.PathLike)):
        return list(dict.fromkeys(path for one in source for path in find_shards(one)))
    text = os.fspath(source)
    path = Path(text)
    folder = path if path.is_dir() else path.parent
    if folder.is_dir():
        finish_interrupted(folder)
    if path.is_dir():
        return sorted(path.glob(f"*{ENDING}"))
    if path.exists():
        return [path]
    if glob.has_magic(path.name if folder.is_dir() else text):
        here = (
            glob.escape(str(folder)) if folder.is_dir() else str(folder)
        )  # an existing folder's brackets are its name
        found = [
            Path(name) for name in glob.glob(os.path.join(here, path.name), recursive=True) if os.path.isfile(name)
        ]
        return sorted([name for name in found if name.suffix == ENDING] or found)
    return Target.of(source).shards() or sorted(Path(name) for name in glob.glob(f"{glob.escape(text)}*{ENDING}"))


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
