"""Texts, or tokens of other systems, to a data set: one folder of shards that appears complete or not at all."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

from roxxel_dist.cluster import interrupt
from roxxel_dist.cluster.durable import write_file
from roxxel_dist.data.atomic_dir import finish_interrupted, publish, staging
from roxxel_dist.data.build.documents import TEXT_FILES, pieces
from roxxel_dist.data.build.encode import PARALLEL_BYTES, encode_documents, train_on
from roxxel_dist.data.build.inputs import SPLITS, BuildInputs, PathLike, check_settings, find_inputs, load_tokenizer
from roxxel_dist.data.build.progress import Progress
from roxxel_dist.data.build.to_bucket import BUILD_FILE, BucketOut
from roxxel_dist.data.build.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Kind, Tokenizer
from roxxel_dist.data.build.writer import write_shards
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.discovery import check_local
from roxxel_dist.data.format import Metadata
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.shard import Shard
from roxxel_dist.objects.url import is_url

MAX_SHARD_BYTES = 256 << 20
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
    remote: RemoteConfig | None = None,
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
            folder to read, and is left out there. In a bucket (`s3://…`) each shard is sent when it is whole, and the
            index of the data set last; the cache of `remote` has the files until then.
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
        remote: of an `out` in a bucket: where the files are made, and the time limit of the store.

    Raises:
        StoreError: the bucket of `out` cannot be used.
        FileNotFoundError: one of `paths`, or the tokenizer's file, does not exist.
        ValueError: nothing to build from, a setting is wrong, an input is damaged, or `out` is an input, holds
            something else or cannot be written to. Then nothing was changed.
    """
    for path in (paths,) if isinstance(paths, (str, os.PathLike)) else paths:
        check_local("a path of the data", path)
    log, bucket = Progress(progress), BucketOut.open(out, remote or RemoteConfig()) if is_url(out) else None
    out = Path(out) if bucket is None else bucket.folder
    sources = check_settings(paths, out, workers, val_fraction)
    ready = load_tokenizer(tokenizer, vocab_size, eos_token)
    tokens, corpus = find_inputs(sources, include, exclude, out, dtype, log)
    inputs = BuildInputs(
        corpus=corpus, tokens=tokens, tokenizer=ready, kind=str(tokenizer) if corpus else "none",
        vocab_size=vocab_size, eos=eos, val_fraction=val_fraction, text_key=text_key, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    workers = workers or len(os.sched_getaffinity(0))
    if bucket is None:
        _build(inputs, out, workers, overwrite, log)
        return Roxxel(out / inputs.splits[0])
    if bucket.is_whole and all(bucket.holds(split, inputs.record) for split in inputs.splits):
        log.line(f"{bucket.store.url} holds this very data set already: nothing to do")
        return bucket.opened(inputs.splits[0])
    if not overwrite:
        bucket.check_free()
    with bucket.sending(log) as finished:
        _build(inputs, out, workers, True, log, finished)
    return bucket.opened(inputs.splits[0])


def _build(
    inputs: BuildInputs,
    out: Path,
    workers: int,
    overwrite: bool,
    log: Progress,
    finished: Callable[[str, Path], None] = lambda split, path: None,
) -> None:
    for folder in (out, *(out / split for split in SPLITS)):
        if folder.is_dir():
            finish_interrupted(folder)
    # A build that was killed between its splits has one of them there: it is kept, and the other is made.
    missing = [split for split in inputs.splits if not _is_built(out / split, inputs)]
    if not missing:
        log.line(f"{out} holds this very data set already: nothing to do")
        return
    replaced = {
        split: _files_of(out / split) for split in ("", *SPLITS) if split in missing or split not in inputs.splits
    }
    names = [f"{split}/{name}".lstrip("/") for split in replaced for name in replaced[split]]
    if names and not overwrite:
        raise ValueError(
            f"{out} holds another data set ({', '.join(names[:3])}); choose another folder, or replace "
            "it with overwrite=True"
        )
    with staging(out, "build") as staged:
        parts = out / PARTS
        try:
            with interrupt.cleanup(lambda: shutil.rmtree(parts, ignore_errors=True)):
                _make(parts, missing, inputs, workers, log, finished)
                # The split to validate with first: one to train on that is there is complete.
                for split in sorted({*missing, *(split for split in replaced if replaced[split])}, reverse=True):
                    with staging(out / split, "build") if split else nullcontext(staged) as target:
                        if split in missing:
                            _move(parts, split, target, inputs)
                        publish(target, replaced[split])
        finally:
            shutil.rmtree(parts, ignore_errors=True)


def _make(
    parts: Path,
    splits: Sequence[str],
    inputs: BuildInputs,
    workers: int,
    log: Progress,
    finished: Callable[[str, Path], None],
) -> None:
    """Fill a folder with the tokenizer and the shards, beginning where a build that was killed had come to.

    `finished` is given the split and the path of each shard when it is whole.
    """
    record, path = inputs.record(), parts / TOKENIZER_FILE
    if not (parts / BUILD_FILE).is_file() or (parts / BUILD_FILE).read_bytes() != record:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        write_file(parts / BUILD_FILE, record)
    if inputs.size < PARALLEL_BYTES:
        workers = 0
    tokenizer = _tokenizer(inputs, path, workers, log)
    for split in splits:
        (parts / split).mkdir(exist_ok=True)
        last = _finished(parts / split)
        if last is not None:
            log.line(f"going on behind {last.index + 1} finished shards of a build that was ended")
        skipped, name = last.first_document + last.documents if last else 0, f" for {split}" if split else ""
        if tokenizer is not None and inputs.corpus is not None:
            with log.bar(f"encoding{name} with {tokenizer.vocab_size} ids", inputs.size) as advance:
                items = encode_documents(inputs.texts(split, skipped), tokenizer, path, workers, advance)
                options = inputs.options(tokenizer, tokenizer.eos_id if inputs.eos else None)
                written = write_shards(
                    parts / split, SHARD_NAME, items, options, after=last, finished=partial(finished, split)
                )
        else:
            with log.bar(f"copying{name}", inputs.size) as advance:
                items = inputs.arrays(split, skipped, advance)
                options = inputs.options(tokenizer, inputs.source.shards[0].metadata.separator)
                written = write_shards(
                    parts / split, SHARD_NAME, items, options, after=last, finished=partial(finished, split)
                )
        if not written and last is None:
            if split:
                share = f"val_fraction={inputs.val_fraction}"
                raise ValueError(f"{share}: no document is left for {split}; use another share")
            raise ValueError("nothing to build from: every document is empty")


def _tokenizer(inputs: BuildInputs, path: Path, workers: int, log: Progress) -> Tokenizer | None:
    """The tokenizer, given or trained or of a build that was ended, at `path` too; None where tokens are copied."""
    tokenizer = inputs.tokenizer
    if tokenizer is None and inputs.corpus is not None:
        if path.is_file():
            return Tokenizer.load(path)
        log.line(f"training a {inputs.kind} tokenizer")
        kind = next(kind for kind in get_args(Kind) if kind == inputs.kind)
        texts = (piece for text, _ in inputs.texts(inputs.splits[0]) for piece in pieces(text))
        tokenizer = train_on(kind, texts, inputs.vocab_size, workers, progress=log.enabled)
        if tokenizer.vocab_size < (inputs.vocab_size or 0):
            log.line(f"vocab_size={inputs.vocab_size}: the text yields {tokenizer.vocab_size} ids, and no more")
    if tokenizer is not None and not path.is_file():
        tokenizer.save(path)
    return tokenizer


def _finished(folder: Path) -> Metadata | None:
    """The last of the shards that a build which was killed had finished; what is behind it is removed."""
    last: Shard | None = None
    with suppress(ValueError, FileNotFoundError):
        for index in itertools.count():
            shard = Shard.open(folder / SHARD_NAME(index))
            if not shard.follows(last):
                break
            last = shard
    for path in folder.glob("*.rox"):
        if last is None or path.name > last.path.name:
            path.unlink()
    return last.metadata if last else None


def _move(parts: Path, split: str, target: Path, inputs: BuildInputs) -> None:
    """Bring the finished files of a split to the folder that is published."""
    for path in (parts / TOKENIZER_FILE, parts / CONFIG_FILE):
        if path.exists():
            write_file(target / path.name, path.read_bytes())
    for path in (parts / split).glob("*.rox"):
        path.rename(target / path.name)
    with Roxxel(target) as dataset:
        write_file(target / BUILD_FILE, inputs.record(fingerprint=dataset.fingerprint))


def _files_of(folder: Path) -> list[str]:
    """The names of a data set's files in a folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder for the shards")
    shards = [path.name for path in folder.glob("*.rox")]
    # A folder `train` of somebody else's, with a tokenizer and no data, is nothing of ours.
    if folder.name in SPLITS and not shards:
        return []
    beside = (TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE)
    return sorted(shards + [name for name in beside if (folder / name).exists()])


def _is_built(folder: Path, inputs: BuildInputs) -> bool:
    """Whether the data set in a folder came from this very build, by its `build.json`, and was not changed since."""
    try:
        record = json.loads((folder / BUILD_FILE).read_bytes())
        with Roxxel(folder) as dataset:
            same = record == json.loads(inputs.record(fingerprint=dataset.fingerprint))
            return same and (inputs.corpus is None or dataset.tokenizer is not None)
    except (OSError, ValueError):
        return False
