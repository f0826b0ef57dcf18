"""The files of a corpus: which are read, in which order, and how many are not, for which reason."""

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from roxxel_dist.corpus.documents import TEXT_FILES, TextFile, how_to_convert, kind_of, saved_data_set, text_file
from roxxel_dist.data.files.discovery import BUILD_FILE, ENDING, build_record
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE
from roxxel_dist.process.exit_codes import MissingFileError, UserError
from roxxel_dist.utils.display import size
from roxxel_dist.utils.voice import argument

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
TABLES = (".csv", ".tsv", ".json")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SAVED = frozenset({"state.json", "dataset_info.json"})
"""Beside the Arrow files of `save_to_disk` of Hugging Face `datasets`."""
SHOWN = 4
OTHERS = "of other kinds"
HIDDEN, INSTALLED, EXCLUDED = "hidden", "of installed packages or caches", "excluded"
SECOND_NAMES, FOLDERS_AGAIN = "second names of a file", "links to a folder that is read"
AROUND, BROKEN, NO_FILES = "links to a folder around it", "broken links", "that are no files (pipes, devices)"
OF_DATA_SETS = "of data sets, which are built alone"
REASONS = (OTHERS, HIDDEN, INSTALLED, EXCLUDED, OF_DATA_SETS, SECOND_NAMES, FOLDERS_AGAIN, AROUND, BROKEN, NO_FILES)
"""Why a file or a folder is not read, in the order of the message."""


Judge = Callable[[Sequence[int]], None]
"""Called with the sizes of the files of a corpus before they are read."""


@dataclass(frozen=True)
class Corpus:
    """The files of a build, in their order."""

    files: tuple[TextFile, ...]
    left_out: tuple[str, ...]
    """The files that are not read, as text: how many, and why."""
    tables: tuple[str, ...] = ()
    """How many files are tables, by their endings: they are read as plain text."""
    copies: tuple[str, ...] = ()
    """The names of files that have the content of one before them: they are read too."""

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """32 hex digits that depend on the names and contents of the files and on their order."""
        content = [[file.name, file.size, file.digest] for file in self.files]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        files = "1 text file" if len(self.files) == 1 else f"{len(self.files)} text files"
        left_out = f" (left out: {', '.join(self.left_out)})" if self.left_out else ""
        line = f"{files}, {size(self.size)}{left_out}"
        if self.tables:
            line += f"; {', '.join(self.tables)} as plain text, not as a table with a column of text"
        if self.copies:
            line += f"; {len(self.copies)} with the content of another file, read again: {shown_names(self.copies)}"
        return line


