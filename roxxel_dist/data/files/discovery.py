"""Find the shards on disk for a path from the user: a file, a folder, a pattern, a prefix, or a list of those."""

import glob
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.data.files.atomic_dir import finish_interrupted
from roxxel_dist.objects.url import SCHEMES, ObjectUrl, is_url
from roxxel_dist.process.exit_codes import MissingFileError, UserError

DataPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
ENDING = ".rox"
ENDINGS = (ENDING, ".npy", ".bin", ".idx")
"""The endings of all token files; the last three are read in place (`data.files.foreign`)."""
BUILD_FILE = "build.json"
"""The record of a build beside its shards: inputs and settings, and the fingerprint of the data set."""
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a Path keeps only one slash
UNEXPANDED = re.compile(r"(~|\$\w+|\$\{\w+\})(/|$)")
TEXT_ENDINGS = (".txt", ".text", ".md", ".py", ".jsonl", ".parquet")


class NoShardsError(MissingFileError):
    """A data path has no shards."""


def check_local(name: str, path: object) -> None:
    """Raises ValueError for an address (`s3://…`, `ftp://…`) and for `~/…`, `$HOME/…`: to the system these are folders.

    `name` is the field or flag. Where an address in a bucket is taken, it is asked of the others alone. Values that are
    neither text nor `os.PathLike` pass.
    """
    if not isinstance(path, (str, os.PathLike)):
        return
    if UNEXPANDED.match(text := str(path)):
        meant = os.path.expandvars(os.path.expanduser(text))
        raise UserError(
            f"{name} is {path}: only a shell replaces {text.partition('/')[0]}, where it begins a word and is not in "
            f"single quotes: write {'the whole path' if meant == text else meant}, or ./{path} for a folder named so"
        )
    if (match := ADDRESS.match(text)) is None:
        return
    where = "in a bucket"
    if match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        where = f"in {match[1]}://, which is no bucket that is known ({known})"
    raise UserError(
        f"{name} is {path}: it cannot be {where}; name a folder that all hosts see, where the bucket is mounted, or "
        f"which is copied from it and to it"
    )


def names_objects(path: object) -> bool:
    """Whether a path, or one of a list, is the address of shards in an object store; what is no path is not."""
    return any(map(is_url, path if isinstance(path, Iterable) and not isinstance(path, str) else [path]))


def absolute(path: str | os.PathLike[str]) -> str:
    """An absolute path; the address of an object store is unchanged."""
    return str(ObjectUrl.parse(path)) if is_url(path) else os.path.abspath(path)


def find_shards(path: DataPath) -> list[Path]:
    """The token files at a path, each once; none is opened.

    An existing path is that file or, for a folder, all `*.rox` in it. With `*`, `?` or `[` it is a pattern. Anything
    else is a prefix: `wiki` is `wiki_00000.rox` and so on, or else all of `wiki*.rox`. If there is no `.rox` file, the
    same rules apply to `.npy` and `.bin`. A `.bin` includes its `.idx`, and NAME means NAME.bin or NAME.npy. The files
    of one folder, pattern or prefix are sorted by name. Raises ValueError: a folder has both training and validation
    splits, or an interrupted write in it cannot be finished.
    """
    if not isinstance(path, (str, os.PathLike)):
        return list(dict.fromkeys(shard for one_path in path for shard in find_shards(one_path)))
    check_local("the path of the data", path)
    text, path = os.fspath(path), Path(path)
    folder = path if path.is_dir() else path.parent
    if folder.is_dir():
        finish_interrupted(folder)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return _with_pairs([path])
    if glob.has_magic(path.name if folder.is_dir() else text):
        # Brackets in the name of an existing folder are not a pattern.
        files = _glob(os.path.join(glob.escape(str(folder)) if folder.is_dir() else str(folder), path.name))
        return _preferred(files) or files
    prefix = glob.escape(str(path))
    exact = [path.with_name(path.name + ending) for ending in (".bin", ".idx", ".npy")]
    return (
        Target.of_path(text).shards()
        or _glob(f"{prefix}*{ENDING}")
        or _with_pairs([name for name in exact if is_file(name)][:1])
        or _preferred(_glob(f"{prefix}*"))
    )


def _glob(pattern: str) -> list[Path]:
    return sorted(path for name in glob.glob(pattern, recursive=True) if is_file(path := Path(name)))


def is_file(path: Path) -> bool:
    """Whether a path is a file. Raises ValueError for a broken link with the ending of a token file: that its tokens
    are missing would show in no other way."""
    if path.is_file():
        return True
    if path.suffix in ENDINGS and path.is_symlink() and not os.path.exists(path):
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, which is not there: fetch the file (as with `git annex get` or "
            "`dvc pull`), or remove the link"
        )
    return False


def _preferred(paths: Iterable[Path]) -> list[Path]:
    """The shards among some files, or else the other token files."""
    tokens = sorted(path for path in paths if path.suffix in ENDINGS)
    return [path for path in tokens if path.suffix == ENDING] or _with_pairs(tokens)


def _with_pairs(paths: Sequence[Path]) -> list[Path]:
    """The same with the `.bin` for each `.idx` that has one."""
    pairs = [(path, path.with_suffix(".bin")) for path in paths]
    return list(dict.fromkeys(tokens if path.suffix == ".idx" and tokens.exists() else path for path, tokens in pairs))


