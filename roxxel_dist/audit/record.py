"""The record of a run: its rows with digests, its checkpoints, and the config and devices of its steps; and two runs
compared by their chains of digests.

The run is only read. jax is imported later, because this record determines the number of devices.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.checkpoint.digests import DigestTable, read_verified
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CheckpointMetadata, steps_of
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.place.directory import METRICS, no_run
from roxxel_dist.place.run_place import bucket_run, local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.metadata import RunMetadata, saved_config
from roxxel_dist.settings.config import RECORD
from roxxel_dist.train.log.csv_jsonl import DIGEST, Tail

if TYPE_CHECKING:
    from roxxel_dist.checkpoint.remote import RemoteCheckpoints

FREE_FIELDS = {
    "log_every", "eval_every", "checkpoint_every", "memory_checkpoint_every", "memory_replicas", "max_to_keep",
    "keep_best", "keep_every", "keep_steps", "export_weights", "max_steps", "patience", "verify_data", "max_rewinds",
    "profile_steps", "wandb", "wandb_project", "name", "notes", "tags", "tensorboard", "sample_prompt", "sample",
    "eval_tasks",
    "cache_dir", "cache_gb", "store_timeout",
}  # fmt: skip
"""Fields of a config that do not change results."""
EXACT_FREE_FIELDS = {"n_devices", "fsdp", "fsdp_devices"}
"""Fields that do not change results with virtual shards."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps with one config on one set of devices: from a start or resume of the run to the next."""

    start: int
    """Steps done before."""
    config: Mapping[str, Any]
    bits: Mapping[str, Any]
    """`determinism.numerics_fingerprint`, and the kernel of attention."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The recorded settings that determine the results of its steps."""
        from roxxel_dist.cluster.determinism import without_topology

        free = FREE_FIELDS | EXACT_FREE_FIELDS if self.is_exact else FREE_FIELDS
        numbers = {name: value for name, value in self.config.items() if name not in free}
        return numbers | {"bits": without_topology(self.bits) if self.is_exact else self.bits}

    @property
    def is_exact(self) -> bool:
        """Whether any number of devices in any number of processes gives the same bits."""
        return bool(self.config.get("virtual_shards"))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run in its directory."""

    name: str
    folder: Path
    saved: Mapping[str, Any]
    """Its saved config, with the section `record`."""
    rows: Mapping[int, Mapping[str, Any]]
    """The rows of `metrics.jsonl` by step; None for values that were not finite."""
    steps: tuple[int, ...]
    """The steps of its complete checkpoints."""
    remote: "RemoteCheckpoints | None" = None
    """Those in the bucket of the run, which are fetched when they are read."""

    @classmethod
    def read(cls, run: str | Path) -> "RunRecord":
        """Read a run. Raises ValueError if there is no run, or its log cannot be read."""
        folder = local_run(run)
        saved = saved_config(folder)
        if not saved:
            raise UserError(no_run(folder, absolute(run)))
        rows = {int(row["step"]): row for row in Tail(folder / METRICS).rows() if row.get("step") is not None}
        bucket = bucket_run(run)
        kept = None if bucket is None else bucket.checkpoints
        steps = steps_of(folder / CHECKPOINTS) if kept is None else sorted(kept.list_saved(read_only=True))
        rows = dict(sorted(rows.items()))
        return cls(name=str(run), folder=folder, saved=saved, rows=rows, steps=tuple(steps), remote=kept)

    @property
    def begins_after(self) -> int:
        """The number of steps before the run's own first step, in the run that it was forked from."""
        return (RunMetadata.from_config(self.saved).forked_from or {}).get("step", 0)

    def segments(self) -> list[Segment]:
        """Segments in the order of steps, each up to the start of the next, without what the run went back over."""
        record = RunMetadata.from_config(self.saved)
        configs = [{name: value for name, value in self.saved.items() if name != RECORD}]
        for resume in reversed(record.resumes):
            configs.insert(0, configs[0] | resume.get("changed_from", {}))
        begun = [(self.begins_after, record.bits), *((r["step"], r.get("bits", {})) for r in record.resumes)]
        segments: list[Segment] = []
        for (start, bits), config in zip(begun, configs, strict=True):
            segments = [segment for segment in segments if segment.start < start]
            same = segments and segments[-1].numbers == Segment(start=start, config=config, bits=bits).numbers
            segments += [] if same else [Segment(start=start, config=config, bits=bits)]
        return segments

    def has_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint still exists; a training run deletes its older ones."""
        return self.remote is not None or (self.folder / CHECKPOINTS / str(step)).is_dir()

    def checkpoint(self, step: int) -> tuple[CheckpointMetadata, DigestTable]:
        """The metadata and digests of a local checkpoint. Raises ValueError if it is damaged, or was deleted
        meanwhile."""
        if not self.has_checkpoint(step):
            raise UserError(
                f"{self.name} has deleted its checkpoint of step {step} meanwhile, as it still trains: audit it after "
                f"its end, or audit other steps"
            )
        saved, table = read_verified(self.folder / CHECKPOINTS / str(step), step)
        return CheckpointMetadata.from_dict(saved.meta), table

    @contextlib.contextmanager
    def fetch_checkpoints(self, *steps: int) -> Iterator[None]:
        """Make these checkpoints local within it, also for a run in a bucket. Raises ValueError if one is damaged."""
        if self.remote is not None:
            self.remote.list_saved(read_only=True)
            for step in steps:
                if problems := self.remote.fetch_all(step):
                    raise UserError(f"the checkpoint of step {step} of {self.name} is damaged: {'; '.join(problems)}")
        yield


LOSSES = ("train_loss", "val_loss")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference of two runs."""

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
        if RunMetadata.from_config(run.saved).merged_from:
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
    record = RunMetadata.from_config(run.saved)
    config = {name: value for name, value in run.saved.items() if name != RECORD}
    return {**config, "corpus": record.corpus, **(run.segments()[-1].bits)}
