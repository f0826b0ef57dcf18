"""Where a token of a data set is: file, document, and position in both."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from roxxel_dist.data.dataset import Roxxel


@dataclass(frozen=True, kw_only=True)
class Place:
    """Of one token."""

    path: Path
    """The shard."""
    document: int
    """Number of its document in that shard, from 0."""
    position: int
    """Tokens of the document before it."""


def place_of(dataset: Roxxel, offset: int) -> Place:
    """The place of token `offset`, counted from the data set's start over all shards.

    Raises:
        ValueError: the data set has no such token.
    """
    firsts = list(accumulate((len(shard.tokens) for shard in dataset.shards), initial=0))
    if not 0 <= offset < firsts[-1]:
        raise ValueError(f"token {offset}: the data set has tokens 0 to {firsts[-1] - 1}")
    number = bisect_right(firsts, offset) - 1
    shard, inside = dataset.shards[number], offset - firsts[number]
    document = int(np.searchsorted(shard.document_ends, inside, side="right"))
    start = int(shard.document_ends[document - 1]) if document else 0
    return Place(path=shard.path, document=document, position=inside - start)
