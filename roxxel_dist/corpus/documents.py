"""Documents of a corpus: text files, and JSON lines, Parquet and Arrow files, which hold many documents each.

Files are hashed, and read one document after another; files with many documents are never loaded whole. A missing
(null) text is empty.
"""

import gzip
import hashlib
import importlib
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from roxxel_dist.data.files.format import checksum
from roxxel_dist.process.exit_codes import UserError, pip_install

KINDS = {
    ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".ndjson": "jsonl", ".ndjson.gz": "jsonl", ".json.gz": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
_SUFFIXES = (
    "txt text md rst tex org html htm xml csv tsv json yaml yml toml ini cfg py pyi c h cc cpp hpp cu java kt scala go "
    "rs js jsx ts tsx css rb php pl lua r R jl sh sql swift hs ml el lisp clj ex erl f90 asm s"
)
TEXT_FILES = (*(f"*.{suffix}" for suffix in _SUFFIXES.split()), *(f"*{ending}" for ending in KINDS))
"""Patterns of the names of files that are taken from folders."""
ROWS_A_BATCH = 256
PIECE_CHARACTERS = 1 << 18
_CUT = re.compile(r"[!-~]\n(?=[!-~])")
NAME_THE_KEY = "Name the key of the text: `roxxel-dist data build PATH --out DIR --text_key KEY`"
"""The fix if a text is not found; `train` itself has no such option."""
Documents = Iterator[tuple[str, int]]
"""(text, bytes of the file read since the previous document)."""


@dataclass(frozen=True)
class TextFile:
    """A file: a document, or many of them."""

    path: Path
    name: str
    """Its path below the given folder, with `/`; the file's name if the file was given."""
    size: int
    digest: int
    kind: str
    """text (the file is a document), jsonl, parquet or arrow."""
    changed_ns: int

    def documents(self, text_key: str) -> Documents:
        """The documents of the file, in order, with empty ones. ValueError if it has changed since it was found, or
        has another format than its name."""
        if self.kind == "text":
            data = self.path.read_bytes()
            same = checksum(data) == self.digest
            if same:
                yield data.decode("utf-8-sig"), self.size  # a byte order mark is not text
        else:
            readers = {"jsonl": read_json_lines, "parquet": read_parquet, "arrow": read_arrow}
            yield from readers[self.kind](self.path, text_key)
            now = self.path.stat()
            same = (now.st_size, now.st_mtime_ns) == (self.size, self.changed_ns)
        if not same:
            raise UserError(f"{self.path} changed while the data set was built; build again when nothing writes to it")


def how_to_convert(path: Path) -> str | None:
    """The way to make a file with the byte order mark of another coding UTF-8, with "; "; None for other files."""
    with path.open("rb") as file:
        head = file.read(4)
    marks = {BOM_UTF32_LE: "UTF-32", BOM_UTF32_BE: "UTF-32", BOM_UTF16_LE: "UTF-16", BOM_UTF16_BE: "UTF-16"}
    coding = next((name for mark, name in marks.items() if head.startswith(mark)), None)
    return coding and f"{path.name} is {coding}: convert with `iconv -f {coding} -t UTF-8 {path} > NEW.txt`; "


def kind_of(name: str) -> str:
    """The format that a file with this name is read in: jsonl, parquet, arrow, or text."""
    name = name.lower()
    return next((kind for ending, kind in (KINDS | {".arrow": "arrow"}).items() if name.endswith(ending)), "text")


def text_file(path: Path, name: str) -> TextFile | None:
    """A file with its digest; None for a text file that is not UTF-8."""
    kind, status = kind_of(name), path.stat()
    if kind == "text":
        data = path.read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            return None
        return TextFile(path, name, len(data), checksum(data), kind, status.st_mtime_ns)
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)
    return TextFile(path, name, status.st_size, digest.intdigest(), kind, status.st_mtime_ns)


