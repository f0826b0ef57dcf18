"""What a run is made of. Each part can be made alone, and is checked before anything is opened."""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.checkpoint.metadata import RESUME_LATEST, ResumeSpec
from roxxel_dist.cluster.mesh import batch_sharding
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tasks import Task
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.checkpointer import Checkpointer
from roxxel_dist.train.exact.layout import can_cut_rows, check_shapes, rows_sharding
from roxxel_dist.train.log.base import Tracker, TrackerSource
from roxxel_dist.train.step.optimizer import Optimizer, as_optimizer
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import LossFn
from roxxel_dist.train.validation.evaluator import HELD_OUT


@dataclass(frozen=True, eq=False, repr=False)
class Parts:
    """The parts of a run, as `Trainer` explains them. To make them opens no file and asks no other rank.

    Raises:
        TypeError: `curriculum` is no `Curriculum`.
        ValueError: `optimizer` is none; a batch does not divide; or what is left to train on is too little for a phase.
    """

    model: nnx.Module | Callable[[], nnx.Module]
    optimizer: Any
    curriculum: Curriculum
    """All of it; `training` is without what is held out."""
    loss_fn: LossFn
    folder: Path
    """The run directory."""
    _: KW_ONLY
    mesh: Mesh
    data_sharding: NamedSharding | None = None
    eval_fn: Callable[[TrainView], Any] | None = None
    validation: Mapping[str, Roxxel] | None = None
    tasks: Sequence[Task] = ()
    grad_accum: int = 1
    amend: bool = False
    origin: ResumeSpec = RESUME_LATEST
    trackers: Sequence[Tracker] = ()
    logger: TrackerSource | None = None
    checkpointer: Checkpointer | None = None
    bucket: BucketRun | None = None
    options: LoopOptions = field(default_factory=LoopOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.curriculum, Curriculum):
            raise TypeError(
                f"Trainer: curriculum is a {type(self.curriculum).__name__}, and must be a Curriculum. The order is "
                f"Trainer(model, optimizer, curriculum, loss_fn, save_path)"
            )
        if self.checkpointer is not None and (self.options.keep_every or self.options.keep_steps):
            raise UserError(
                "keep_every and keep_steps apply to the run's own checkpoints: leave them out, or the checkpointer"
            )
        check_shapes(
            self.training.shapes,
            self.grad_accum,
            self.options.virtual_shards,
            self.mesh,
            cuts_rows=can_cut_rows(self.model, self.loss_fn),
        )
        _ = self.update_rule

    @functools.cached_property
    def update_rule(self) -> Optimizer:
        """The optimizer as a step uses it."""
        return as_optimizer(self.optimizer)

    @functools.cached_property
    def _divided(self) -> tuple[Curriculum, Roxxel]:
        return self.curriculum.hold_out(0 if self.validation else self.options.val_fraction)

    @property
    def training(self) -> Curriculum:
        """The curriculum without what is held out for validation."""
        return self._divided[0]

    @property
    def validation_sets(self) -> Mapping[str, Roxxel]:
        """Data to validate on, by name: as given, or what is held out."""
        return self.validation or {HELD_OUT: self._divided[1]}

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """How a batch of (rows, tokens) lies on the mesh."""
        return rows_sharding(self.data_sharding or batch_sharding(self.mesh), self.options.virtual_shards)

    @property
    def nnx_optimizer(self) -> "nnx.Optimizer[Any] | None":
        """The optimizer, if it is one of Flax: it has the moments of the trained state after a run."""
        return self.optimizer if isinstance(self.optimizer, nnx.Optimizer) else None


def loop_options(options: Mapping[str, Any]) -> LoopOptions:
    """The options of a trainer. Raises TypeError for a keyword that is none, and names the nearest one that is."""
    names = [field.name for field in fields(LoopOptions)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(names)}"
            raise TypeError(f"Trainer: there is no option {name!r}: {hint}")
    return LoopOptions(**options)
