"""The checkpoints of paused trials: what they take of the disk, and how they are taken away."""

import shutil
from collections.abc import Collection
from pathlib import Path

from roxxel_dist.run_directory import CHECKPOINTS

KEEP_GB = "keep_gb"
"""The rule by which a trial ends whose checkpoint was taken away."""


class KeptCheckpoints:
    """Those in a folder of run directories, by the numbers of their trials; at most `limit_gb` (10^9 bytes) of them."""

    def __init__(self, trials: Path, limit_gb: float) -> None:
        self._trials, self._limit = trials, limit_gb * 1e9
        self._sizes: dict[int, int] = {}

    def exceed(self, paused: Collection[int]) -> bool:
        """Whether those of these trials take more than they may. Each is looked at once a pause."""
        self._sizes = {number: self._sizes.get(number) or self._size(number) for number in paused}
        return sum(self._sizes.values()) > self._limit

    def forget(self, number: int) -> None:
        """The trial has run since: its size is looked at again."""
        self._sizes.pop(number, None)

    def delete(self, number: int) -> None:
        """Take those of a trial away; all else of its run stays."""
        shutil.rmtree(self._trials / str(number) / CHECKPOINTS, ignore_errors=True)
        self.forget(number)

    def _size(self, number: int) -> int:
        files = (self._trials / str(number) / CHECKPOINTS).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())
