"""Text files to a data set: one tokenizer and shards of its ids, in one folder that appears complete or not at all."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from roxxel_dist.data.commit import finish_interrupted, publish, staging, write_file
from roxxel_dist.data.convert import smallest_dtype
from roxxel_dist.data.corpus import TEXT_FILES, Corpus, find_corpus, pieces
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.info import info
from roxxel_dist.data.report import Report
from roxxel_dist.data.tokenizer import TOKENIZER_FILE, Kind, Tokenizer, train_tokenizer
from roxxel_dist.data.writing import WriteOptions, write_shards

__all__ = ["BUILD_FILE", "MAX_SHARD_BYTES", "build", "info"]

MAX_SHARD_BYTES = 256 << 20
BATCH_CHARACTERS = 4 << 20
BUILD_FILE = "build.json"
PathLike = str | os.PathLike[str]


def build(
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    tokenizer: str | os.PathLike[str] = "bpe",
    vocab_size: int | None = None,
    include: Sequence[str] = TEXT_FILES,
    exclude: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Roxxel:
    """Build a data set from text. One file is one document, followed by end-of-text.

    The result follows from the texts and these settings alone. Where `out` holds the result of the same build already,
    it is returned at once.

    Args:
        paths: text files, which are always taken, and folders, which are walked in sorted order. Hidden files and
            folders, `__pycache__` and installed packages are left out, as are empty files and what is not UTF-8.
        out: the folder to fill with `tokenizer.json`, `shard_00000.rox` and so on, and `build.json`.
        tokenizer: "bpe", "byte" or "char" to train one on the texts, or the path of a `tokenizer.json`.
        vocab_size: ids in all; see `train_tokenizer`.
        include: patterns of the names of files to take from folders.
        exclude: patterns of what to leave out, of the path from the folder named ("test/*") or of any name ("test").
        max_shard_bytes: bytes of tokens a shard.
        workers: threads; None: as many as there are cores. It has no effect on the result, and none at all where the
            `tokenizers` library has run in this process before.
        overwrite: replace another data set in `out`.
        progress: say on stderr what is being done.

    Raises:
        FileNotFoundError: one of `paths`, or the tokenizer's file, does not exist.
        ValueError: nothing to build from, a setting is wrong, or `out` holds something else or cannot be written to.
            Then nothing was changed.
    """
    named = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    place, report = Path(out), Report(progress)
    ready = _ready_tokenizer(tokenizer, vocab_size)
    corpus = find_corpus(named, include, exclude, place)
    report.line(_found(corpus))
    record = _record(corpus, ready.fingerprint if ready else str(tokenizer), vocab_size, max_shard_bytes)
    if place.is_dir():
        finish_interrupted(place)
    there = _ours(place)
    done = _same_build(place, record)
    if done is not None:
        report.line(f"{place} holds this very data set already: nothing to do")
        return done
    if there and not overwrite:
        raise ValueError(
            f"{place} holds another data set ({', '.join(there[:3])}); choose another --out, or give "
            "--overwrite True to replace it"
        )
    with _threads(workers), staging(place, "build") as staged:
        if ready is None:
            report.line(f"training a {tokenizer} tokenizer")
        made = ready or train_tokenizer(_as_kind(tokenizer), _texts(corpus), vocab_size)
        _fill(staged, corpus, made, record, report)
        publish(staged, there)
    return Roxxel(place)


def _record(corpus: Corpus, tokenizer: str, vocab_size: int | None, max_shard_bytes: int) -> dict[str, Any]:
    """What decides the result of a build; kept beside it to know it again."""
    return {
        "inputs": {"bytes": corpus.size, "digest": corpus.digest, "files": len(corpus.files)},
        "settings": {"max_shard_bytes": max_shard_bytes, "tokenizer": tokenizer, "vocab_size": vocab_size},
    }


def _fill(staged: Path, corpus: Corpus, tokenizer: Tokenizer, record: dict[str, Any], report: Report) -> None:
    """Write shards, tokenizer and record into the staging folder."""
    options = WriteOptions(
        separator=tokenizer.eos_id,
        max_shard_bytes=record["settings"]["max_shard_bytes"],
        vocab_size=tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
    )
    with report.bar(f"encoding with {tokenizer.vocab_size} ids", corpus.size) as advance:

        def documents() -> Iterator[np.ndarray]:
            for file, document in zip(corpus.files, _encoded(corpus, tokenizer), strict=True):
                yield document
                advance(file.size)

        write_shards(staged, "shard_{:05d}.rox".format, documents(), options)
    tokenizer.save(staged / TOKENIZER_FILE)
    with Roxxel(staged) as written:
        record = record | {"fingerprint": written.fingerprint}
    write_file(staged / BUILD_FILE, json.dumps(record, indent=1, sort_keys=True).encode())


def _encoded(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The ids of each document [tokens], encoded in batches bounded by their characters."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    parts: list[np.ndarray] = []
    for batch in _batches(corpus, whole=tokenizer.kind not in get_args(Kind)):
        encoded = tokenizer.encode_batch([text for text, _ in batch])
        for ids, (_, is_last) in zip(encoded, batch, strict=True):
            parts.append(np.array(ids, dtype))
            if is_last:
                yield parts[0] if len(parts) == 1 else np.concatenate(parts)
                parts = []


def _batches(corpus: Corpus, *, whole: bool) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, each with whether it is its document's last. A ready-made tokenizer gets documents whole."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for file in corpus.files:
        text = file.read()
        cut = [text] if whole else list(pieces(text))
        for number, piece in enumerate(cut, 1):
            batch.append((piece, number == len(cut)))
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _texts(corpus: Corpus) -> Iterator[str]:
    for file in corpus.files:
        yield from pieces(file.read())


def _ready_tokenizer(tokenizer: PathLike, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer that a path names, or None where a kind to train is named."""
    if str(tokenizer) in get_args(Kind):
        return None
    path = Path(tokenizer)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={tokenizer}: neither a kind ({', '.join(get_args(Kind))}) nor the path of a {TOKENIZER_FILE}"
        )
    found = Tokenizer.load(path)
    if vocab_size is not None and vocab_size != found.vocab_size:
        raise ValueError(f"vocab_size={vocab_size}: {path} has {found.vocab_size} ids; leave vocab_size out")
    return found


