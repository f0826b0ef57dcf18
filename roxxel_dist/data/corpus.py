"""The files a corpus is made of: found in a fixed order, checked, read one document at a time."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from roxxel_dist.data.documents import (
    MANY_DOCUMENTS,
    Documents,
    kind_of,
    read_arrow,
    read_json_lines,
    read_parquet,
    saved_data_set,
)
from roxxel_dist.data.layout import checksum

_SUFFIXES = (
    "txt text md rst tex org html htm xml csv tsv json yaml yml toml ini cfg py pyi c h cc cpp hpp cu java kt scala go "
    "rs js jsx ts tsx css rb php pl lua r R jl sh sql swift hs ml el lisp clj ex erl f90 asm s"
)
TEXT_FILES = (*(f"*.{suffix}" for suffix in _SUFFIXES.split()), *MANY_DOCUMENTS)
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
PIECE_CHARACTERS = 1 << 18
_CUT = re.compile(r"[!-~]\n(?=[!-~])")


@dataclass(frozen=True)
class TextFile:
    """One file: a document, or many of them."""

    path: Path
    name: str
    """Its path from the folder that was named, with `/`; the file's own name where the file was named."""
    size: int
    digest: int
    kind: str = "text"
    """text (the file is a document), jsonl, parquet or arrow."""
    changed_ns: int = 0

    def documents(self, text_key: str) -> Documents:
        """Its documents, in order, with the bytes that each took.

        Raises:
            ValueError: the file has changed since it was found, or is not what its name says.
        """
        if self.kind == "text":
            data = self.path.read_bytes()
            if checksum(data) != self.digest:
                raise self._changed()
            yield data.decode("utf-8-sig"), self.size  # a byte order mark is no text
            return
        readers = {"jsonl": read_json_lines, "parquet": read_parquet, "arrow": read_arrow}
        yield from readers[self.kind](self.path, text_key)
        now = self.path.stat()
        if (now.st_size, now.st_mtime_ns) != (self.size, self.changed_ns):
            raise self._changed()

    def _changed(self) -> ValueError:
        return ValueError(f"{self.path} changed while the data set was built; build again when nothing writes to it")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a build, in their order, and what was left out."""

    files: tuple[TextFile, ...]
    not_utf8: int
    empty: int
    other_endings: Mapping[str, int]
    """How many files in the folders have a name that no pattern takes, by the ending of the name."""

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """32 hex digits that follow from the names and contents of the files and from their order."""
        content = [[file.name, file.size, file.digest] for file in self.files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def find_corpus(paths: Sequence[Path], include: Sequence[str], exclude: Sequence[str], out: Path) -> Corpus:
    """Find and read once the files that a build is made of.

    Args:
        paths: files, which are always taken, and folders, which are walked in sorted order or are a data set that
            Hugging Face `datasets` saved.
        include: patterns of file names to take from folders.
        exclude: patterns of what to leave out: of the path from the folder named, or of any folder's or file's name.
        out: a folder that is not looked into.

    Raises:
        FileNotFoundError: one of `paths` does not exist.
        ValueError: no file matches, or none has any text.
    """
    passed_by: set[Path] = set()
    found, arrow = _find(paths, include, exclude, out, passed_by)
    shown = ", ".join(map(str, paths))
    packed = [path for path in found if kind_of(path.name) == "text" and path.suffix in (".gz", ".bz2", ".xz", ".zst")]
    if packed:
        raise ValueError(
            f"{packed[0]}: compressed text is not read: unpack it first (gunzip), or give JSON lines (.jsonl.gz)"
        )
    if not found:
        raise ValueError(
            f"{shown}: no file there matches the patterns; name the files themselves, or the patterns that take them: "
            f"`roxxel-dist data build {shown} --out DIR --include '*.log'`"
        )
    files: list[TextFile] = []
    not_utf8 = empty = 0
    for path, name in found.items():
        kind = "arrow" if path in arrow else kind_of(path.name)
        if kind != "text" and path.stat().st_size:
            before = path.stat()
            files.append(TextFile(path, name, before.st_size, _digest(path), kind, before.st_mtime_ns))
            continue
        data = path.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            not_utf8 += 1
            continue
        if data:
            files.append(TextFile(path, name, len(data), checksum(data)))
        else:
            empty += 1
    if not files:
        raise ValueError(f"{shown}: nothing to build from: {empty} files are empty, {not_utf8} are not UTF-8 text")
    endings = Counter(path.suffix or "no ending" for path in passed_by if path.resolve() not in found)
    return Corpus(files=tuple(files), not_utf8=not_utf8, empty=empty, other_endings=endings)


def _find(
    paths: Sequence[Path], include: Sequence[str], exclude: Sequence[str], out: Path, passed_by: set[Path]
) -> tuple[dict[Path, str], set[Path]]:
    """(each file and its name in the corpus, which of them are Arrow files); `passed_by` gets what no pattern takes."""
    found: dict[Path, str] = {}
    arrow: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such file or folder; name text files, folders of them, or shards, "
                f"as they are seen from here"
            )
        saved = saved_data_set(path) if path.is_dir() else None
        arrow.update(file.resolve() for file in saved or ())
        walked = [(file, file.name) for file in saved or ()] or [(path, path.name)]
        for file, name in _walk(path, include, exclude, out, passed_by) if path.is_dir() and saved is None else walked:
            found.setdefault(file.resolve(), name)
    return found, arrow


def _digest(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.intdigest()


def _walk(
    root: Path, include: Sequence[str], exclude: Sequence[str], out: Path, passed_by: set[Path]
) -> Iterator[tuple[Path, str]]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not _matches(name, exclude)
            and (here / name).resolve() != out.resolve()
        )
        for name in sorted(names):
            path = here / name
            relative = path.relative_to(root).as_posix()
            if name.startswith(".") or not path.is_file() or _matches(name, exclude) or _matches(relative, exclude):
                continue
            if _matches(name, include):
                yield path, relative
            else:
                passed_by.add(path)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of about 2^18 characters, so that one long document uses all cores and little memory.

    It is cut only behind a newline between two visible ASCII characters: there byte-level BPE always ends a word, so
    the ids of the pieces are the ids of the text.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = _CUT.search(text, start + PIECE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
