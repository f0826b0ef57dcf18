"""A data set in a table for people.

Checking a data set against its checksums, by as many processes as it is worth.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from roxxel_dist.data.build.progress import Progress
from roxxel_dist.data.build.tokenizer import Tokenizer
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.shard import Shard
from roxxel_dist.data.slices import TokenFile

WORTH_A_PROCESS = 1 << 32
"""Bytes of tokens: half a second's work for a core, which is what a process takes to start."""

Piece = tuple[Path, int, int]


def find_damage(shards: Sequence[TokenFile], progress: Progress, workers: int | None = None) -> Iterator[str]:
    """What is wrong with the shards: one message for each damaged one, which names the block and the document.

    Args:
        shards: open, of one data set.
        progress: shows how far it is.
        workers: processes; None: as many as there are cores, or this one alone where there is little to read.
    """
    size = sum(shard.tokens.nbytes for shard in shards)
    workers = workers or max(1, min(len(os.sched_getaffinity(0)), size // WORTH_A_PROCESS))
    whole: list[Shard] = []
    for shard in shards:
        try:
            if isinstance(shard, Shard):
                shard.verify_ends()
                whole.append(shard)
            else:
                shard.verify()  # a file of another system has no checksums
        except ValueError as error:
            yield str(error)
    yield from _find_damaged_blocks(whole, progress, workers)


def _find_damaged_blocks(shards: Sequence[Shard], progress: Progress, workers: int) -> Iterator[str]:
    pieces = [(shard.path, first, last) for shard in shards for first, last in shard.pieces()]
    by_path = {shard.path: shard for shard in shards}
    with progress.bar("verify", max(1, len(pieces))) as advance:
        # One process reads what is mapped already.
        checked = _in_processes(pieces, workers) if workers > 1 else _in_this_one(shards)
        for path, group in groupby(checked, lambda piece: piece[0]):
            damaged: list[int] = []
            for _, found in group:
                damaged += found
                advance(1)
            try:
                by_path[path].refuse(damaged)
            except ValueError as error:
                yield str(error)


def _in_this_one(shards: Sequence[Shard]) -> Iterator[tuple[Path, list[int]]]:
    for shard in shards:
        for first, last in shard.pieces():
            yield shard.path, shard.damaged_blocks(first, last)


def _in_processes(pieces: Sequence[Piece], workers: int) -> Iterator[tuple[Path, list[int]]]:
    # A fresh interpreter: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        yield from pool.map(_check, pieces)


def _check(piece: Piece) -> tuple[Path, list[int]]:
    path, first, last = piece
    return path, _open(path).damaged_blocks(first, last)


@lru_cache(maxsize=1)
def _open(path: Path) -> Shard:
    return Shard.open(path)


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
