"""Texts, or tokens of other systems, to a data set: one folder of shards that appears complete or not at all."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from roxxel_dist.corpus.documents import TEXT_FILES, pieces
from roxxel_dist.corpus.encode import PARALLEL_BYTES, encode_inputs, train_on
from roxxel_dist.corpus.inputs import (
    SHARD_NAME,
    SPLITS,
    BuildInputs,
    PathLike,
    check_settings,
    find_inputs,
    load_tokenizer,
)
from roxxel_dist.corpus.tally import Tally
from roxxel_dist.corpus.to_bucket import BucketOut
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.atomic_dir import publish, staging_folder, writing
from roxxel_dist.data.files.discovery import BUILD_FILE, check_local, names_objects
from roxxel_dist.data.files.format import Metadata
from roxxel_dist.data.files.shard import Shard
from roxxel_dist.data.files.writer import write_shards
from roxxel_dist.data.remote.config import RemoteConfig
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Kind, Tokenizer
from roxxel_dist.process import interrupt
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars
from roxxel_dist.utils.voice import argument

MAX_SHARD_BYTES = 256 << 20
PARTS = ".build.parts"


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
    """Build a data set from text, or from the tokens of another system, and return it, or its training split.

    The result depends only on the inputs and these settings; if `out` has it already, it is returned at once. If a
    build was killed and you start it again, it continues after its last finished shard, with the tokenizer that it has
    trained; an interrupted or failed build leaves no files.

    Args:
        paths: text files, which are always included, and folders, which are walked in sorted order, links too. Hidden
            files and folders, `__pycache__`, installed packages and the files of data sets in these folders are left
            out, and so are empty files and files that are not UTF-8; all are counted. A link to a text file that is not
            there is an error. A text file is one document. JSON lines (`.jsonl`, `.jsonl.gz`), Parquet files and
            folders saved by Hugging Face `datasets` have many. Or any path that `Roxxel` opens, whose documents are
            copied unchanged.
        out: the folder to fill with `tokenizer.json`, `shard_00000.rox` and so on, and `build.json`. If it is inside an
            input folder, it is not read. In a bucket (`s3://…`) each shard is sent when it is complete, and the index
            of the data set last; until then the files are in the cache of `remote`.
        tokenizer: "bpe", "byte" or "char" to train one, or a path for `Tokenizer.load`. With tokens: their tokenizer.
        vocab_size: number of ids; see `train_tokenizer`. With tokens: ids are below it.
        eos: documents of text end with the tokenizer's end-of-text.
        eos_token: the name of end-of-text in a ready-made tokenizer, if its own files do not give it.
        text_key: the key or column of the text in JSON lines, Parquet and saved data sets.
        val_fraction: the share of documents to hold out, chosen by their numbers; fills `out/train` and `out/val`.
        dtype: of the tokens in headerless `.bin` files; default: uint16.
        include: patterns of the names of files to take from folders.
        exclude: patterns to leave out, of the path below the given folder ("test/*") or of any name ("test").
        max_shard_bytes: bytes of tokens per shard.
        workers: processes, or threads to train a tokenizer; None: one per core. Less than 8 MiB of text uses one.
        overwrite: replace another data set in `out`.
        progress: show progress on stderr.
        remote: for an `out` in a bucket: the cache in which the files are made, and the time limit of the store.

    Raises:
        StoreError: the bucket of `out` cannot be used.
        FileNotFoundError: one of `paths`, or the tokenizer's file, does not exist.
        ValueError: no inputs, a wrong setting, a damaged input, or `out` is an input, has other content or cannot be
            written to. In that case nothing has changed.
    """
    for path in (paths,) if isinstance(paths, (str, os.PathLike)) else paths:
        check_local("a path of the data", path)
    if not names_objects(out):
        check_local("out", out)
    log, bucket = ProgressBars(progress), BucketOut.open(out, remote or RemoteConfig()) if names_objects(out) else None
    out = Path(out) if bucket is None else bucket.folder
    sources = check_settings(
        paths, out, workers=workers, max_shard_bytes=max_shard_bytes, val_fraction=val_fraction, vocab_size=vocab_size,
        trains=str(tokenizer) if str(tokenizer) in get_args(Kind) else None,
    )  # fmt: skip
    if bucket is None and not any((out / split / BUILD_FILE).exists() for split in ("", *SPLITS)):
        with writing(out):  # before the inputs are read
            _check_place(out)
    ready = load_tokenizer(tokenizer, vocab_size, eos_token)
    inputs = BuildInputs(
        tokenizer=ready, kind=str(tokenizer), vocab_size=vocab_size, eos=eos, val_fraction=val_fraction,
        text_key=text_key, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip

    def judge(sizes: Sequence[int]) -> None:
        """Refuse a place that holds another data set, as far as that is known before the texts are read."""
        records = {split: (bucket.record(split) if bucket else _record(out / split)) for split in inputs.splits}
        kept = {split for split, record in records.items() if inputs.may_have_made(record, sizes)}
        if bucket is None:
            _replaced(out, kept, overwrite)
        elif not overwrite and not (bucket.is_whole and len(kept) == len(records)):
            bucket.check_free()

    tokens, corpus = find_inputs(sources, include, exclude, out, dtype, log, judge)
    inputs = replace(inputs, corpus=corpus, tokens=tokens, kind=inputs.kind if corpus else "none")
    workers = workers or len(os.sched_getaffinity(0))
    if bucket is None:
        _build(inputs, out, workers, overwrite, log)
        return Roxxel(out / inputs.splits[0])
    if bucket.is_whole and all(bucket.holds(split, inputs.record) for split in inputs.splits):
        log.line(f"{bucket.store.url} already holds this data set: nothing to do")
        return bucket.open_split(inputs.splits[0])
    if not overwrite:
        bucket.check_free()
    with bucket.send_build(log) as finished:
        _build(inputs, out, workers, True, log, finished)
    return bucket.open_split(inputs.splits[0])


def _build(
    inputs: BuildInputs,
    out: Path,
    workers: int,
    overwrite: bool,
    log: ProgressBars,
    finished: Callable[[str, Path], None] = lambda split, path: None,
) -> None:
    if all(_is_built(out / split, inputs) for split in inputs.splits):  # who only reads takes no lock
        log.line(f"{out} already holds this data set: nothing to do")
        return
    with ExitStack() as held:
        for folder in (out, *(out / split for split in SPLITS if (out / split).is_dir())):
            held.enter_context(writing(folder))
        _build_held(inputs, out, workers, overwrite, log, finished)


def _build_held(
    inputs: BuildInputs,
    out: Path,
    workers: int,
    overwrite: bool,
    log: ProgressBars,
    finished: Callable[[str, Path], None],
) -> None:
    """`_build` by the holder of the locks of all folders that it reads and changes."""
    # A build that was killed between its splits keeps the finished one, and makes the other.
    missing = [split for split in inputs.splits if not _is_built(out / split, inputs)]
    if not missing:
        log.line(f"{out} already holds this data set: nothing to do")
        return
    replaced = _replaced(out, {*inputs.splits} - {*missing}, overwrite)
    with staging_folder(out, "build") as staged:
        parts = out / PARTS
        try:
            with interrupt.cleanup(lambda: shutil.rmtree(parts, ignore_errors=True)):
                _make(parts, missing, inputs, workers, log, finished)
                # The validation split first: if the training split exists, the data set is complete.
                for split in sorted({*missing, *(split for split in replaced if replaced[split])}, reverse=True):
                    # The lock of a split is held already, unless the build makes its folder.
                    with (
                        writing(out / split, nested=True),
                        staging_folder(out / split, "build") if split else nullcontext(staged) as target,
                    ):
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
    log: ProgressBars,
    finished: Callable[[str, Path], None],
) -> None:
    """Fill a folder with the tokenizer and the shards, continuing from the last shard of a killed build. `finished` is
    called with the split and the path of each complete shard."""
    record, path = inputs.record(), parts / TOKENIZER_FILE
    if not (parts / BUILD_FILE).is_file() or (parts / BUILD_FILE).read_bytes() != record:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir()
        write_file(parts / BUILD_FILE, record)
    if inputs.size < PARALLEL_BYTES:
        workers = 0
    tokenizer, tally = _tokenizer(inputs, path, workers, log), Tally()
    for split in splits:
        (parts / split).mkdir(exist_ok=True)
        last = _finished(parts / split)
        if last is not None:
            log.line(f"continuing after {last.index + 1} finished shards of an interrupted build")
        skipped = last.first_document + last.documents if last else 0
        items = encode_inputs(inputs, split, skipped, tokenizer, path, workers, log, tally, separated=inputs.eos)
        if tokenizer is not None and inputs.corpus is not None:
            options = inputs.options(tokenizer, tokenizer.eos_id if inputs.eos else None)
        else:
            options = inputs.options(tokenizer, inputs.source.shards[0].metadata.separator)
        written = write_shards(parts / split, SHARD_NAME, items, options, after=last, finished=partial(finished, split))
        if not written and last is None:
            if split:
                share = argument("val_fraction", inputs.val_fraction)
                raise UserError(f"{share}: no document is left for {split}; use another share")
            raise UserError("nothing to build from: every document is empty")
    for line in tally.lines():
        log.line(line)


def _tokenizer(inputs: BuildInputs, path: Path, workers: int, log: ProgressBars) -> Tokenizer | None:
    """The tokenizer, given, trained, or from a killed build, also saved at `path`; None if tokens are copied."""
    tokenizer = inputs.tokenizer
    if tokenizer is None and inputs.corpus is not None:
        if path.is_file():
            return Tokenizer.load(path)
        log.line(f"training a {inputs.kind} tokenizer")
        kind = next(kind for kind in get_args(Kind) if kind == inputs.kind)
        tokenizer = _trained(kind, inputs, workers, log)
        if tokenizer.vocab_size < (inputs.vocab_size or 0):
            log.line(
                f"{argument('vocab_size', inputs.vocab_size)}: the text yields {tokenizer.vocab_size} ids, and no more"
            )
    if tokenizer is not None and not path.is_file():
        tokenizer.save(path)
    return tokenizer


def _trained(kind: Kind, inputs: BuildInputs, workers: int, log: ProgressBars) -> Tokenizer:
    """A tokenizer of the texts to train on; on a terminal with a bar of what of them is read."""
    with ExitStack() as held:
        is_shown = log.enabled and kind == "bpe" and sys.stderr.isatty()
        advance = held.enter_context(log.bar("reading", inputs.size)) if is_shown else lambda size: None

        def texts() -> Iterator[str]:
            for text, size in inputs.texts(inputs.splits[0]):
                yield from pieces(text)
                advance(size)

        return train_on(kind, texts(), inputs.vocab_size, workers)


def _finished(folder: Path) -> Metadata | None:
    """The last finished shard of a killed build; files after it are removed."""
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
    """Move the finished files of a split to the folder that is published."""
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
        raise UserError(f"{folder} is a file: name a folder for the shards")
    shards = [path.name for path in folder.glob("*.rox")]
    # A folder `train` with a tokenizer and no data is not from a build.
    if folder.name in SPLITS and not shards:
        return []
    beside = (TOKENIZER_FILE, CONFIG_FILE, BUILD_FILE)
    return sorted(shards + [name for name in beside if (folder / name).exists()])


def _replaced(out: Path, kept: Set[str], overwrite: bool) -> dict[str, list[str]]:
    """The files of data sets in a folder, by split, that a build replaces: all but those of the splits that are `kept`.
    Raises UserError where there are some and it may not `overwrite` them."""
    replaced = {split: _files_of(out / split) for split in ("", *SPLITS) if split not in kept}
    if "" in replaced:
        _check_place(out)
    names = [f"{split}/{name}".lstrip("/") for split in replaced for name in replaced[split]]
    if names and not overwrite:
        raise UserError(
            f"{out} holds another data set ({', '.join(names[:3])}); choose another folder, or replace "
            f"it with {argument('overwrite')}"
        )
    return replaced


def _record(folder: Path) -> bytes:
    """The `build.json` of a data set; empty where there is none."""
    try:
        return (folder / BUILD_FILE).read_bytes()
    except OSError:
        return b""


def _check_place(out: Path) -> None:
    """Raises UserError for a folder with files that a build would replace and none has made."""
    for name in _files_of(out) if not any(out.glob("*.rox")) else []:
        raise UserError(f"{out} has {name} and no shards: choose another folder, or move it away")


def _is_built(folder: Path, inputs: BuildInputs) -> bool:
    """Whether the data set in a folder comes from the same build, by its `build.json`, and is unchanged."""
    try:
        record = json.loads(_record(folder))
        with Roxxel(folder) as dataset:
            same = record == json.loads(inputs.record(fingerprint=dataset.fingerprint))
            return same and (inputs.corpus is None or dataset.tokenizer is not None)
    except (OSError, ValueError):
        return False
