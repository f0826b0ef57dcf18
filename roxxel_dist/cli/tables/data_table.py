"""The text of the command `data info`, which `data build` and `data append` end with."""

from pathlib import Path

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.shard import Shard
from roxxel_dist.data.files.slices import TokenFile
from roxxel_dist.data.remote.shard import RemoteShard
from roxxel_dist.utils.display import aligned

SHOWN_CHARACTERS = 200


def _bytes_of(shard: TokenFile) -> int:
    return shard.entry.size if isinstance(shard, RemoteShard) else Path(str(shard.path)).stat().st_size


def text_row(ds: Roxxel) -> list[tuple[str, str]]:
    """The bytes of text, of a data set whose shards have them."""
    sizes = [(shard.metadata.text_bytes, shard.metadata.counted_bytes) for shard in ds.shards]
    if not all(text for text, _ in sizes):
        return []
    text, counted = (sum(each or 0 for each in column) for column in zip(*sizes, strict=True))
    return [("text", f"{text:,} bytes, of which the tokens are {counted:,}: the tokenizer may change text")]


def data_table(ds: Roxxel) -> str:
    """A summary of a data set, one fact per line, and the beginning of its first document."""
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
