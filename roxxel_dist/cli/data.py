"""The commands under `data`: make, describe and check shards of tokens."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.cli.flags import Positional
from roxxel_dist.cli.parser import parse
from roxxel_dist.launcher.job.spec import flags_in
from roxxel_dist.process.exit_codes import EXIT_FAILED, UserError
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.utils.display import aligned

if TYPE_CHECKING:
    from roxxel_dist.data.dataset import Roxxel
    from roxxel_dist.data.files.slices import TokenFile

MOST_SHARD_MB = 1 << 30
SHOWN_OBJECTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sources:
    paths: Positional[tuple[str, ...]]
    """Text: files and folders (each file is a document), .jsonl, .jsonl.gz and .parquet files, folders saved by Hugging
    Face datasets. Or token files: .npy, .bin, .bin with .idx, .rox."""
    text_key: str = "text"
    """The key or column of the text in JSON lines, Parquet and saved data sets."""
    dtype: str | None = None
    """Type of the tokens in .bin files without a header. Default: uint16."""
    workers: int | None = None
    """Number of processes. Default: one for each core. The result does not depend on it."""
    include: tuple[str, ...] | None = None
    """Patterns of the file names to read from folders, such as '*.py'. Default: the usual text files."""
    exclude: tuple[str, ...] = ()
    """Patterns of the files and folders to skip, such as test 'build/*'."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildArgs(_Sources):
    """Build shards of tokens from text, or from token files of another system."""

    out: str
    """The folder for shards, tokenizer.json and build.json. Or an address in a bucket, such as s3://BUCKET/DATA: each
    shard is sent when it is complete, and the index last."""
    tokenizer: str = "bpe"
    """bpe, byte or char; or the path of a tokenizer.json, of a Hugging Face tokenizer folder, or of a SentencePiece
    .model."""
    vocab_size: int | None = None
    """Vocabulary size of the bpe tokenizer (default 8192). With token files: all ids are below it."""
    eos: bool = True
    """Add the end-of-text token of the tokenizer to each document."""
    eos_token: str | None = None
    """The end-of-text token of an existing tokenizer whose files do not name it."""
    val_fraction: float = 0.0
    """Fraction of the documents to hold out. Then OUT/train and OUT/val are built."""
    max_shard_mb: int = 256
    """MiB of tokens in a shard, at most."""
    overwrite: bool = False
    """Replace the data set in the folder."""
    cache_dir: str | None = None
    """For an OUT in a bucket: the local cache folder in which the shards are built. It needs space for all of them."""
    store_timeout: float = 120.0
    """Seconds to retry an operation of the object store. After that the exit code is 74."""


def data_build(words: list[str]) -> int:
    """Make shards of tokens from text."""
    args = parse(BuildArgs, words, "data build")
    with usage_errors():
        from roxxel_dist.corpus.build import build
        from roxxel_dist.data.remote.config import RemoteConfig

        options: dict[str, Any] = dataclasses.asdict(args)
        options["remote"] = RemoteConfig(cache_dir=options.pop("cache_dir"), store_timeout=options.pop("store_timeout"))
        options["max_shard_bytes"] = _shard_bytes(options.pop("max_shard_mb"))
        if args.include is None:
            del options["include"]
        with build(options.pop("paths"), options.pop("out"), **options) as dataset:
            print(data_table(dataset))
    return 0


def _shard_bytes(mebibytes: int) -> int:
    """The bytes of --max_shard_mb."""
    if not 1 <= mebibytes <= MOST_SHARD_MB:
        raise UserError(f"--max_shard_mb {mebibytes}: MiB of tokens in a shard, from 1 to {MOST_SHARD_MB:,}")
    return mebibytes << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppendArgs(_Sources):
    """Add more text, or more tokens, to a data set that `data build` has made.

    The new shards have the tokenizer and the dtype of the data set. They are verified, and all appear at once. The
    shards that are there do not change. A run continues on them with `train --run_dir RUN --resume --amend`.
    """

    out: str
    """The folder of the data set; of one built with --val_fraction its folder train or val."""
    max_shard_mb: int | None = None
    """MiB of tokens in a shard, at most. Default: as in `data build`."""


def data_append(words: list[str]) -> int:
    """Add more text to a data set that `data build` has made."""
    if refused := {"tokenizer", "vocab_size"} & flags_in(words).keys():
        what = " and ".join(f"--{name}" for name in sorted(refused))
        raise UserError(f"a data set keeps the tokenizer that it was built with: leave {what} out")
    args = parse(AppendArgs, words, "data append")
    with usage_errors():
        from roxxel_dist.corpus.append import append

        options: dict[str, Any] = dataclasses.asdict(args)
        size = options.pop("max_shard_mb")
        options["max_shard_bytes"] = None if size is None else _shard_bytes(size)
        if args.include is None:
            del options["include"]
        with append(options.pop("paths"), options.pop("out"), **options) as dataset:
            print(data_table(dataset))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InfoArgs:
    """Describe shards of tokens."""

    path: Positional[str]
    """A folder, a file, or a pattern of files."""
    dtype: str | None = None
    """Type of the tokens in .bin files without a header. Default: uint16."""


def data_info(words: list[str]) -> int:
    """Describe shards."""
    args = parse(InfoArgs, words, "data info")
    with usage_errors():
        from roxxel_dist.data.dataset import Roxxel

        with Roxxel(args.path, dtype=args.dtype) as dataset:
            print(data_table(dataset))
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexArgs:
    """Write the index of shards that another program has uploaded to an object store. `data build` writes it itself."""

    path: Positional[str]
    """The address of the data set: s3://, gs:// or az://."""


