"""The public Trainer: a run of parts that a program makes itself, or of a `Config`, which is `Experiment`'s."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.checkpoint.metadata import RESUME_LATEST, ResumeSpec
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.cluster.determinism import pin_for_shards
from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.place.bucket_run import BucketRun
from roxxel_dist.run.components import run_on_primary
from roxxel_dist.run.experiment import Experiment
from roxxel_dist.run.record import record_parts
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.training import LoopKeywords, LoopOptions
from roxxel_dist.train.checkpointer import Checkpointer
from roxxel_dist.train.log.base import LogQueue, Tracker, TrackerSource
from roxxel_dist.train.loop import Loop
from roxxel_dist.train.parts import Parts, loop_options, unchecked_code_note
from roxxel_dist.train.resume import ResumePoint, check_same_bits
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.step.step import LossFn

__all__ = ["Curriculum", "Phase", "Trainer"]

P = ParamSpec("P")
Result = TypeVar("Result")
PART_NAMES = {field.name for field in fields(Parts)} - {"folder", "grad_accum", "options", "tasks"}


def _as(
    method: Callable[Concatenate[Experiment, P], Result],
) -> "Callable[[Callable[[Trainer], Experiment]], Callable[Concatenate[Trainer, P], Result]]":
    """Makes the method of a trainer that calls this one of an `Experiment`, with its signature and docstring."""

    def decorate(experiment_of: "Callable[[Trainer], Experiment]") -> "Callable[Concatenate[Trainer, P], Result]":
        @functools.wraps(method)
        def call(trainer: "Trainer", *args: P.args, **kwargs: P.kwargs) -> Result:
            return method(experiment_of(trainer), *args, **kwargs)

        return call

    return decorate


PARTS = ("model", "optimizer", "curriculum", "loss_fn", "save_path")


def _check_parts(given: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises TypeError where a trainer is made neither of a `Config` nor of its five parts."""
    order = f"Trainer({', '.join(PARTS)})"
    if len(given) > len(PARTS):
        raise TypeError(f"Trainer: {len(given)} values are given by place, and {order} has {len(PARTS)}: name others")
    named = dict(zip(PARTS, given, strict=False))
    if twice := named.keys() & options.keys():
        raise TypeError(f"Trainer: {min(twice)} is given by place and by name: give it once")
    first = given[0] if given else options.get("config", options.get("model"))
    missing = [name for name in PARTS if name not in named and name not in options]
    if missing and isinstance(first, str | os.PathLike):
        raise TypeError(
            f"Trainer: {os.fspath(first)!r} is a path, and a trainer is made of a Config: "
            f"Trainer(Config.from_yaml({os.fspath(first)!r})), or of parts: {order}"
        )
    if missing and isinstance(first, Mapping):
        raise TypeError(
            f"Trainer: a dictionary is given, and a trainer is made of a Config: Trainer(Config.from_dict(fields)), or "
            f"of parts: {order}"
        )
    if missing and isinstance(first, Config):
        raise TypeError(
            "Trainer: with a Config it takes nothing else: put other fields into the Config, and give data_path, "
            "run_dir and resume to fit"
        )
    if missing:
        raise TypeError(f"Trainer: {', '.join(missing)} is not given: a trainer is Trainer(config), or {order}")
    loss = named.get("loss_fn", options.get("loss_fn"))
    if not callable(loss):
        raise TypeError(
            f"Trainer: loss_fn is {loss!r}: it must be a function of (model, batch), such as roxxel_dist.token_losses"
        )
    path = named.get("save_path", options.get("save_path"))
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"Trainer: save_path is {path!r}: it must be the folder of the run")