def saved_data_set(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder from `save_to_disk` of Hugging Face `datasets`, in order; None for other folders."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise UserError(f"{folder} holds several data sets ({', '.join(splits)}): name one, as {folder / 'train'}")
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        described = json.loads(state.read_bytes())
        files = [folder / Path(file["filename"]).name for file in described["_data_files"]]
        indices = described.get("_indices_files") or described.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{state}: not what `datasets` saves ({error!r}). Save the data set again") from error
    if indices:
        raise UserError(f"{state}: rows were selected and not written out; call flatten_indices() and save it again")
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        raise UserError(f"{missing[0] if missing else state}: missing or names no file. Save the data set again")
    return files


def read_json_lines(path: Path, key: str) -> Documents:
    """The texts of a file with one JSON object per line, which may be gzipped. Blank lines are skipped."""
    with _damage_named(path), path.open("rb") as raw:
        lines: Any = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
        before = read = 0
        for number, line in enumerate(lines, 1):
            # tell() fails while iterating over a plain file; a gzipped file has fewer bytes than its lines.
            read = read + len(line) if lines is raw else raw.tell()
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line.removeprefix(BOM_UTF8))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{where}: not JSON ({error}). Every line is one JSON object; repair or remove it"
                ) from error
            if not isinstance(record, dict) or key not in record:
                keys = "it is no object" if not isinstance(record, dict) else f"it has {', '.join(list(record)[:8])}"
                raise UserError(f"{where}: no {key!r} ({keys}). {NAME_THE_KEY}")
            yield _checked(record[key], key, where), read - before
            before = read


def read_parquet(path: Path, key: str) -> Documents:
    """The texts in one column of a Parquet file."""
    with _damage_named(path), _pyarrow("pyarrow.parquet", path).ParquetFile(path) as file:
        _check_column(file.schema_arrow, key, path)
        bytes_a_row = path.stat().st_size / max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=ROWS_A_BATCH, columns=[key])
        yield from _rows(batches, key, path, lambda row: int(row * bytes_a_row))


def read_arrow(path: Path, key: str) -> Documents:
    """The texts in one column of an Arrow stream file, as `datasets` saves them (`pyarrow.dataset` cannot read
    them)."""
    with (
        _damage_named(path),
        _pyarrow("pyarrow", path).OSFile(str(path)) as source,
        _pyarrow("pyarrow.ipc", path).open_stream(source) as stream,
    ):
        _check_column(stream.schema, key, path)
        yield from _rows(stream, key, path, lambda row: source.tell())


def _rows(batches: Any, key: str, path: Path, position: Callable[[int], int]) -> Documents:
    """The texts of record batches; `position` gives the bytes read up to a row."""
    row = before = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_A_BATCH):
            for value in batch.column(key).slice(start, ROWS_A_BATCH).to_pylist():
                row += 1
                read = position(row)
                yield _checked(value, key, f"{path}, row {row}"), read - before
                before = read


def _checked(text: Any, key: str, where: str) -> str:
    """A text; "" for a missing one."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: {key!r} is a {type(text).__name__}, not a text. {NAME_THE_KEY}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: {key!r} is not valid Unicode ({error}). Repair or remove it") from error
    return text


def _check_column(schema: Any, key: str, path: Path) -> None:
    if schema.names.count(key) > 1:
        raise UserError(
            f"{path}: {schema.names.count(key)} columns are called {key!r}: give each a name, or name one that is "
            f"there once. {NAME_THE_KEY}"
        )
    if key not in schema.names:
        raise UserError(f"{path}: no column {key!r}; it has {', '.join(schema.names[:12])}. {NAME_THE_KEY}")
    kind = str(schema.field(key).type)
    if "string" not in kind or kind.startswith(("list", "struct", "map", "large_list")):
        raise UserError(f"{path}: column {key!r} is {kind}, not text. {NAME_THE_KEY}")


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{path}: pyarrow is needed to read it: {pip_install('parquet')}") from error


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # gzip and pyarrow raise many kinds of errors for damage
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        what = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path}: cannot be read ({what}); it may be incomplete or of another format. Get it again, or remove it"
        ) from error


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of about 2^18 characters, so that a single long document uses all cores and little
    memory."""
    # Byte-level BPE always ends a word after a newline between two visible ASCII characters, so the ids do not change.
    start = 0
    while len(text) - start > PIECE_CHARACTERS and (cut := _CUT.search(text, start + PIECE_CHARACTERS)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
