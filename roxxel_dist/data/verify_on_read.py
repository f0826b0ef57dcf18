"""Blocks of tokens compared with their checksums where they are first read, and the ids in them with a vocabulary."""

import itertools
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.shard import DEFAULT_BLOCK_SIZE, Shard
from roxxel_dist.data.slices import TokenFile

BLOCKS_AT_ONCE = 256
"""Hashed without a pause: a fifth of a millisecond, in which a thread of Python keeps the others waiting."""
PAUSE_S = 50e-6


class DamagedData(ValueError):
    """Tokens that are read are not those that were written, or are ids that the model does not have."""


@dataclass(eq=False)
class _File:
    """What is known of one file."""

    file: TokenFile
    block_size: int
    verified: np.ndarray
    """bool [blocks]"""
    table_verified: bool = False
    ends_verified: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class VerifiedBlocks:
    """Which blocks of the open files agree with their checksums: each is looked at once, when it is first asked for.

    Files of other systems have no checksums; of those the ids are compared alone. May be used by several threads.

    Args:
        vocab_size: ids are below it; None: below what the data says of itself.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._files: dict[Path, _File] = {}

    def verify(self, data: Roxxel, offsets: np.ndarray, length: int, *, documents: bool = False) -> None:
        """Compare what some windows read, as far as that was not done before.

        Args:
            data: where they are.
            offsets: int64 [R], their first tokens, as for `Roxxel.read`.
            length: tokens a window.
            documents: whether the ends of the documents are read too.

        Raises:
            DamagedData: something does not agree. The message names the file, the block and its documents.
        """
        firsts, shards = data.first_tokens, data.shards
        numbers = np.searchsorted(firsts, offsets, side="right") - 1
        for number in np.unique(numbers).tolist():
            known = self._of(shards[number])
            with known.lock:
                self._verify(known, offsets[numbers == number] - firsts[number], length, documents)

    def _of(self, file: TokenFile) -> _File:
        known = self._files.get(file.path)
        if known is None or known.file.metadata.chain != file.metadata.chain:
            size = file.layout.block_size if isinstance(file, Shard) else DEFAULT_BLOCK_SIZE
            known = _File(file, size, np.zeros(-(-file.tokens.nbytes // size), bool))
            self._files[file.path] = known
        return known

    def _verify(self, known: _File, starts: np.ndarray, length: int, documents: bool) -> None:
        """The same for one file; `starts` are counted from its first token."""
        file = known.file
        if isinstance(file, Shard):
            if not known.table_verified:
                file.verify_checksums()
                known.table_verified = True
            if documents and not known.ends_verified:
                file.verify_document_ends()
                known.ends_verified = True
        low = starts * file.dtype.itemsize // known.block_size
        high = ((starts + length) * file.dtype.itemsize - 1) // known.block_size
        touched = low[:, None] + np.arange(int((high - low).max()) + 1)
        touched = np.unique(np.minimum(touched, high[:, None]))
        new = touched[~known.verified[touched]]
        for first in range(0, len(new), BLOCKS_AT_ONCE):
            part = new[first : first + BLOCKS_AT_ONCE]
            if isinstance(file, Shard) and (damaged := file.damaged(part)):
                raise DamagedData(
                    f"{file.damage(damaged)}: it does not agree with its checksum. `roxxel-dist data verify "
                    f"{file.path.parent}` names all that is damaged; put the file back or build the data again, and "
                    "go on; with verify_data off it is trained on as it is"
                )
            self._compare_ids(known, part)
            known.verified[part] = True
            if first + BLOCKS_AT_ONCE < len(new):
                time.sleep(PAUSE_S)

    def _compare_ids(self, known: _File, blocks: np.ndarray) -> None:
        file, declared = known.file, known.file.metadata.vocab_size
        size = min((size for size in (self._vocab_size, declared) if size is not None), default=None)
        if size is None or file.dtype.kind not in "iu":
            return
        if file.dtype.kind == "u" and np.iinfo(file.dtype).max < size:
            return
        for first, last in _runs(blocks):
            width, block = file.dtype.itemsize, known.block_size
            low = first * block // width
            ids = file.tokens[low : -(-last * block // width)]
            if ids.max() >= size or ids.min() < 0:
                wrong = low + int(np.argmax((ids >= size) | (ids < 0)))
                document = int(np.searchsorted(file.document_ends, wrong, side="right"))
                raise DamagedData(
                    f"{file.path}: token {wrong} (document {document}) is the id {file.tokens[wrong]}, and the "
                    f"vocabulary has the ids 0 to {size - 1}. Use the tokenizer that the model was made with and build "
                    "the data again, or a larger vocab_size"
                )


def _runs(blocks: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past the last) of each run of neighbours in an ascending array."""
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    edges = [0, *cuts.tolist(), len(blocks)]
    return [(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in itertools.pairwise(edges) if b > a]
