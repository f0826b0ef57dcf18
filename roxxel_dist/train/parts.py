"""What a run is made of. Each part can be made alone, and is checked before anything is opened.

A mark in the user's cache says that code of the user's own, of a model, a loss or an optimizer, has been checked by
`check-layouts`. Its name is a digest of the files that have the code, and of `model_args`: a change of either asks for
another check. A file that these import is not looked at.
"""

import difflib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.model.user_code import import_function, is_function
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.process.durable import cache_folder, make_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
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
        cuts_rows, shards = can_cut_rows(self.model, self.loss_fn), self.options.virtual_shards
        check_shapes(self.training.shapes, self.grad_accum, shards, self.mesh, cuts_rows=cuts_rows)
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


FOLDER = "layouts"


def own_code(source: Config | Parts) -> list[Any]:
    """The user's own functions and classes of a run: model, loss and optimizer."""
    if isinstance(source, Config):
        names = ("model", source.model), ("loss", source.loss), ("optimizer", source.optimizer)
        return [import_function(field, name) for field, name in names if name and is_function(name)]
    model, loss = source.model, source.loss_fn
    own = [] if isinstance(model, Transformer | TransformerBuilder) else [model]
    return own if loss in (token_losses, next_token_loss) else [*own, loss]


def mark_checked(code: Iterable[Any], model_args: Any = None) -> None:
    """Remember that a check has found that; a cache that cannot be written is no error."""
    mark = _mark(code, model_args)
    try:
        make_folder(mark.parent)
        write_file(mark, b"")
    except OSError:
        return


def _mark(code: Iterable[Any], model_args: Any) -> Path:
    digest = hashlib.sha256(json.dumps(model_args or {}, sort_keys=True, default=str).encode())
    for each in code:
        made = each
        while isinstance(made, functools.partial):  # else all that are made so have the one mark of functools
            digest.update(repr((made.args, made.keywords)).encode())
            made = made.func
        named = made if hasattr(made, "__qualname__") else type(made)
        digest.update(f"{named.__module__}:{named.__qualname__}".encode())
        file = getattr(sys.modules.get(named.__module__), "__file__", None)
        digest.update(Path(file).read_bytes() if file and Path(file).exists() else b"")
    return cache_folder() / FOLDER / digest.hexdigest()[:32]


def unchecked_code_note(source: Config | Parts, devices: int, command: str) -> str:
    """What a run says whose code was never checked; empty for the built-in model, one device, and checked code."""
    code = own_code(source) if devices > 1 else []
    if not code or _mark(code, source.model_args if isinstance(source, Config) else None).exists():
        return ""
    return (
        f"never checked: whether a step of this model on {devices} devices is the step of one device; {command} says so"
    )
