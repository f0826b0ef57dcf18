"""The metadata of a checkpoint, and how people and runs name one. Standard library alone.

`training_cursor.json`: how far a run is, for people and for programs that read no checkpoint.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.objects.url import as_written
from roxxel_dist.process.durable import FORMAT, check_format, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

CHECKPOINTS, CURSOR = "checkpoints", "training_cursor.json"
"""The folder of checkpoints, and the file with the newest step, in a run directory."""
META, TABLE = "meta.json", "digests.json"
DAMAGED = ".damaged"
"""Behind the step of a checkpoint that was set aside; with a number where there is one already."""


class MetaFile(NamedTuple):
    """`meta.json`: all of a checkpoint that is no array."""

    shapes: Mapping[str, list[Any]]
    """Every array's shape, and its type behind that, by name."""
    meta: Mapping[str, Any]
    """What the program that saved it adds; `CheckpointMetadata` for a run."""
    val_loss: float | None

    @classmethod
    def read(cls, checkpoint: Path) -> "MetaFile":
        """Raises OSError, ValueError or KeyError where it is missing or damaged, FormatError for another format."""
        return cls.from_json((checkpoint / META).read_bytes(), checkpoint / META)

    @classmethod
    def from_json(cls, text: bytes, source: Path) -> "MetaFile":
        """Raises ValueError, KeyError or TypeError where it is damaged, FormatError for another format."""
        saved = json.loads(text)
        check_format(saved, source)
        return cls(saved["shapes"], saved["meta"], saved["val_loss"])

    def to_json(self) -> str:
        """The file as it is written."""
        return json.dumps({"format": FORMAT, "val_loss": self.val_loss, "shapes": self.shapes, "meta": self.meta})


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, complete or not, in order."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def saved_checkpoints(folder: Path) -> dict[int, float | None]:
    """The step and val_loss of every complete checkpoint in a folder."""
    return losses_of(folder, steps_of(folder))


def losses_of(folder: Path, steps: Iterable[int]) -> dict[int, float | None]:
    """The val_loss of these checkpoints, by step; None where it has none."""
    saved: dict[int, float | None] = dict.fromkeys(steps)
    for step in saved:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: `restore` reports it
            saved[step] = comparable_loss(MetaFile.read(folder / str(step)).val_loss)
    return saved


def comparable_loss(val_loss: float | None) -> float | None:
    """A val_loss; None for one that cannot be compared."""
    return None if val_loss is None or isnan(val_loss) else float(val_loss)


def best_of(saved: Mapping[int, float | None]) -> int | None:
    """The step with the lowest val_loss, the first of them; None where none has one."""
    losses = [(val_loss, step) for step, val_loss in saved.items() if val_loss is not None]
    return min(losses)[1] if losses else None


def steps_to_keep(
    saved: Mapping[int, float | None], max_to_keep: int | None, keep_every: int | None, keep_steps: Collection[int]
) -> set[int]:
    """The steps to keep: the newest, the best, every `keep_every`-th and `keep_steps`."""
    steps = sorted(saved)
    newest = steps if max_to_keep is None else steps[-max_to_keep:]
    forever = [step for step in steps if step in keep_steps or (keep_every and step % keep_every == 0)]
    return {*newest, *forever, best_of(saved)} & set(steps)


class CheckpointRef(NamedTuple):
    """A checkpoint of a run, as people write it: RUN@STEP, or RUN for its newest one."""

    run: Path
    step: int | None

    def __str__(self) -> str:
        return as_written(self.run) + ("" if self.step is None else f"@{self.step}")

    @classmethod
    def parse(cls, text: str | Path) -> "CheckpointRef":
        """The checkpoint that RUN@STEP or RUN names; an @ without a number after it belongs to the folder's name."""
        run, mark, step = str(text).rpartition("@")
        return cls(Path(run), int(step)) if mark and run and step.isdecimal() else cls(Path(text), None)


class CheckpointRange(NamedTuple):
    """Several checkpoints of a run, as people write them: RUN@A:B, all that are kept from A to B, or RUN@A,B,C."""

    run: Path
    text: str
    """A:B, or A,B,C."""

    def __str__(self) -> str:
        return f"{as_written(self.run)}@{self.text}"

    @classmethod
    def parse(cls, text: str | Path) -> "CheckpointRange | None":
        """The range that a text names; None of any other text, such as RUN@STEP."""
        run, mark, steps = str(text).rpartition("@")
        return cls(Path(run), steps) if mark and run and re.fullmatch(r"\d+(:\d+|(,\d+)+)", steps) else None

    def among(self, kept: Collection[int]) -> list[int]:
        """The steps that are meant, in order, of those that a run has kept.

        Raises ValueError where a step that is named is not kept, or none of a range is.
        """
        if ":" in self.text:
            first, last = map(int, self.text.split(":"))
            if first > last:
                raise UserError(f"RUN is {self}: the first step is above the last; write it as {last}:{first}")
            steps = [step for step in sorted(kept) if first <= step <= last]
            lacking = [] if steps else [f"from {first} to {last}"]
        else:
            steps = sorted(set(map(int, self.text.split(","))))
            lacking = [str(step) for step in steps if step not in kept]
        if lacking:
            known = ", ".join(map(str, sorted(kept))) or "none"
            raise UserError(
                f"RUN is {self}: {as_written(self.run)} has no checkpoint of step {', '.join(lacking)}; kept are "
                f"{known} (a run keeps more with keep_every, keep_steps or max_to_keep)"
            )
        return steps


