"""Documents in files that hold many of them: JSON lines, Parquet, and what Hugging Face `datasets` saves.

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
