"""Two runs by their chains of digests."""

from dataclasses import dataclass
from typing import Any

from roxxel_dist.audit.record import RunRecord
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.metadata import RunMetadata
from roxxel_dist.settings.config import RECORD
from roxxel_dist.train.log.csv_jsonl import DIGEST

LOSSES = ("train_loss", "val_loss")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Where two runs differ."""

    equal_to: int
    """The last step up to which both have read the same rows and had the same losses; 0 if there is none."""
    differs_at: int | None
    """The first step that both have logged with different rows; None if there is none."""
    row: tuple[str, ...]
    """The names that differ in its row."""
    config: tuple[str, ...]
    """Fields of the configs, and settings that change bits, that differ: "lr: 0.001, 0.01"."""


def compare(one: RunRecord, other: RunRecord) -> Comparison:
    """Compare two runs, up to the last step of both. Raises ValueError if no step has a digest in both."""
    both = [step for step in one.rows if step in other.rows]
    known = [step for step in both if DIGEST in one.rows[step] and DIGEST in other.rows[step]]
    for run in (one, other):
        if RunMetadata.of_saved(run.saved).merged_from:
            raise UserError(
                f"{one.name} and {other.name} cannot be compared: {run.name} is merged from checkpoints, and no step "
                f"made it; compare losses with `roxxel-dist eval`"
            )
    if not known:
        raise UserError(f"{one.name} and {other.name} cannot be compared: no step with a digest is in the logs of both")
    equal, at, row = 0, None, ()
    for step in known:
        here, there = one.rows[step], other.rows[step]
        # Not the losses of a validation that only one of them has.
        names = [name for name in (*LOSSES, DIGEST) if name in here and name in there and here[name] != there[name]]
        if names:
            at, row = step, tuple(f"{name}: {here[name]}, {there[name]}" for name in names)
            break
        equal = step
    return Comparison(equal_to=equal, differs_at=at, row=row, config=tuple(_differences(one, other)))


def _differences(one: RunRecord, other: RunRecord) -> list[str]:
    mine, theirs = (_settings(run) for run in (one, other))
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [f"{name}: {mine.get(name)}, {theirs.get(name)}" for name in names if mine.get(name) != theirs.get(name)]


def _settings(run: RunRecord) -> dict[str, Any]:
    record = RunMetadata.of_saved(run.saved)
    config = {name: value for name, value in run.saved.items() if name != RECORD}
    return {**config, "corpus": record.corpus, **(run.segments()[-1].bits)}