@dataclass
class _Found:
    """The files to read under their real paths, with their names; and what is not read, by the reason."""

    include: Sequence[str]
    exclude: Sequence[str]
    out: str
    names: dict[str, str] = field(default_factory=dict)
    passed_by: dict[str, list[Path]] = field(default_factory=lambda: {reason: [] for reason in REASONS})
    broken: list[Path] = field(default_factory=list)
    """Links to nothing whose names the patterns take."""

    def add(self, path: Path, name: str) -> None:
        """A file to read; a second name of one is only counted."""
        real = os.path.realpath(path)
        if real in self.names:
            self.passed_by[SECOND_NAMES].append(path)
        else:
            self.names[real] = name

    def walk(self, root: Path) -> None:
        """The files below a folder: those of each folder in the order of their names, and then its folders. A link to a
        folder is followed, unless that folder is read under its name, or has this one in it."""
        top = os.path.realpath(root)
        # Folders that are read without any link: a link to one of them, whatever its name, comes after it.
        seen = {os.path.realpath(folder) for folder in self._real_folders(root)}
        entered: set[str] = set()
        stack = [(root, "")]
        while stack:
            folder, prefix = stack.pop()
            entered.add(os.path.realpath(folder))
            files, folders = self._look(folder, prefix, count=True)
            of_data_set = _of_data_set(folder, {path.name for path, _ in files})
            for path, relative in files:
                if path.name in of_data_set:
                    self.passed_by[OF_DATA_SETS].append(path)
                elif _matches(path.name, self.include, ignore_case=self.include is TEXT_FILES):
                    self.add(path, relative)
                else:
                    self.passed_by[OTHERS].append(path)
            below: list[tuple[Path, str]] = []
            for path, relative in folders:
                real = os.path.realpath(path)
                if path.is_symlink():
                    if _within(os.path.realpath(folder), real):
                        self.passed_by[AROUND].append(path)
                        continue
                    if _within(real, self.out) and not _within(top, self.out):
                        continue
                    if real in seen | entered:
                        self.passed_by[FOLDERS_AGAIN].append(path)
                        continue
                    entered.add(real)
                elif real in entered:  # below a link that was followed
                    self.passed_by[FOLDERS_AGAIN].append(path)
                    continue
                below.append((path, relative))
            stack += reversed(below)

    def _real_folders(self, root: Path) -> Iterator[Path]:
        stack = [root]
        while stack:
            yield (folder := stack.pop())
            stack += [path for path, _ in self._look(folder, "", count=False)[1] if not path.is_symlink()]

    def _look(self, folder: Path, prefix: str, *, count: bool) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
        """(the files, the folders) of a folder that are not passed by, with their paths below the root."""
        files: list[tuple[Path, str]] = []
        folders: list[tuple[Path, str]] = []
        passed_by = self.passed_by if count else {reason: [] for reason in REASONS}
        for name in sorted(os.listdir(folder)):
            path, relative = folder / name, f"{prefix}{name}"
            if name.startswith("."):
                passed_by[HIDDEN].append(path)
                continue
            mode = _mode(path)
            is_folder = mode is not None and stat.S_ISDIR(mode)
            if is_folder and os.path.realpath(path) == self.out:
                continue
            elif is_folder and name in SKIPPED_FOLDERS:
                passed_by[INSTALLED].append(path)
            elif _matches(name, self.exclude) or (not is_folder and _matches(relative, self.exclude)):
                passed_by[EXCLUDED].append(path)
            elif is_folder:
                folders.append((path, relative + "/"))
            elif mode is not None and stat.S_ISREG(mode):
                files.append((path, relative))
            elif mode is not None:
                passed_by[NO_FILES].append(path)
            elif _matches(name, self.include, ignore_case=self.include is TEXT_FILES) and count:
                self.broken.append(path)
            else:
                passed_by[BROKEN].append(path)
        return files, folders

    def counts(self) -> list[str]:
        """The files that are not read, in numbers, as text."""
        found: list[str] = []
        for reason, every in self.passed_by.items():
            paths = [path for path in every if reason == SECOND_NAMES or os.path.realpath(path) not in self.names]
            if paths:
                what = [path.suffix or "no ending" for path in paths] if reason == OTHERS else [p.name for p in paths]
                found.append(f"{len(paths)} {reason}: {shown_names(what)}")
        return found


def find_corpus(
    paths: Sequence[Path],
    include: Sequence[str],
    exclude: Sequence[str],
    out: Path,
    judge: Judge = lambda sizes: None,
) -> Corpus:
    """Find the input files of a build, let `judge` refuse it, and read them once; see `build`. `out` is skipped."""
    found = _Found(include, exclude, os.path.realpath(out))
    for path in paths:
        if not path.exists():
            raise MissingFileError(
                f"{path}: no such file or folder; name text files, folders of them, or shards; a relative path begins "
                f"in {Path.cwd()}"
            )
        if not path.is_dir() and not path.is_file():
            raise UserError(
                f"{path} is a pipe or a device, and a build reads its input again: write it to a file first"
            )
        named = saved_data_set(path) if path.is_dir() else [path]
        if named is None:
            found.walk(path)
        for file in named or ():
            found.add(file, file.name)
    if found.broken:
        first, count = found.broken[0], len(found.broken)
        many = f" ({count} links are broken)" if count > 1 else ""
        gone = "leads back to itself" if os.path.islink(os.path.realpath(first)) else "is not there"
        raise UserError(
            f"{first} is a link to {os.readlink(first)}, which {gone}{many}: fetch the file (as with `git annex "
            f"get` or `dvc pull`), remove the link, or build without it: {argument('exclude', first.name)}"
        )
    shown, left_out = ", ".join(map(str, paths)), found.counts()
    if not found.names:
        why = f" (left out: {', '.join(left_out)})" if left_out else ""
        if found.passed_by[OTHERS]:
            raise UserError(
                f"{shown}: no file there matches the patterns{why}; name the files themselves, or patterns that match "
                f"them: `roxxel-dist data build {shown} --out DIR --include '*.log'`"
            )
        raise UserError(f"{shown}: there is no file to read{why}. Name text files, or a folder that has some")
    for path, name in found.names.items():
        if kind_of(name) == "text" and Path(name).suffix.lower() in COMPRESSED:
            raise UserError(
                f"{path}: compressed text is not read: unpack it first (gunzip), or give JSON lines (.jsonl.gz)"
            )
    judge([os.path.getsize(path) for path in found.names])
    return _read(found, shown, left_out)


