"""Texts, or tokens of other systems, to a data set: one folder of shards that appears complete or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np

from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.durable import write_file
from roxxel_dist.data.atomic_dir import finish_interrupted, publish, staging
from roxxel_dist.data.build.documents import TEXT_FILES, pieces
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.build.encode import PARALLEL_BYTES, cores, encode_documents, train_on
from roxxel_dist.data.verify import info
from roxxel_dist.data.build.inputs import SPLITS, PathLike, BuildInputs, check_settings, find_inputs, load_tokenizer
from roxxel_dist.data.format import Metadata
from roxxel_dist.data.discovery import check_local
from roxxel_dist.data.build.progress import Progress
from roxxel_dist.data.shard import Shard
from roxxel_dist.data.build.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Kind, Tokenizer
from roxxel_dist.data.build.writer import WriteOptions, write_shards

__all__ = ["BUILD_FILE", "MAX_SHARD_BYTES", "build", "info"]

MAX_SHARD_BYTES = 256 << 20
BUILD_FILE = "build.json"
PARTS = ".build.parts"
SHARD_NAME = "shard_{:05d}.rox".format


def build(
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    tokenizer: str | os.PathLike[str] = "bpe",
    vocab_size: int | None = None,
    eos: bool = True,
    eos_token: str | None = None,
    text_key: str = "text",
    val_fraction: float = 0.0,
    dtype: Any = None,
    include: Sequence[str] = TEXT_FILES,
    exclude: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Roxxel:
    """Build a data set from text, or from the tokens of another system, and return it, or its split to train on.

    The result follows from the inputs and these settings alone; where `out` holds it already, it is returned at once. A
    build that was killed goes on, when started again, behind its last finished shard and with the tokenizer that it had
    trained; an interrupted or failed one leaves nothing.

    Args:
        paths: text files, which are always taken, and folders, which are walked in sorted order. Hidden files and
            folders, `__pycache__` and installed packages are left out, as are empty files and what is not UTF-8. A
            text file is one document. JSON lines (`.jsonl`, `.jsonl.gz`), Parquet files and folders saved by Hugging
            Face `datasets` have many. Or else: anything that `Roxxel` opens, whose documents are taken as they are.
        out: the folder to fill with `tokenizer.json`, `shard_00000.rox` and so on, and `build.json`. It may be inside a
            folder to read, and is left out there.
        tokenizer: "bpe", "byte" or "char" to train one, or what `Tokenizer.load` reads. With tokens: what made them.
        vocab_size: ids in all; see `train_tokenizer`. With tokens: ids are below it.
        eos: documents of text end with the tokenizer's end-of-text.
        eos_token: what a ready-made tokenizer calls that, where its own files do not say it.
        text_key: the key or column of the text in JSON lines, Parquet and saved data sets.
        val_fraction: the share of documents to hold out, by their numbers alone; `out/train` and `out/val` are filled.
        dtype: of the tokens in headerless `.bin` files; uint16 where not given.
        include: patterns of the names of files to take from folders.
        exclude: patterns of what to leave out, of the path from the folder named ("test/*") or of any name ("test").
        max_shard_bytes: bytes of tokens a shard.
        workers: processes, or threads to train a tokenizer; None: one a core. One encodes less than 8 MiB of text.
        overwrite: replace another data set in `out`.
        progress: say on stderr what is being done.

    Raises:
        FileNotFoundError: one of `paths`, or the tokenizer's file, does not exist.
        ValueError: nothing to build from, a setting is wrong, an input is damaged, or `out` is an input, holds
            something else or cannot be written to. Then nothing was changed.
    """
    for path in (paths, out) if isinstance(paths, (str, os.PathLike)) else (*paths, out):
        check_local("a path of the data", path)
    log, place = Progress(progress), Path(out)
    named = check_settings(paths, place, workers, val_fraction)
    ready = load_tokenizer(tokenizer, vocab_size, eos_token)
    tokens, corpus = find_inputs(named, include, exclude, place, dtype, log)
    source = BuildInputs(
        corpus=corpus, tokens=tokens, tokenizer=ready, kind=str(tokenizer) if corpus else "none",
        vocab_size=vocab_size, eos=eos, val_fraction=val_fraction, text_key=text_key, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    return _build(source, place, cores() if workers is None else workers, overwrite, log)


def _build(source: BuildInputs, place: Path, workers: int, overwrite: bool, log: Progress) -> Roxxel:
    for folder in (place, *(place / split for split in SPLITS)):
        if folder.is_dir():
            finish_interrupted(folder)
    # A build that was killed between its splits has one of them there: it is kept, and the other is made.
    missing = [split for split in source.splits if not _is_built(place / split, source)]
    if not missing:
        log.line(f"{place} holds this very data set already: nothing to do")
        return Roxxel(place / source.splits[0])
    there = {split: _ours(place / split) for split in ("", *SPLITS) if split in missing or split not in source.splits}
    names = [f"{split}/{name}".lstrip("/") for split in there for name in there[split]]
    if names and not overwrite:
        raise ValueError(
            f"{place} holds another data set ({', '.join(names[:3])}); choose another folder, or replace "
            "it with overwrite=True"
        )
    with staging(place, "build") as staged:
        parts = place / PARTS
        try:
            with interrupt.cleanup(lambda: shutil.rmtree(parts, ignore_errors=True)):
                _make(parts, missing, source, workers, log)
                _publish(place, parts, missing, staged, source, there)
        finally:
            shutil.rmtree(parts, ignore_errors=True)
    return Roxxel(place / source.splits[0])


def _make(parts: Path, splits: Sequence[str], source: BuildInputs, workers: int, log: Progress) -> None:
    """Fill a folder with the tokenizer and the shards, beginning where a build that was killed had come to."""
    record = json.dumps(source.record(), indent=1, sort_keys=True).encode()
    if not (parts / BUILD_FILE).is_file() or (parts / BUILD_FILE).read_bytes() != record:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        write_file(parts / BUILD_FILE, record)
    tokenizer = source.tokenizer
    if tokenizer is None and source.corpus is not None:
        if (parts / TOKENIZER_FILE).is_file():
            tokenizer = Tokenizer.load(parts / TOKENIZER_FILE)
        else:
            log.line(f"training a {source.kind} tokenizer")
            kind = next(kind for kind in get_args(Kind) if kind == source.kind)
            texts = (piece for text, _ in source.texts(source.splits[0]) for piece in pieces(text))
            threads = workers if source.size >= PARALLEL_BYTES else 0
            tokenizer = train_on(kind, texts, source.vocab_size, threads, progress=log.enabled)
            if tokenizer.vocab_size < (source.vocab_size or 0):
                log.line(f"vocab_size={source.vocab_size}: the text yields {tokenizer.vocab_size} ids, and no more")
    if tokenizer is not None and not (parts / TOKENIZER_FILE).is_file():
        tokenizer.save(parts / TOKENIZER_FILE)
    for split in splits:
        (parts / split).mkdir(exist_ok=True)
        last = _finished(parts / split)
        if last is not None:
            log.line(f"going on behind {last.index + 1} finished shards of a build that was ended")
        _write_split(parts, split, source, tokenizer, last, workers, log)


def _write_split(
    parts: Path,
    split: str,
    source: BuildInputs,
    tokenizer: Tokenizer | None,
    last: Metadata | None,
    workers: int,
    log: Progress,
) -> None:
    skipped = last.first_document + last.documents if last else 0
    name = f" for {split}" if split else ""
    if source.corpus is not None:
        assert tokenizer is not None
        options = _options(source, tokenizer, tokenizer.eos_id if source.eos else None)
        with log.bar(f"encoding{name} with {tokenizer.vocab_size} ids", source.size) as advance:
            processes = workers if source.size >= PARALLEL_BYTES else 1
            texts = source.texts(split, skipped)
            items = encode_documents(texts, tokenizer, parts / TOKENIZER_FILE, processes, advance)
            written = write_shards(parts / split, SHARD_NAME, items, options, after=last)
    else:
        assert source.tokens is not None
        options = _options(source, tokenizer, source.tokens.shards[0].metadata.separator)
        with log.bar(f"copying{name}", source.size) as advance:

            def arrays() -> Iterator[np.ndarray]:
                for document in source.arrays(split, skipped):
                    yield document
                    advance(document.nbytes)

            written = write_shards(parts / split, SHARD_NAME, arrays(), options, after=last)
    if not written and last is None:
        if split:
            raise ValueError(f"val_fraction={source.val_fraction}: no document is left for {split}; use another share")
        raise ValueError("nothing to build from: every document is empty")


def _options(source: BuildInputs, tokenizer: Tokenizer | None, separator: int | float | None) -> WriteOptions:
    known = source.tokens
    return WriteOptions(
        separator=separator,
        max_shard_bytes=source.max_shard_bytes,
        vocab_size=tokenizer.vocab_size if tokenizer else source.vocab_size or (known.vocab_size if known else None),
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else known.tokenizer_fingerprint if known else None,
    )


def _finished(folder: Path) -> Metadata | None:
    """The last of the shards that a build which was killed had finished; what is behind it is removed."""
    last: Shard | None = None
    index = 0
    while (path := folder / SHARD_NAME(index)).exists():
        try:
            shard = Shard.open(path)
            if not shard.follows(last):
                break
        except ValueError:
            break
        last, index = shard, index + 1
    for path in folder.glob("*.rox"):
        if last is None or path.name > last.path.name:
            path.unlink()
    return last.metadata if last else None


def _publish(
    place: Path, parts: Path, splits: Sequence[str], staged: Path, source: BuildInputs, there: dict[str, list[str]]
) -> None:
    """Bring the finished files to their place, the split to validate with first, and remove what they replace."""
    beside = [name for name in (TOKENIZER_FILE, CONFIG_FILE) if (parts / name).exists()]
    for split in sorted({*splits, *(split for split in there if there[split])}, reverse=True):
        with ExitStack() as stack:
            target = stack.enter_context(staging(place / split, "build")) if split else staged
            if split in splits:
                for name in beside:
                    write_file(target / name, (parts / name).read_bytes())
                for path in (parts / split).glob("*.rox"):
                    path.rename(target / path.name)
                with Roxxel(target) as written:
                    record = source.record() | {"fingerprint": written.fingerprint}
                write_file(target / BUILD_FILE, json.dumps(record, indent=1, sort_keys=True).encode())
            publish(target, there[split])


def _ours(place: Path) -> list[str]:
    """The files in `out` that are a data set's."""
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file: name a folder for the shards")
    names = sorted(path.name for path in place.glob("*")) if place.is_dir() else []
    beside = (TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE)
    found = [name for name in names if name.endswith(".rox") or name in beside]
    # A folder `train` of somebody else's, with a tokenizer and no data, is nothing of ours.
    return found if place.name not in SPLITS or any(name.endswith(".rox") for name in found) else []


def _is_built(folder: Path, source: BuildInputs) -> bool:
    """Whether the data set in a folder came from this very build, by its `build.json`, and was not changed since."""
    try:
        there = json.loads((folder / BUILD_FILE).read_bytes())
        with Roxxel(folder) as found:
            expected = json.loads(json.dumps(source.record() | {"fingerprint": found.fingerprint}))
            return there == expected and (source.corpus is None or found.tokenizer is not None)
    except (OSError, ValueError):
        return False
