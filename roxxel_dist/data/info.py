"""A data set in a table for people."""

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.shard import Shard
from roxxel_dist.data.tokenizer import Tokenizer

SHOWN_CHARACTERS = 200


def info(ds: Roxxel) -> str:
    """What a data set holds, one fact a line, and how its first document begins."""
    tokenizer, tokens = ds.tokenizer, ds.num_tokens
    size = sum(shard.path.stat().st_size for shard in ds.shards)
    rows = [
        ("shards", f"{len(ds.shards)} ({ds.shards[0].path.parent})"),
        ("format", "ROXXEL03" if isinstance(ds.shards[0], Shard) else f"{ds.shards[0].kind}, read in place"),
        ("tokens", f"{tokens:,}"),
        ("documents", f"{ds.documents:,} (mean {tokens / max(1, ds.documents):,.1f} tokens)"),
        ("dtype", str(ds.dtype)),
        ("vocabulary", "not known" if ds.vocab_size is None else f"{ds.vocab_size:,} ids"),
        ("tokenizer", _tokenizer(ds, tokenizer)),
        ("bytes", f"{size:,} on disk"),
        ("fingerprint", ds.fingerprint),
        ("begins", _beginning(ds, tokenizer)),
    ]
    return "\n".join(f"{name:<12} {value}" for name, value in rows)


def _tokenizer(ds: Roxxel, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none beside the shards; their ids are from " + (ds.tokenizer_fingerprint or "none")
    return f"{tokenizer.kind}, {tokenizer.fingerprint}"


def _beginning(ds: Roxxel, tokenizer: Tokenizer | None) -> str:
    if not len(ds):
        return "(no document)"
    ids = ds[0][: 4 * SHOWN_CHARACTERS]  # a character is at most 4 bytes, and so at most 4 ids
    if tokenizer is not None:
        return repr(tokenizer.decode(ids.tolist())[:SHOWN_CHARACTERS])
    if ds.dtype == "uint8" and ds.vocab_size is None:
        return repr(ids.tobytes().decode(errors="replace")[:SHOWN_CHARACTERS])
    return " ".join(map(str, ids[: SHOWN_CHARACTERS // 8].tolist()))
