"""The plan: which tokens every step reads, as a closed form of (phases, corpus, seed, step).

A corpus is cut in units (see `data/units.py`). In pass p the units are visited in the order of a bijection keyed by
(seed, data set, p). Each *segment*, the steps of one phase within one pass, claims the next run of units in that
order, enough for its rows, and a second bijection orders all windows of the claim. So phases of any shape share no
token within a pass, every window is contiguous text, and a step is found by one bisection however far it is.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from roxxel_dist.curriculum.permutation import Permutation
from roxxel_dist.data.units import Ranges, Units, unit_size

# What a permutation orders: part of its key, so that two orders never share one.
_OF_UNITS, _OF_WINDOWS = 0, 1


@dataclass(frozen=True)
class Rows:
    """The rows of one step's global batch of B rows."""

    dataset: np.ndarray
    """int32[B]: index into `Plan.datasets`."""
    offset: np.ndarray
    """int64[B]: first token of the row's window, in tokens from the data set's start."""
    seq_len: int
    """Tokens of a window, the target included."""


@dataclass(frozen=True)
class Segment:
    """Steps that lie in one phase and one pass: [first_step, first_step + steps)."""

    first_step: int
    steps: int
    phase: int
    pass_index: int
    first_unit: int
    """The claim's first unit, counted in the order in which the pass visits them."""
    batch_size: int
    seq_len: int
    windows: int
    """Windows of the claim, of which steps x batch_size are read."""
    order: Permutation
    """Of the claim's windows."""
    visits: Permutation
    """Of all units in this pass."""


class Plan:
    """What each step trains on.

    Args:
        phases: (steps, batch_size, seq_len) of each.
        datasets: name to readable ranges; the first is named "self".
        seed: of all orders, 0 or more.
        unit: tokens a unit, as an earlier run chose it; by default chosen from the corpus.

    Raises:
        ValueError: a data set cannot fill one batch of a phase in a whole pass.
    """

    def __init__(
        self, phases: Sequence[tuple[int, int, int]], datasets: Mapping[str, Ranges], seed: int, unit: int | None = None
    ) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed is {seed!r}: it must be a whole number of at least 0")
        self.phases = tuple(phases)
        self.datasets = tuple(datasets)
        self.seed = seed
        ranges = datasets[self.datasets[0]]
        self.units = Units(ranges, unit or unit_size(ranges, max(seq_len for _, _, seq_len in phases)))
        self.segments = self._cut()
        self._firsts = [segment.first_step for segment in self.segments]
        self.total_steps = sum(steps for steps, _, _ in phases)

    def _cut(self) -> list[Segment]:
        segments: list[Segment] = []
        step, pass_index, used = 0, 0, 0
        for phase, (steps, batch, seq_len) in enumerate(self.phases):
            per_unit = self.units.size // seq_len
            if self.units.count * per_unit < batch:
                raise ValueError(
                    f"phase {phase + 1}: a batch of {batch} rows of {seq_len} tokens does not fit in the data, which "
                    f"holds {self.units.count * per_unit} such rows: use a smaller batch_size or seq_len, or more text"
                )
            end = step + steps
            while step < end:
                room = (self.units.count - used) * per_unit // batch
                if room == 0:
                    pass_index, used = pass_index + 1, 0
                    continue
                take = min(room, end - step)
                claim = -(-take * batch // per_unit)
                key = (self.seed, 0, pass_index)
                segments.append(
                    Segment(
                        step, take, phase, pass_index, used, batch, seq_len, claim * per_unit,
                        order=Permutation(claim * per_unit, (*key, _OF_WINDOWS, used)),
                        visits=Permutation(self.units.count, (*key, _OF_UNITS)),
                    )
                )  # fmt: skip
                step, used = step + take, used + claim
        return segments

    def segment(self, step: int) -> Segment:
        """The segment that holds `step` (from 0).

        Raises:
            IndexError: the plan has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step}: the plan has steps 0 to {self.total_steps - 1}")
        return self.segments[bisect.bisect_right(self._firsts, step) - 1]

    def rows(self, step: int) -> Rows:
        """The rows of step `step`, counted from 0: the same on every process, restart and machine."""
        s = self.segment(step)
        first = (step - s.first_step) * s.batch_size
        windows = s.order(np.arange(first, first + s.batch_size))
        unit, window = np.divmod(windows, self.units.size // s.seq_len)
        offset = self.units.start(s.visits(s.first_unit + unit)) + window * s.seq_len
        return Rows(np.zeros(s.batch_size, np.int32), offset, s.seq_len)

    def phase(self, step: int) -> int:
        """The index of the phase that holds `step`."""
        return self.segment(step).phase

    def shape(self, step: int) -> tuple[int, int]:
        """(batch_size, seq_len) of `step`."""
        s = self.segment(step)
        return s.batch_size, s.seq_len

    def tokens(self, step: int) -> int:
        """How many tokens the steps before `step` read."""
        total = 0
        for s in self.segments:
            total += max(0, min(step - s.first_step, s.steps)) * s.batch_size * s.seq_len
        return total

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to continue this plan: plain numbers, whatever the corpus holds."""
        return {"step": step, "seed": self.seed, "unit": self.units.size, "phases": [list(p) for p in self.phases]}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides what a step reads, except the tokens themselves."""
        ranges = [[int(start), int(length)] for start, length in self.units.ranges]
        described = json.dumps({**self.state(0), "ranges": ranges, "datasets": self.datasets})
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """A table for people: phases, their steps, shapes, tokens and passes over the data."""
        readable = self.units.count * self.units.size
        head = ("phase", "steps", "batch x seq_len", "tokens", "passes")
        table: list[tuple[str, ...]] = [head]
        for phase, (steps, batch, seq_len) in enumerate(self.phases):
            mine = [s for s in self.segments if s.phase == phase]
            table.append(
                (
                    str(phase + 1),
                    f"{mine[0].first_step + 1:,} to {mine[0].first_step + steps:,}",
                    f"{batch:,} x {seq_len:,}",
                    f"{steps * batch * seq_len:,}",
                    f"{steps * batch * seq_len / readable:.2f}",
                )
            )
        total = self.tokens(self.total_steps)
        table.append(("all", f"{self.total_steps:,}", "", f"{total:,}", f"{total / readable:.2f}"))
        widths = [max(len(row[i]) for row in table) for i in range(len(head))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table)