def _as_kind(tokenizer: PathLike) -> Kind:
    return next(kind for kind in get_args(Kind) if kind == str(tokenizer))


def _ours(place: Path) -> list[str]:
    """The files in `out` that are a data set's."""
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file; --out is the folder to fill")
    names = sorted(path.name for path in place.glob("*")) if place.is_dir() else []
    return [name for name in names if name.endswith(".rox") or name in (TOKENIZER_FILE, BUILD_FILE)]


def _same_build(place: Path, record: dict[str, Any]) -> Roxxel | None:
    """The data set in `out`, if `build.json` says that it came from this very build and nothing was changed since."""
    try:
        there = json.loads((place / BUILD_FILE).read_bytes())
        found = Roxxel(place)
        if there == record | {"fingerprint": found.fingerprint} and found.tokenizer is not None:
            return found
    except (OSError, ValueError):
        pass
    return None


def _found(corpus: Corpus) -> str:
    skipped = [f"{count} {what}" for count, what in ((corpus.empty, "empty"), (corpus.not_utf8, "not UTF-8")) if count]
    left_out = f" (left out: {', '.join(skipped)})" if skipped else ""
    return f"{len(corpus.files)} text files, {corpus.size / 1e6:.1f} MB{left_out}"


@contextmanager
def _threads(workers: int | None) -> Iterator[None]:
    if workers is None:
        yield
        return
    if workers < 1:
        raise ValueError(f"workers={workers}: threads, at least 1, or None for all cores")
    before = os.environ.get("RAYON_NUM_THREADS")
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    try:
        yield
    finally:
        del os.environ["RAYON_NUM_THREADS"]
        if before is not None:
            os.environ["RAYON_NUM_THREADS"] = before