def data_index(words: list[str]) -> int:
    """Write the index object of shards in an object store."""
    args = parse(IndexArgs, words, "data index")
    with usage_errors():
        from roxxel_dist.data.remote.index import INDEX, not_in_index, write_index
        from roxxel_dist.objects.store import ObjectStore

        store = ObjectStore.open(args.path)
        write_index(store)
        print(f"index: {store.url.join(INDEX)}")
        if others := not_in_index([info.key for info in store.list()]):
            more = ", ..." if len(others) > SHOWN_OBJECTS else ""
            print(
                f"left out: {len(others):,} objects that are no shards, or not directly there: "
                f"{', '.join(others[:SHOWN_OBJECTS])}{more}"
            )
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyArgs(InfoArgs):
    """Compare every block of every shard with its checksum. Exit code 1: a block is damaged."""

    workers: int | None = None
    """Number of processes. Default: one for each core if the data is large."""


def data_verify(words: list[str]) -> int:
    """Check every block of every shard."""
    args = parse(VerifyArgs, words, "data verify")
    with usage_errors():
        whole, lines = verify_shards(args.path, args.workers, args.dtype)
        print(*lines, sep="\n")
    return 0 if whole else EXIT_FAILED


def verify_shards(path: str, workers: int | None = None, dtype: str | None = None) -> tuple[bool, list[str]]:
    """(Whether all shards are whole, what to say of them). Raises ValueError where there are none."""
    from roxxel_dist.data.dataset import Roxxel
    from roxxel_dist.data.files.discovery import NoShardsError, names_objects
    from roxxel_dist.data.verify import find_damage, verify_objects
    from roxxel_dist.utils.display import ProgressBars

    if names_objects(path):
        problems, whole = verify_objects(path, ProgressBars(True))
        return not problems, problems or [whole]
    try:
        opened = Roxxel(path, dtype=dtype)
    except NoShardsError:
        raise
    except ValueError as error:  # the files are there, and what opening checks is wrong already
        return False, [str(error)]
    with opened as dataset:
        damage = list(find_damage(dataset.shards, ProgressBars(True), workers))
        try:
            _ = dataset.tokenizer  # the file beside the shards decides what their ids mean
        except ValueError as error:
            damage.append(str(error))
        whole = f"{len(dataset.shards)} shards, {dataset.num_tokens:,} tokens: complete"
    return not damage, damage or [whole]


SHOWN_CHARACTERS = 200


def _bytes_of(shard: "TokenFile") -> int:
    from roxxel_dist.data.remote.shard import RemoteShard

    return shard.entry.size if isinstance(shard, RemoteShard) else Path(str(shard.path)).stat().st_size


def text_row(ds: "Roxxel") -> list[tuple[str, str]]:
    """The bytes of text, of a data set whose shards have them."""
    sizes = [(shard.metadata.text_bytes, shard.metadata.counted_bytes) for shard in ds.shards]
    if not all(text for text, _ in sizes):
        return []
    text, counted = (sum(each or 0 for each in column) for column in zip(*sizes, strict=True))
    return [("text", f"{text:,} bytes, of which the tokens are {counted:,}: the tokenizer may change text")]


def data_table(ds: "Roxxel") -> str:
    """A summary of a data set, one fact per line, and the beginning of its first document."""
    from roxxel_dist.data.files.shard import Shard

    tokenizer, tokens = ds.tokenizer, ds.num_tokens
    size = sum(_bytes_of(shard) for shard in ds.shards)
    made_by = "no tokenizer.json beside the shards"
    if ds.tokenizer_fingerprint is not None:
        made_by += f"; they were made with {ds.tokenizer_fingerprint}"
    ids = ds[0][: 4 * SHOWN_CHARACTERS] if len(ds) else None  # a character has at most 4 bytes, so at most 4 ids
    if tokenizer is not None:
        made_by = f"{tokenizer.kind}, {tokenizer.fingerprint}"
    if ids is None:
        begins = "(no document)"
    elif tokenizer is not None:
        begins = repr(tokenizer.decode(ids.tolist())[:SHOWN_CHARACTERS])
    elif ds.dtype == "uint8" and ds.vocab_size is None:
        begins = repr(ids.tobytes().decode(errors="replace")[:SHOWN_CHARACTERS])
    else:
        begins = " ".join(map(str, ids[: SHOWN_CHARACTERS // 8].tolist()))
    rows = [
        ("shards", f"{len(ds.shards)} ({ds.shards[0].path.parent})"),
        ("format", "ROXXEL03" if isinstance(ds.shards[0], Shard) else f"{ds.shards[0].kind}, read in place"),
        ("tokens", f"{tokens:,}"),
        ("documents", f"{ds.documents:,} (mean {tokens / max(1, ds.documents):,.1f} tokens)"),
        ("dtype", str(ds.dtype) if ds.guessed_dtype is None else f"{ds.dtype}, because no other was given"),
        ("vocabulary", "not known" if ds.vocab_size is None else f"{ds.vocab_size:,} ids"),
        ("tokenizer", made_by),
        *text_row(ds),
        ("bytes", f"{size:,}" if ds.fetcher else f"{size:,} on disk"),
        ("fingerprint", ds.fingerprint),
        ("begins", begins),
    ]
    return "\n".join(aligned(rows, left=None))
