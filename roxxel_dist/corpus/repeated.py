"""Documents of new shards that a data set has already."""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from roxxel_dist.data.files.slices import TokenFile


def count_repeated(there: Sequence[TokenFile], new: Sequence[TokenFile]) -> int:
    """How many documents of the `new` shards have the tokens of a document in the shards that are `there`.

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
