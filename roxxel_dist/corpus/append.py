"""Append text or tokens to an existing data set: new shards after its last one, all of them or none."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from roxxel_dist.corpus.documents import TEXT_FILES
from roxxel_dist.corpus.encode import encode_inputs
from roxxel_dist.corpus.inputs import SHARD_NAME, SPLITS, BuildInputs, PathLike, check_settings, find_inputs
from roxxel_dist.corpus.tally import Tally
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.atomic_dir import publish, staging_folder, writing
from roxxel_dist.data.files.discovery import BUILD_FILE, NoShardsError, build_record, names_objects
from roxxel_dist.data.files.shard import Shard
from roxxel_dist.data.files.slices import TokenFile, fingerprints
from roxxel_dist.data.files.writer import write_shards
from roxxel_dist.data.tokenizer.tokenizer import TOKENIZER_FILE
from roxxel_dist.data.verify import find_damage
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.display import ProgressBars

APPENDED = "appended"
"""The key in build.json of the inputs of each append, in order."""


def append(
    paths: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    text_key: str = "text",
    include: Sequence[str] = TEXT_FILES,
    exclude: Sequence[str] = (),
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Roxxel:
    """Add shards to a data set of `build`, and return the whole data set.

    The new shards have the tokenizer, the dtype and the document ending of the data set, and are verified with their
    checksums before they appear. Existing shards do not change. Inputs that were appended before, in the same form, are
    not appended again; documents that the data set has already are appended, and counted.

    Args:
        paths: texts or tokens, as `build` takes them.
        out: the folder of the data set; if it was built with `val_fraction`, its folder `train` or `val`.
        text_key: the key or column of the text in JSON lines, Parquet and saved data sets.
        include: patterns of the names of files to take from folders.
        exclude: patterns of names to leave out.
        dtype: of the tokens in headerless `.bin` files; default: uint16.
        max_shard_bytes: bytes of tokens per shard; default: as in the build.
        workers: processes; None: one per core.
        progress: show progress on stderr.

    Raises:
        ValueError: there is no data set, it was not made by `build`, the inputs do not fit it, or the folder cannot be
            written to. In that case nothing has changed.
    """
    log, out = ProgressBars(progress), _folder(out)
    sources = check_settings(paths, out, workers=workers, max_shard_bytes=max_shard_bytes)
    with writing(out):  # from the first look: another append continues these shards, or a copy of their record
        record = _record(out)
        tokens, corpus = find_inputs(sources, include, exclude, out, dtype, log)
        limit = max_shard_bytes or record["settings"]["max_shard_bytes"]
        with Roxxel(out) as dataset:
            there, last, before, documents = dataset.shards, dataset.shards[-1], dataset.num_tokens, dataset.documents
            tokenizer = dataset.tokenizer
            if corpus is not None and tokenizer is None:
                raise UserError(f"{out} has no {TOKENIZER_FILE}: it was made of tokens, so append tokens, not text")
        inputs = BuildInputs(
            corpus=corpus, tokens=tokens, tokenizer=tokenizer, text_key=text_key, max_shard_bytes=limit
        )
        added = {name: value for name, value in json.loads(inputs.record()).items() if name != "settings"}["inputs"]
        if added in record.get(APPENDED, []):
            log.line(f"{out} already has these inputs: nothing to do")
            return Roxxel(out)
        with staging_folder(out, "build") as staged:
            separator = last.metadata.separator
            options = inputs.options(tokenizer if corpus is not None else None, separator).continue_from(
                last.metadata, last.dtype, last.path
            )
            tally, path, processes = Tally(), out / TOKENIZER_FILE, workers or len(os.sched_getaffinity(0))
            separated = separator is not None
            items = encode_inputs(inputs, "", 0, tokenizer, path, processes, log, tally, separated=separated)
            if not write_shards(staged, SHARD_NAME, items, options, after=last.metadata):
                raise UserError("nothing to append: every document is empty")
            shards = [Shard.open(path) for path in sorted(staged.glob("*.rox"))]
            if damage := list(find_damage(shards, ProgressBars(False), workers)):
                raise UserError(f"{damage[0]}: the disk did not store the shard correctly; nothing was changed")
            repeated = count_repeated(there, shards)
            record[APPENDED] = [*record.get(APPENDED, []), added]
            *_, record["fingerprint"] = fingerprints(
                (shard.metadata.chain, 0, shard.metadata.tokens) for shard in (*there, *shards)
            )
            write_file(staged / BUILD_FILE, json.dumps(record, indent=1, sort_keys=True).encode())
            publish(staged, ())
        whole = Roxxel(out)
    new = f"{whole.num_tokens - before:,} tokens of {whole.documents - documents:,} documents"
    for line in tally.lines():
        log.line(line)
    log.line(f"appended {new} in {len(shards)} shard(s)")
    if repeated:
        log.line(f"{repeated:,} of these documents were there already: the data set has them twice now")
    return whole


def _folder(out: PathLike) -> Path:
    if names_objects(out):
        raise UserError(
            f"{out} is in an object store: append to the local folder of the data set, send the new shards, as with "
            f"`aws s3 sync`, and write the index: `roxxel-dist data index {out}`"
        )
    folder = Path(out)
    if any(folder.glob("*.rox")):
        return folder
    parts = [str(folder / split) for split in SPLITS if any((folder / split).glob("*.rox"))]
    if parts:
        raise UserError(f"{out} was built with a val_fraction: name the part to append to, {' or '.join(parts)}")
    raise NoShardsError(f"{out} has no shards: make a data set there with `roxxel-dist data build` first")


def _record(out: Path) -> dict[str, Any]:
    with suppress(OSError, TypeError):
        record = build_record((out / BUILD_FILE).read_bytes())
        if record and "max_shard_bytes" in record["settings"]:
            return record
    raise UserError(
        f"{out} has no {BUILD_FILE} of `data build`: append to it with Roxxel(PATH).write(TOKENS, append=True)"
    )


def count_repeated(there: Sequence[TokenFile], new: Sequence[TokenFile]) -> int:
    """The number of documents of the `new` shards have the tokens of a document in the shards that are `there`.

    Only documents that are as long as a new one are read and hashed (xxh3-128), so most of a data set with long
    documents is not; at most all tokens are read once.
    """
    lengths = np.unique(np.concatenate([_lengths(shard) for shard in new]))
    wanted = {digest for shard in new for digest in _digests(shard, lengths)}
    known = {digest for shard in there for digest in _digests(shard, lengths) if digest in wanted}
    return sum(digest in known for shard in new for digest in _digests(shard, lengths))


def _lengths(shard: TokenFile) -> np.ndarray:
    """int64[documents]: the tokens of each document, with what separates it from the next."""
    return np.diff(shard.document_ends, prepend=0)


def _digests(shard: TokenFile, lengths: np.ndarray) -> Iterator[bytes]:
    """The digest of each document that has one of these lengths."""
    ends = shard.document_ends
    sizes = _lengths(shard)
    dtype = np.dtype("<i8") if shard.dtype.kind in "iu" else shard.dtype
    for number in np.flatnonzero(np.isin(sizes, lengths)).tolist():
        stop = int(ends[number])
        tokens = shard.read(stop - int(sizes[number]), stop)
        yield xxhash.xxh3_128_digest(np.ascontiguousarray(tokens.astype(dtype, copy=False)).data.cast("B"))
