"""The programs of a run: a step and an evaluation for each shape of batch, compiled ahead of their phase."""

from collections.abc import Hashable
from typing import Any

from roxxel_dist.data.verify import VerifiedBlocks
from roxxel_dist.devices.accelerators import peak_flops
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.position import Position
from roxxel_dist.train.step.compile import AotCompiler, batch_key, mesh_of
from roxxel_dist.train.step.optimizer import check_update
from roxxel_dist.train.step.step import Metrics
from roxxel_dist.train.steps import Steps
from roxxel_dist.train.validation.evaluator import Validation, ValidationRows
from roxxel_dist.train.validation.task_scores import TaskScores

MOST_WORK = 1.2
"""Times the work of one device that all may do together; padding of odd lengths is within it."""


class Programs:
    """The programs of a run, by phase, compiled in the compiler's thread; the plan of `position` says which shapes
    come.

    `blocks` are the verified blocks of the data's files, None where nothing is verified; `tasks` are measured with each
    `validation`.
    """

    def __init__(self, parts: Parts, position: Position, compiler: AotCompiler) -> None:
        self._parts, self._position, self._compiler = parts, position, compiler
        self._steps: Steps = position.steps
        options, state = parts.options, self._steps.state
        if not position.finished:
            check_update(parts.update_rule, state.params, state.opt_state)
        model = position.view.model
        self._vocabulary: int | None = getattr(getattr(model, "config", None), "vocab_size", None)
        self.blocks: VerifiedBlocks | None = VerifiedBlocks(self._vocabulary) if options.verify_data == "on" else None
        # Empty where there is nothing to validate on.
        saved = position.metadata.validation or {"batches": (), "eval_iters": options.eval_iters}
        rows = ValidationRows.from_dict(saved).with_phases(position.plan.shapes)
        sets = parts.validation_sets, parts.training.primary_streamer
        self.validation: Validation = Validation.of_steps(*sets, self._steps, model, compiler, rows, self.blocks)
        batches = parts.sharding, position.plan.shapes, self._steps.options.compute_dtype
        self.tasks: TaskScores = TaskScores(parts.tasks, self._steps.split, compiler, *batches)

    def check_data(self) -> None:
        """Raises ValueError where a validation set is too small for a phase, a token has no logit, or the model cannot
        do a task."""
        parts, position = self._parts, self._position
        self.tasks.check(self._steps.state, position.hparams)
        self.validation.check(*position.plan.shapes)
        datasets = {**parts.training.datasets, **parts.validation_sets}
        # What the built-in model gives is known without a trace of it.
        known = self._vocabulary if type(parts.model) is TransformerBuilder else None
        if known is None or known < max(data.vocab_size or 0 for data in datasets.values()):
            self._steps.check_vocabulary(position.plan.shapes[0], datasets)
        if not isinstance(position.view.model, Transformer):
            self._steps.check_model_state(self.stream_from(position.step).abstract())

    def stream_from(self, step: int) -> Stream:
        """The batches of the plan, from a step on."""
        parts = self._parts
        return Stream(self._position.plan, parts.training.datasets, parts.sharding, step, parts.grad_accum)

    def compile_phase(self, step: int) -> Hashable:
        """Begin to compile what the phase of `step` needs, and return the key of its training step."""
        position, batch = self._position, self.stream_from(step).abstract()
        key = batch_key(batch)
        self._compiler.prepare(key, self._steps.train, self._steps.state, position.hparams, batch)
        if all(peak_flops(device.device_kind) for device in self._parts.mesh.devices.flat):
            self._compiler.count_flops(key, self._steps.program_flops)
        self.prepare_validation(step)
        return key

    def prepare_validation(self, step: int) -> list[Hashable]:
        """Begin to compile what a validation in the phase of `step` needs, and return the keys of these programs."""
        position = self._position
        keys = self.validation.prepare(self._steps.state, position.hparams, position.plan.segment(step).shape)
        return keys + self.tasks.prepare(self._steps.state, position.hparams)

    def compile_next_phase(self, phase: int, first: Metrics) -> None:
        """Begin to compile what the phase after this one needs, when the first step of this one is done."""
        end = sum(shape.steps for shape in self._position.plan.shapes[: phase + 1])
        if end < self._position.last_step:
            self._compiler.rest_until(first.scalars["loss"])
            self.compile_phase(end)

    def repeated_work(self, step: int, program: Any) -> str:
        """The warning about a model of the user's own of which XLA could not cut much along the tokens, or nothing."""
        position = self._position
        if isinstance(position.view.model, Transformer):
            return ""
        batch = self.stream_from(step).abstract()
        mesh = mesh_of(batch, self._parts.mesh) or self._parts.mesh
        ratio = self._steps.work_ratio(program, batch)
        if ratio is None or ratio <= MOST_WORK:
            return ""
        return (
            f"warning: in phase {position.plan.phase(step) + 1} {mesh.size} devices do {ratio:.1f} times the work of "
            f"one: XLA cannot divide all that mixes the tokens of a row; roxxel_dist.attention is divided"
        )

    def try_loss(self) -> None:
        """Trace the loss once, without computing it. What the model or the loss function raises passes."""
        self._steps.try_loss(self.stream_from(self._position.step).abstract())
