"""The files a corpus is made of: found in a fixed order, checked, read one document at a time.

Documents in files that hold many of them: JSON lines, Parquet, and what Hugging Face `datasets` saves.

They are read one after another; no file is ever in memory whole. Empty and missing (null) texts are left out.
"""

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
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
from roxxel_dist.data.format import checksum

KINDS = {
    ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".ndjson": "jsonl", ".ndjson.gz": "jsonl", ".json.gz": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
MANY_DOCUMENTS = tuple(f"*{ending}" for ending in KINDS)
"""Patterns of the names of files with many documents."""
ROWS_A_BATCH = 256
NAME_THE_KEY = "Name the key of the text: `roxxel-dist data build PATH --out DIR --text_key KEY`"
"""What to do where a text is not found; `train` itself has no such option."""
Documents = Iterator[tuple[str, int]]
"""(text, bytes of the file read since the document before)."""


def kind_of(name: str) -> str:
    """How a file with this name is read: jsonl, parquet, or text."""
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "text")


def read_json_lines(path: Path, key: str) -> Documents:
    """The texts of a file with one JSON object a line, gzipped if it ends in `.gz`. Blank lines are passed over.

    Raises:
        ValueError: a line is no JSON object, or has no text under `key`. The message names the file and the line.
    """
    with path.open("rb") as raw, _damage_named(path):
        lines: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # pyright: ignore[reportAssignmentType]
        before = read = 0
        for number, line in enumerate(lines, 1):
            # A plain file's position cannot be told while it is iterated; a zipped one's bytes are not the line's.
            read = raw.tell() if lines is not raw else read + len(line)
            if line.isspace():
                continue
            text = _text_of_line(line.removeprefix(BOM_UTF8), key, f"{path}, line {number}")
            if text:
                yield text, read - before
                before = read


def _text_of_line(line: bytes, key: str, place: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}). Every line is one JSON object; repair or remove it") from error
    if not isinstance(found, dict) or key not in found:
        keys = f"it has {', '.join(map(str, list(found)[:8]))}" if isinstance(found, dict) else "it is no object"
        raise ValueError(f"{place}: no {key!r} ({keys}). {NAME_THE_KEY}")
    return _checked(found[key], key, place)


def _checked(text: Any, key: str, place: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{place}: {key!r} is a {type(text).__name__}, not a text. {NAME_THE_KEY}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: {key!r} is not valid Unicode ({error}). Repair or remove it") from error
    return text


def read_parquet(path: Path, key: str) -> Documents:
    """The texts in one column of a Parquet file.

    Raises:
        ValueError: pyarrow is not installed, or the file is damaged or has no such column of text.
    """
    with _damage_named(path):
        parquet = _pyarrow("pyarrow.parquet", path)
        with parquet.ParquetFile(path) as file:
            rows = max(1, file.metadata.num_rows)
            _check_column(file.schema_arrow, key, path)
            batches = file.iter_batches(batch_size=ROWS_A_BATCH, columns=[key])
            yield from _rows(batches, key, path, path.stat().st_size / rows)


def read_arrow(path: Path, key: str) -> Documents:
    """The texts in one column of an Arrow stream file, as `datasets` saves them.

    Raises:
        ValueError: pyarrow is not installed, or the file is damaged or has no such column of text.
    """
    with _damage_named(path):
        ipc, arrow = _pyarrow("pyarrow.ipc", path), _pyarrow("pyarrow", path)
        with arrow.OSFile(str(path)) as source, ipc.open_stream(source) as stream:
            _check_column(stream.schema, key, path)
            before = 0
            for batch in stream:
                read = source.tell()
                yield from _rows([batch], key, path, (read - before) / max(1, batch.num_rows))
                before = read


def _rows(batches: Any, key: str, path: Path, bytes_a_row: float) -> Documents:
    row, before = 0, 0
    for batch in batches:
        column = batch.column(key)
        for start in range(0, len(column), ROWS_A_BATCH):
            for text in column.slice(start, ROWS_A_BATCH).to_pylist():
                row += 1
                if text := _checked(text, key, f"{path}, row {row}"):
                    yield text, int(row * bytes_a_row) - before
                    before = int(row * bytes_a_row)


def _check_column(schema: Any, key: str, path: Path) -> None:
    if key not in schema.names:
        raise ValueError(f"{path}: no column {key!r}; it has {', '.join(schema.names[:12])}. {NAME_THE_KEY}")
    kind = str(schema.field(key).type)
    if "string" not in kind or kind.startswith(("list", "struct", "map", "large_list")):
        raise ValueError(f"{path}: column {key!r} is {kind}, not text. {NAME_THE_KEY}")


def _pyarrow(module: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{path}: to read it takes pyarrow: pip install 'roxxel-dist[parquet]'") from error


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}); is it whole? Get it again, or take it away") from error
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        what = " ".join(str(error).split())[:300]  # what pyarrow raises for damage is of many kinds
        raise ValueError(f"{path}: damaged, or not of its kind ({what}). Get it again, or take it away") from error


def saved_data_set(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `save_to_disk` of Hugging Face `datasets` made, in order; None for others.

    Raises:
        ValueError: it holds several splits, is damaged, or has been filtered without being written out.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ValueError(f"{folder} holds several data sets ({', '.join(splits)}): name one, as {folder / 'train'}")
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        described = json.loads(state.read_bytes())
        files = [folder / Path(one["filename"]).name for one in described["_data_files"]]
        indices = described.get("_indices_files") or described.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{state}: not what `datasets` saves ({error!r}). Save the data set again") from error
    if indices:
        raise ValueError(f"{state}: rows were selected and not written out; call flatten_indices() and save it again")
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        raise ValueError(f"{missing[0] if missing else state}: missing or names no file. Save the data set again")
    return files


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