def _read(found: _Found, shown: str, left_out: list[str]) -> Corpus:
    """The files with their digests, without those that have no text."""
    files = [text_file(Path(path), name) for path, name in found.names.items()]
    texts = tuple(file for file in files if file is not None and file.size)
    not_utf8 = files.count(None)
    converted = (how_to_convert(Path(path)) for path, file in zip(found.names, files, strict=True) if file is None)
    advice = next(filter(None, converted), "")
    empty = len(files) - not_utf8 - len(texts)
    if not texts:
        counts = (empty, "empty"), (not_utf8, "not UTF-8 text")
        why = ", ".join(f"{n} {'file is' if n == 1 else 'files are'} {what}" for n, what in counts if n)
        others = f", {', '.join(left_out)}" if left_out else ""
        raise UserError(
            f"{shown}: nothing to build from: {why}{others}: {advice}name text files, .jsonl, .parquet, or token files "
            f"(.npy, .bin)"
        )
    unread = [f"{count} {what}" for count, what in ((empty, "empty"), (not_utf8, "not UTF-8")) if count]
    if advice:
        unread[-1] += f" ({advice.removesuffix('; ')})"
    tables = Counter(suffix for file in texts if (suffix := Path(file.name).suffix.lower()) in TABLES)
    contents: set[tuple[int, int]] = set()
    copies: list[str] = []
    for file in texts:
        if (file.size, file.digest) in contents:
            copies.append(file.name)
        contents.add((file.size, file.digest))
    return Corpus(
        texts,
        (*unread, *left_out),
        tuple(f"{count} {suffix}" for suffix, count in sorted(tables.items())),
        tuple(copies),
    )


def _of_data_set(folder: Path, names: Set[str]) -> Set[str]:
    """The files of a folder, by their names, that are a data set of ours or of `datasets`: its JSON is no text."""
    tokens = {name for name in names if name.endswith(ENDING)}
    if tokens or (BUILD_FILE in names and build_record((folder / BUILD_FILE).read_bytes()) is not None):
        return tokens | (names & {TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE})
    if names >= SAVED:
        return SAVED | {name for name in names if name.endswith(".arrow")}
    return {"dataset_dict.json"} & names


def _mode(path: Path) -> int | None:
    """The mode of what a path leads to; None for a link to nothing. Raises OSError where it may not be looked at."""
    try:
        return path.stat().st_mode
    except OSError:
        if path.is_symlink() and not os.path.exists(path):
            return None
        raise


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _matches(name: str, patterns: Sequence[str], *, ignore_case: bool = False) -> bool:
    return any(fnmatchcase(name, one) or (ignore_case and fnmatchcase(name.lower(), one)) for one in patterns)


def shown_names(names: Sequence[str]) -> str:
    """The commonest of some names, each once."""
    counts = Counter(names)
    commonest = sorted(counts, key=lambda name: (-counts[name], name))
    return ", ".join(commonest[:SHOWN]) + (", ..." if len(commonest) > SHOWN else "")