@dataclass(frozen=True, kw_only=True)
class ResumeSpec:
    """The start of a run without checkpoints; one with checkpoints resumes from its newest."""

    fork: CheckpointRef | None = None
    """Begin with the whole state of this checkpoint: parameters, moments, random streams, position in the data."""
    skip_steps: tuple[int, int] | None = None
    """Of a fork: leave out what these steps, the first and the last, counted from 1, would have read."""

    def __post_init__(self) -> None:
        if self.fork is not None and self.fork.step is None:
            raise UserError(f"fork is {self.fork}: it must say at which step, as in {self.fork}@1000")
        if self.skip_steps is None:
            return
        if self.fork is None:
            raise UserError(
                f"skip_steps leaves rows out in a new run that begins at a checkpoint: add "
                f"{argument('fork', 'RUN@STEP')}"
            )
        first, last = self.skip_steps
        if not (self.fork.step or 0) < first <= last:
            raise UserError(
                f"skip_steps is {first}:{last}, and the fork begins where step {self.fork.step} was done: write the "
                f"first and the last step to leave out, both above {self.fork.step}"
            )


RESUME_LATEST = ResumeSpec()
"""A new run, or one that resumes from its newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """The lowest val_loss of a run on the rows that it is validated on, and how long ago that was."""

    best_loss: float | None = None
    evals_since_best: int = 0
    rows: str = ""
    """The rows on which it was measured, in words; empty if not known."""

    def observe(self, val_loss: float) -> "EarlyStopping":
        """The state with the loss of one more validation."""
        best = not isnan(val_loss) and (self.best_loss is None or val_loss < self.best_loss)
        after = self.patient(0 if best else self.evals_since_best + 1)
        return replace(after, best_loss=val_loss) if best else after

    def on_rows(self, rows: str) -> "EarlyStopping":
        """The same on these rows; a new beginning on other ones, whose losses are not compared."""
        return self if rows == self.rows else EarlyStopping(rows=rows)

    def patient(self, evals_since_best: int = 0) -> "EarlyStopping":
        """The same lowest loss, so many validations ago."""
        return replace(self, evals_since_best=evals_since_best)

    def should_stop(self, patience: int) -> bool:
        """Whether so many validations have passed without a lower loss; never for 0."""
        return 0 < patience <= self.evals_since_best


@dataclass(frozen=True)
class BaseModelRef:
    """The base model of adapters: the weights of another run, or of a folder of Hugging Face."""

    run: Path
    step: int
    """0 for a folder of Hugging Face, which has none."""
    init_from: str
    """The `init_from` that named it."""
    fingerprint: str = ""
    """See `weights.base.fingerprint`; empty where it was not taken yet."""

    @property
    def checkpoint(self) -> CheckpointRef:
        """The run and the step."""
        return CheckpointRef(self.run, self.step or None)

    def resolve(self, init_from: str | None) -> "BaseModelRef":
        """The base where it is now, if the config of the run of adapters says `init_from`. Another text than before
        names its new place, as the same one does where the base is no longer at its old one."""
        same = init_from is None or absolute(init_from) == absolute(self.init_from)
        if init_from is None or (same and self.run.exists()):
            return self
        moved = CheckpointRef.parse(init_from)
        step = self.step if moved.step is None else moved.step
        return replace(self, run=moved.run, step=step, init_from=init_from)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        run, asked = absolute(self.run), self.init_from
        return {"run": run, "step": self.step, "asked": asked, "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "BaseModelRef":
        """Read what `to_dict` gave."""
        return cls(Path(saved["run"]), saved["step"], saved["asked"], saved.get("fingerprint", ""))


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The contents of a checkpoint of a run beside its arrays."""

    corpus: str = ""
    """The fingerprints of the data sets, with + between."""
    curriculum: str = ""
    """The fingerprint of the curriculum, amendments aside."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """`Plan.state` after the checkpoint's step; empty if no `Trainer` saved the checkpoint."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """`LrSchedule` of the run; empty if the optimizer does not state it."""
    validation: Mapping[str, Any] = field(default_factory=dict)
    """`ValidationRows` of the run; empty without validation."""
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    rewinds: int = 0
    """How often the run went back to a checkpoint because of a bad step."""
    adapter_scales: Mapping[str, float] | None = None
    """The scale of each adapter, by its name; None if the checkpoint holds all weights."""
    base: BaseModelRef | None = None
    """The base model of the adapters, if it is in no checkpoint of the run."""
    digest: str = ""
    """Of the rows and losses of all steps up to the checkpoint's, see `digest_chain.py`."""
    virtual_shards: int | None = None
    """Those of the run; None without."""
    grad_accum: int | None = None
    """Of a run with virtual shards; None without."""
    bits: Mapping[str, Any] = field(default_factory=dict)
    """`determinism.numerics_fingerprint` of the process of a run with virtual shards; empty as `grad_accum` is None."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **vars(self),
            "early_stopping": vars(self.early_stopping),
            "adapter_scales": None if self.adapter_scales is None else dict(self.adapter_scales),
            "base": None if self.base is None else self.base.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CheckpointMetadata":
        """Read what `to_dict` gave; of a `Checkpointer`'s checkpoint, all is empty."""
        if "plan" not in saved:
            return cls()
        base = None if saved["base"] is None else BaseModelRef.from_dict(saved["base"])
        return cls(**{**saved, "early_stopping": EarlyStopping(**saved["early_stopping"]), "base": base})


def write_cursor(run: Path, step: int, last_step: int, *, finished: bool) -> None:
    """Say, in one move, which step is saved and whether it was the last one; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        cursor = {"step": step, "last_step": last_step, "finished": finished}
        write_file(run / CURSOR, json.dumps(cursor) + "\n")


def read_cursor(run: Path) -> dict[str, Any]:
    """The cursor that was written last; empty where there is nothing that can be read."""
    try:
        cursor = json.loads((run / CURSOR).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(cursor, dict) or not all(isinstance(cursor.get(name, 0), int) for name in ("step", "last_step")):
        return {}
    return cursor