def _in_folder(folder: Path) -> list[Path]:
    shards = _preferred(path for path in folder.iterdir() if not path.name.startswith(".") and is_file(path))
    splits = [path for path in shards if path.suffix != ENDING and path.stem in ("train", "val")]
    if not shards:
        splits = [path for path in (folder / "train", folder / "val") if any(path.glob(f"*{ENDING}")) or _traces(path)]
    if len(splits) == 2:
        raise UserError(f"{folder} holds data to train on and to validate with: name {splits[0]} or {splits[1]}")
    if not shards and (traces := _traces(folder)):
        part = f" ({traces[0]} is an unfinished copy)" if traces[0] != BUILD_FILE else ""
        raise UserError(
            f"{folder}: it has {traces[-1]} of a data set and no shard: copy its {ENDING} files again{part}, or name "
            "the folder of text"
        )
    return shards


def _traces(folder: Path) -> list[str]:
    """The names of files that a copy of a data set has without its shards: unfinished ones, and then its record."""
    record = folder / BUILD_FILE
    is_built = record.is_file() and build_record(record.read_bytes()) is not None
    return [*unfinished_copies(folder), *([BUILD_FILE] if is_built else [])]


def unfinished_copies(folder: Path) -> list[str]:
    """The names of files that a running, or a killed, copy of shards leaves: most programs add an ending."""
    others = (*TEXT_ENDINGS, ".lock")
    return sorted(path.name for path in folder.glob(f"*{ENDING}.*") if path.suffix not in others and path.is_file())


def build_record(data: bytes) -> dict[str, Any] | None:
    """The record of `data build` in the bytes of a `build.json`; None where another program made the file."""
    try:
        record = json.loads(data)
    except ValueError:
        return None if data.strip(b"\0") else {}  # the place of a copy that has not begun
    return record if isinstance(record, dict) and record.keys() >= {"inputs", "settings"} else None


def is_tokens(path: DataPath) -> bool:
    """Whether a path is tokens that `Roxxel` opens, rather than text.

    True for files that end in `.rox`, `.npy`, `.bin` or `.idx`, and for patterns and prefixes of such (a pattern that
    matches nothing counts too, so that opening it raises the error); for folders of `.rox` files; and for folders of
    the others without text files. A list is tokens if all its items are. An object store has only tokens.
    """
    if names_objects(path):
        return True
    if not isinstance(path, (str, os.PathLike)):
        return bool(path) and all(map(is_tokens, path))
    path = Path(path)
    try:
        shards = find_shards(path)
    except ValueError:
        return True  # opening it raises the error
    if path.is_dir():
        return bool(shards) and (shards[0].suffix == ENDING or not has_text(path))
    if shards:
        return all(shard.suffix in ENDINGS for shard in shards)
    return path.suffix in ENDINGS or glob.has_magic(path.name)


def has_text(folder: Path) -> bool:
    """Whether a folder has files of text."""
    return any(path.suffix in TEXT_ENDINGS for path in folder.iterdir() if not path.name.startswith("."))


@dataclass(frozen=True)
class Target:
    """The place of shards to write: `folder / (prefix + five digits + suffix)`, or one file if not `numbered`."""

    folder: Path
    prefix: str
    suffix: str
    numbered: bool = True

    @classmethod
    def of_path(cls, path: DataPath) -> "Target":
        """The target at a path; ValueError if it is not a single place to write to."""
        if not isinstance(path, (str, os.PathLike)):
            raise UserError(f"{list(path)}: a list names no place to write to; give one path or pattern")
        text, path = os.fspath(path), Path(path)
        if path.is_dir() or text.endswith("/"):
            return cls(path, "shard_", ENDING)
        if not path.parent.is_dir() and set("*?") & set(str(path.parent)):
            raise UserError(f"{text}: the folder to write to cannot be a pattern; only the file name can")
        if glob.has_magic(path.name) and not path.exists():
            prefix, star, suffix = path.name.partition("*")
            if not star or glob.has_magic(prefix + suffix):
                raise UserError(f"{text}: a pattern to write to has one `*` in the file name (the shard's number)")
            return cls(path.parent, prefix, suffix)
        if path.suffix == ENDING:
            return cls(path.parent, path.stem, ENDING, numbered=False)
        return cls(path.parent, f"{path.name}_", ENDING)

    @property
    def is_folder(self) -> bool:
        """Whether the shards are named as those of a folder, which is how `build` names them."""
        return (self.numbered, self.prefix, self.suffix) == (True, "shard_", ENDING)

    def name(self, index: int) -> str:
        """The file name of shard `index`; ValueError if the target is one file and `index` is not 0."""
        if self.numbered:
            return f"{self.prefix}{index:05d}{self.suffix}"
        if index:
            raise UserError(
                f"{self.folder / self.prefix}{self.suffix} is one file and holds one shard; to append or to write "
                f"several, give a pattern such as {self.folder / self.prefix}_*{self.suffix}"
            )
        return self.prefix + self.suffix

    def shards(self) -> list[Path]:
        """The files of this target that exist."""
        name = re.compile(re.escape(self.prefix) + r"\d{5,}" * self.numbered + re.escape(self.suffix))
        return sorted(path for path in self.folder.glob("*") if name.fullmatch(path.name))