class Trainer:
    """Trains an NNX module through a curriculum on a mesh; continues where `save_path` left off.

    Its constructor only checks the parts. `run` takes the folder, compiles, restores, trains, and closes; from then on
    the attributes below tell what it did. The run directory of a `Transformer` gets a `config.yaml`, so `eval`,
    `generate`, `export` and `report` read it.

    With a `Config` as its only argument, `fit` and `find_lr` are those of its `Experiment`:
    `Trainer(config).fit("corpus.txt")`.

    Args:
        model: an `nnx.Module`, the same on every process, trained when `run` returns; or a function that builds one,
            straight into its shards.
        optimizer: an optax transformation, which may ask for the loss as `value`; an `nnx.Optimizer`, whose moments are
            not taken, they start new; or one of `train.step.optimizer`.
        curriculum: phases over a `Roxxel`.
        loss_fn: (model, int32[B, L]) to a scalar, (scalar, aux) or a dict with "loss"; every scalar in it is logged,
            "balance_loss" minimised too. "row_loss", float32[B], gives each data set's loss where a blend is by row.
        save_path: the run directory.
        eval_fn: called with `state` on every rank after each validation; rank 0 prints its text, or logs its numbers.
        validation: data sets by name to validate on, instead of what `val_fraction` holds out.
        mesh: devices of all processes, from `make_mesh` or with axes of your own; by default all of them along "data".
        data_sharding: of a (rows, tokens) batch; by default rows over "data" and "fsdp", or the mesh's first axis.
        grad_accum_steps: micro-batches a step; divides every batch that has more rows, of a smaller one each is a row.
        amend: the curriculum, and what decides bits with virtual_shards, may be others than the run's, from here on.
        origin: another run's checkpoint to begin with.
        trackers: where rows go besides the console, `training_log.csv` and `metrics.jsonl`.
        logger: speaks and writes its own files too, instead of the console; close it after the trainer.
        checkpointer: whose folder and `max_to_keep` the run's checkpoints have, instead of `save_path`/checkpoints;
            commands such as `generate` look there.
        bucket: the run is kept there too, and its checkpoints count there alone; `save_path` is its local folder.
        options: the fields of `settings.training.LoopOptions`, such as `log_every`.

    Raises:
        TypeError: an option that there is not, or parts in another order.
        ValueError: a batch that does not divide, or too little data for a phase.
    """

    @overload
    def __init__(self, config: Config, /) -> None: ...
    @overload
    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: Any,
        curriculum: Curriculum,
        loss_fn: LossFn,
        save_path: str | Path,
        *,
        eval_fn: Callable[[TrainView], Any] | None = None,
        validation: Mapping[str, Roxxel] | None = None,
        mesh: Mesh | None = None,
        data_sharding: NamedSharding | None = None,
        grad_accum_steps: int = 1,
        amend: bool = False,
        origin: ResumeSpec = RESUME_LATEST,
        trackers: Sequence[Tracker] = (),
        logger: TrackerSource | None = None,
        checkpointer: Checkpointer | None = None,
        bucket: BucketRun | None = None,
        **options: Unpack[LoopKeywords],
    ) -> None: ...
    def __init__(self, *parts: Any, **options: Any) -> None:
        given = [*parts, *options.values()]
        lone = given[0] if len(given) == 1 and set(options) <= {"config"} else None
        self._experiment = Experiment(lone) if isinstance(lone, Config) else None
        if self._experiment is None:
            _check_parts(parts, options)
        self._parts = None if self._experiment is not None else self._made_of(*parts, **options)
        self._loop: Loop | None = None
        self._is_open = False

    @staticmethod
    def _made_of(
        model: Any,
        optimizer: Any,
        curriculum: Curriculum,
        loss_fn: LossFn,
        save_path: str | Path,
        *,
        mesh: Mesh | None = None,
        grad_accum_steps: int = 1,
        **others: Any,
    ) -> Parts:
        """The parts, with those that are left out."""
        options = loop_options({name: value for name, value in others.items() if name not in PART_NAMES})
        if mesh is None:
            pin_for_shards(options.virtual_shards)  # before jax makes its first device
            mesh = make_mesh()
        parts = {name: value for name, value in others.items() if name in PART_NAMES}
        given: dict[str, Any] = {"mesh": mesh, "grad_accum": grad_accum_steps, "options": options, **parts}
        return Parts(model, optimizer, curriculum, loss_fn, Path(save_path), **given)

    @property
    def experiment(self) -> Experiment:
        """The experiment that trains, of a trainer that was made of a `Config`."""
        if self._experiment is None:
            raise AttributeError("Trainer: fit and find_lr are of Trainer(config); one that is made of parts has run()")
        return self._experiment

    @property
    def config(self) -> Config:
        """The `Config` that the trainer was made of, as it will be used: with absolute paths."""
        return self.experiment.config

    @property
    def has_parts(self) -> bool:
        """Whether the trainer was made of parts, and not of a `Config`."""
        return self._parts is not None

    @property
    def parts(self) -> Parts:
        """The parts that the trainer was made of."""
        if self._parts is None:
            raise AttributeError('Trainer: run is for one made of parts; Trainer(config) has fit("corpus.txt")')
        return self._parts

    @_as(Experiment.fit)
    def fit(self) -> Experiment:
        """Train, as `Experiment.fit` does."""
        return self.experiment

    @_as(Experiment.find_lr)
    def find_lr(self) -> Experiment:
        """Find a learning rate, as `Experiment.find_lr` does."""
        return self.experiment

    def run(self, at_the_end: Callable[[], None] | None = None) -> TrainView:
        """Train to the last step, or until asked to stop (then `stopped` is true), and return the state reached.

        The module, and the `nnx.Optimizer`, that the trainer was given have the arrays of that state then. All ranks
        call it together. Another call continues from the newest checkpoint.

        Args:
            at_the_end: called on every rank when the run is finished and marked so, the log still open; for a run that
                was finished before too. What it raises is logged, and harms nothing.

        Raises:
            ValueError: the run directory is of another run, or another process trains in it; or the data does not fit.
            BadStep: a loss is no number, and `on_bad_step` does not help.
            SaveError: the last save failed.
            DamagedData: what a step reads does not agree with its checksums.
        """
        self.open()
        try:
            record_parts(self.parts, self.state)
            if not self.start_step and not self.finished:
                line = unchecked_code_note(self.parts, self.mesh.size, "`roxxel_dist.check_layouts(trainer)`")
                if line and is_primary():
                    self.loop.held.log.text(line)
            return self.loop.run(at_the_end)
        finally:
            self.close()

    def open(self) -> None:
        """Do what `run` does before its first step, so that `state`, `plan`, `start` and `finished` can be read.

        It writes nothing. The run directory is locked until `run` ends, or `close`. All ranks call it together. A
        second call has no effect. Raises ValueError as `run`.
        """
        if not self._is_open:
            self._loop = Loop.open(self.parts, self._check_bits)
            self._is_open = True

    def _check_bits(self, start: ResumePoint) -> None:
        """Raises UserError where the next steps of a run with virtual shards would have other bits here."""
        parts, now = self.parts, start.metadata.bits
        if start.bits and now and not (parts.amend or start.is_finished(parts.options)):
            run_on_primary("same bits", lambda: check_same_bits(start.bits, now, parts.options.virtual_shards))

    def try_loss(self) -> None:
        """Trace the loss once, without computing it, and stay open. What the model or the loss raises passes."""
        self.open()
        self.loop.try_loss()

    def close(self) -> None:
        """Release what `open` took. `run` does so itself: after it, a call has no effect.

        After a failure it waits for a save under way for 5 s at most: the other ranks learn of the failure afterwards.
        """
        if self._is_open:
            self._is_open = False
            self.loop.close()

    @property
    def options(self) -> LoopOptions:
        """The options of the loop, with the defaults of those that were left out."""
        return self.parts.options

    @property
    def mesh(self) -> Mesh:
        """The devices of all processes."""
        return self.parts.mesh

    @property
    def stopped(self) -> bool:
        """Whether the last `run`, or `fit`, was asked to stop before its end; what it had is saved."""
        if self._experiment is not None:
            return self._experiment.stopped
        return self._loop is not None and self._loop.saves.stopped

    @property
    def loop(self) -> Loop:
        """The run itself. Before `run` or `open` it raises AttributeError, and so do `state` and the others below."""
        if self._loop is None:
            raise AttributeError("Trainer: the state, the plan and the checkpoints of a run are there from run() on")
        return self._loop

    @property
    def state(self) -> TrainView:
        """The model, the optimizer's state and the step, as they are now."""
        return self.loop.state

    @property
    def step(self) -> int:
        """Steps done."""
        return self.loop.position.step

    @property
    def start_step(self) -> int:
        """Steps done before this process took the run up."""
        return self.loop.position.start.step

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        return self.loop.position.last_step

    @property
    def finished(self) -> bool:
        """Whether no step is left to do."""
        return self.loop.position.finished

    @property
    def plan(self) -> Plan:
        """The plan: which rows each step reads."""
        return self.loop.position.plan

    @property
    def start(self) -> ResumePoint:
        """The point where the run was taken up, and what `run` logs of it."""
        return self.loop.position.start

    @property
    def fetches(self) -> int:
        """The number of fetches of numbers from the devices."""
        return self.loop.deferred.fetches

    @property
    def store(self) -> CheckpointStore:
        """The checkpoints."""
        return self.loop.held.store

    @property
    def checkpointer(self) -> Checkpointer | CheckpointStore:
        """The one that was given; else the run's `CheckpointStore`."""
        return self.parts.checkpointer or self.store

    @property
    def logger(self) -> LogQueue:
        """The log of the run; `logger.text` adds a line."""
        return self.loop.held.log
