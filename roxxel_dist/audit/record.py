"""What a run has written down of itself: its rows with their digests, its checkpoints, and with what it did its steps.

It is only read, and imports of jax come later: how many devices there are is decided by what is read here.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roxxel_dist.cluster.determinism import without_topology
from roxxel_dist.config import RECORD
from roxxel_dist.data.discovery import absolute
from roxxel_dist.objects.url import is_url
from roxxel_dist.run_directory import METRICS, no_run
from roxxel_dist.run_metadata import RunMetadata, saved_config
from roxxel_dist.train.bucket_folder import CHECKPOINTS, local_run
from roxxel_dist.train.bucket_run import BucketRun
from roxxel_dist.train.checkpoint.digests import DigestTable, read_verified
from roxxel_dist.train.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.train.checkpoint.verify import steps_of
from roxxel_dist.train.loggers.csv_jsonl import DIGEST, JsonlReader

FREE_FIELDS = {
    "log_every", "eval_every", "checkpoint_every", "memory_checkpoint_every", "memory_replicas", "max_to_keep",
    "keep_every", "keep_steps", "export_weights", "max_steps", "patience", "verify_data", "max_rewinds",
    "profile_steps", "wandb", "wandb_project", "tensorboard", "sample_prompt", "sample", "cache_dir",
    "cache_gb", "store_timeout",
}  # fmt: skip
"""Fields of a config that change no number of a step."""
EXACT_FREE_FIELDS = {"n_devices"}
"""Those that change none with virtual shards."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps that were done with one config on one set of devices: from a start or resume of the run to the next."""

    start: int
    """Steps done before."""
    config: Mapping[str, Any]
    bits: Mapping[str, Any]
    """`determinism.numerics_fingerprint`, and the kernel of attention."""

    @property
    def numbers(self) -> dict[str, Any]:
        """All that decides the numbers of its steps, as far as the run knows."""
        free = FREE_FIELDS | EXACT_FREE_FIELDS if self.is_exact else FREE_FIELDS
        numbers = {name: value for name, value in self.config.items() if name not in free}
        return numbers | {"bits": without_topology(self.bits) if self.is_exact else self.bits}

    @property
    def is_exact(self) -> bool:
        """Whether any number of devices in any number of processes gives the same bits."""
        return bool(self.config.get("virtual_shards"))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its directory has it."""

    name: str
    folder: Path
    saved: Mapping[str, Any]
    """Its config, with the section `record`."""
    rows: Mapping[int, Mapping[str, Any]]
    """Those of `metrics.jsonl` by step; None for what was not finite."""
    steps: tuple[int, ...]
    """Of its complete checkpoints."""

    @classmethod
    def read(cls, run: str | Path) -> "RunRecord":
        """Raises ValueError where there is no run, or its log cannot be read."""
        folder = local_run(run)
        saved = saved_config(folder)
        if not saved:
            raise ValueError(no_run(folder, absolute(run)))
        log = JsonlReader(folder / METRICS)
        with contextlib.closing(log):
            rows = {int(row["step"]): row for row in log.objects() if row.get("step") is not None}
        steps = BucketRun(run, read_only=True).checkpoints.saved(read_only=True) if is_url(run) else None
        here = steps_of(folder / CHECKPOINTS) if steps is None else sorted(steps)
        return cls(name=str(run), folder=folder, saved=saved, rows=dict(sorted(rows.items())), steps=tuple(here))

    @property
    def begins_after(self) -> int:
        """The steps that were done before the run's own first one: those of the run that it was forked from."""
        return (RunMetadata.of(self.saved).forked_from or {}).get("step", 0)

    def segments(self) -> list[Segment]:
        """In the order of their steps, each up to the start of the next; of a run that went back, what counts now."""
        record = RunMetadata.of(self.saved)
        configs = [{name: value for name, value in self.saved.items() if name != RECORD}]
        for resume in reversed(record.resumes):
            configs.insert(0, configs[0] | resume.get("changed_from", {}))
        begun = [(self.begins_after, record.bits), *((each["step"], each.get("bits", {})) for each in record.resumes)]
        segments: list[Segment] = []
        for (start, bits), config in zip(begun, configs, strict=True):
            segments = [segment for segment in segments if segment.start < start]
            same = segments and segments[-1].numbers == Segment(start=start, config=config, bits=bits).numbers
            segments += [] if same else [Segment(start=start, config=config, bits=bits)]
        return segments

    def has_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint that it had is still there; a run that trains deletes its older ones."""
        return is_url(self.name) or (self.folder / CHECKPOINTS / str(step)).is_dir()

    def checkpoint(self, step: int) -> tuple[CheckpointMetadata, DigestTable | None]:
        """What a checkpoint in the folder says. Raises ValueError where that is damaged, or was deleted meanwhile."""
        if not self.has_checkpoint(step):
            raise ValueError(
                f"{self.name} has deleted its checkpoint of step {step} meanwhile, as it still trains: audit it after "
                f"its end, or audit other steps"
            )
        saved, table = read_verified(self.folder / CHECKPOINTS / str(step), step)
        return CheckpointMetadata.from_dict(saved.meta), table

    @contextlib.contextmanager
    def fetched(self, *steps: int) -> Iterator[None]:
        """Within it these checkpoints are in the folder, of a run in a bucket too. Raises ValueError for a bad one."""
        if is_url(self.name):
            kept = BucketRun(self.name, read_only=True).checkpoints
            kept.saved(read_only=True)
            for step in steps:
                if problems := kept.fetch_all(step):
                    raise ValueError(f"the checkpoint of step {step} of {self.name} is damaged: {'; '.join(problems)}")
        yield

    def has_digests(self, first: int, last: int) -> bool:
        """Whether all rows of these steps have a digest, and so belong to one chain."""
        return all(DIGEST in row for step, row in self.rows.items() if first <= step <= last)
