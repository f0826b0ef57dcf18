"""`check_layouts`: one step of a model and a loss in every layout, against one device."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from roxxel_dist.cluster.mesh import AXES, EXPERT
from roxxel_dist.layouts.compare import Difference, difference_in_noise, differences, differences_in_count
from roxxel_dist.layouts.layout import (
    OWN_MESH,
    BatchName,
    Layout,
    layout_of,
    layout_of_mesh,
    parse_names,
    pretend_process,
    reference_layout,
)
from roxxel_dist.layouts.noise import THREEFRY
from roxxel_dist.layouts.one_step import GRADIENT, LOSS, Outcome, StepProgram, Weights, initial_weights
from roxxel_dist.layouts.own_code import (
    InitialCheck,
    UpdateCheck,
    backward_order,
    coarsest,
    draw_lines,
    loss_jaxpr,
    text_of,
)
from roxxel_dist.layouts.reference import ReferencePrograms, Truth, first_line
from roxxel_dist.layouts.subject import Subject, check_devices, drop_balance, open_subject
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.trainer import Trainer
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.usage_errors import usage_errors
from roxxel_dist.train.parts import Parts, mark_checked, own_code
from roxxel_dist.train.step.optimizer import for_run
from roxxel_dist.train.step.step import BALANCE

AHEAD = 2
"""Layouts that are traced before the first one is computed, while the compiler works on what is traced."""
PROCESSES = "processes"
UNSEEN = (
    "not looked at: several processes at work, types narrower than float32, later steps, evaluation, and the noise of "
    "accum, packing and virtual, which draw anew for each part"
)
"""What no check looks at, in a line."""
Status = Literal["agrees", "differs", "left out", "failed"]


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """What became of one layout."""

    layout: str
    text: str
    """How it divides the step; or why it is left out, or failed."""
    status: Status
    differences: tuple[Difference, ...] = ()
    """Initial values, the loss and its scalars, gradients in the order of the backward pass, state, random streams,
    updates."""
    compared: int = 0
    """How many results were compared."""
    largest: float = 0.0
    """The largest distance of a result that agrees, in bounds."""

    @property
    def first_gradient(self) -> Difference | None:
        """The first parameter, in the order of the backward pass, whose gradient differs."""
        return next((each for each in self.differences if each.kind == "gradient"), None)


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """The verdict on all layouts."""

    results: tuple[LayoutResult, ...]
    parameters: int
    rows: int
    seq_len: int
    devices: int
    notes: tuple[str, ...]
    seconds: float

    @property
    def agree(self) -> bool:
        """Whether all layouts that could be computed agree with one device, and none failed."""
        return not any(result.status in ("differs", "failed") for result in self.results)


def check_layouts(
    target: Config | Trainer,
    data_path: str | Path | None = None,
    *,
    devices: int = 8,
    layouts: Sequence[str] | None = None,
    seq_len: int | None = None,
    done: Callable[[LayoutResult], None] = lambda result: None,
) -> LayoutReport:
    """Compare one training step in every layout with the same step on one device.

    The loss, each scalar of the loss function, each gradient and the state that is no parameter, from the same weights
    on the same rows, in float32. Nothing is trained, and nothing is written but that the model was checked.

    Args:
        target: a `Config`; or a `Trainer` of parts, which is checked on its own mesh and data.
        data_path: of a config: a text file, a folder of text, or shards.
        devices: of a config: CPU devices to simulate, before jax makes its first device; 0: those of this machine.
        layouts: names among "rows", "tokens", "fsdp", "tensor", "experts", "accum", "packing" and "virtual", "mesh" for
            the mesh of a `Trainer` with axes of its own; None: all.
        seq_len: tokens of a row, by default those of the longest phase, at most 65.
        done: called with each result.

    Returns:
        A report; `agree` says whether all layouts agree.

    Raises:
        UserError: a mistake in the config or the data, a model that does not fit one device, or a loss that is random
            by itself.
    """
    names = parse_names(layouts)
    with usage_errors():
        if isinstance(target, Trainer) and target.has_parts:
            report = _Check(Subject.of_parts(target.parts), seq_len, done).run(names)
            return _marked(report, target.parts)
        config = target.config if isinstance(target, Trainer) else target
        with open_subject(config, data_path, devices) as subject:
            return _marked(_Check(subject, seq_len, done).run(names), config)


def _marked(report: LayoutReport, source: Config | Parts) -> LayoutReport:
    """The report; `train` asks for a check no more if it is a good one."""
    compared = any(result.status == "agrees" for result in report.results)
    if report.agree and compared and (code := own_code(source)):
        mark_checked(code, source.model_args if isinstance(source, Config) else None)
    return report


@dataclass(frozen=True)
class _Begun:
    """A layout whose programs are being compiled."""

    layout: Layout
    truth: Truth
    program: StepProgram


class _Check:
    """The references and weights of one check."""

    def __init__(self, subject: Subject, seq_len: int | None, done: Callable[[LayoutResult], None]) -> None:
        self._subject, self._seq_len, self._done = subject, seq_len, done
        self._devices = check_devices(subject.mesh)
        self._has_balance = self._even = False
        self._truths: dict[tuple[BatchName, bool], Truth] = {}
        self._notes: list[str] = []
        self._of_processes: LayoutResult | None = None
        self._initials: InitialCheck | None = None
        self._updates: UpdateCheck | None = None

    def run(self, names: Sequence[str]) -> LayoutReport:
        """Run the whole check."""
        start = time.perf_counter()
        self._weights: Weights = self._initial(self._single("rows"))
        main = self._truth("rows")
        has_statistics = any(name not in self._weights.streams for name in self._weights.rest)
        self._has_balance = BALANCE in main.programs.program.scalars
        self._even = has_statistics or self._has_balance
        coming = map(self._begun, names)
        begun = deque(islice(coming, AHEAD))
        main.measure()
        results = [self._of_processes] if self._of_processes is not None else []
        for result in results:
            self._done(result)
        while begun:
            begun.extend(islice(coming, 1))
            result = self._result(begun.popleft())
            if result is not None:
                results.append(result)
                self._done(result)
        if self._weights.other_kinds:
            self._notes.append(
                f"the keys of the model are of {', '.join(self._weights.other_kinds)}: its noise was compared with "
                f"{THREEFRY}, and that of {self._weights.other_kinds[0]} may depend on the devices"
            )
        self._notes += [truth.reference.note for truth in self._truths.values() if truth.reference is not None]
        batch = jax.tree.leaves(self._batch("rows"))[0]
        return LayoutReport(
            results=tuple(results),
            parameters=sum(value.size for value in self._weights.params.values()),
            rows=batch.shape[0],
            seq_len=batch.shape[1],
            devices=len(self._devices),
            notes=(*(note for note in dict.fromkeys(self._notes) if note), UNSEEN),
            seconds=time.perf_counter() - start,
        )

    def _initial(self, layout: Layout) -> Weights:
        try:
            return initial_weights(self._subject.model, layout)
        except UserError as error:
            if "does not fit" not in str(error):
                raise
            sizes = str(error).split(". ")[0]
            raise UserError(
                f"{sizes}. The reference is one device, so check a narrower model: {self._subject.advice}"
            ) from error

    def _single(self, batch: BatchName) -> Layout:
        layout = self._layout("rows") if self._subject.mesh is None else None
        if isinstance(layout, Layout):
            return reference_layout(layout.mesh, layout.sharding, batch)
        assert self._subject.mesh is not None
        assert self._subject.sharding is not None
        return reference_layout(self._subject.mesh, self._subject.sharding, batch)

    def _layout(self, name: str) -> Layout | str:
        subject = self._subject
        if subject.mesh is not None and subject.sharding is not None and subject.mesh.axis_names != AXES:
            return layout_of_mesh(name, subject.mesh, subject.sharding, fsdp=subject.fsdp)
        if name == "experts" and EXPERT not in self._weights.axes:
            return f"no parameter names the axis {EXPERT!r}"
        if name == "packing" and (factor := subject.capacity_factor) is not None:
            return f"expert_capacity_factor is {factor}: experts take so many choices of a row, and packed rows differ"
        return layout_of(name, self._devices)

    def _batch(self, name: BatchName) -> Any:
        return self._subject.batch(name, len(self._devices), self._seq_len, even=self._even)

    def _truth(self, batch: BatchName, *, balanced: bool = True) -> Truth:
        """The reference of a batch, being compiled; with the balance loss, or without."""
        key = batch, balanced
        if key not in self._truths:
            layout, rows, subject = self._single(batch), self._batch(batch), self._subject
            is_main, loss = key == ("rows", True), subject.loss if balanced else drop_balance(subject.loss)
            trace = partial(loss_jaxpr, subject.model, loss, layout, self._weights, rows)
            jaxpr = trace()
            if subject.is_own and is_main:
                self._compare_processes(trace, jaxpr)
            programs = ReferencePrograms.compile_reference(
                subject.model, loss, layout, self._weights, rows, unit=coarsest(jaxpr), in_float64=is_main
            )
            self._truths[key] = Truth(
                programs,
                backward_order(jaxpr, sorted(self._weights.params)),
                draw_lines(jaxpr, [*sorted(self._weights.params), *sorted(self._weights.rest)], self._weights.keys),
            )
        return self._truths[key]

    def _compare_processes(self, trace: Callable[[], Any], jaxpr: Any) -> None:
        """Compare the loss as a process alone traces it with that of the second of two.

        Raises UserError where two traces of the same process differ.
        """
        first = text_of(jaxpr)
        with pretend_process(1, 2):
            second = text_of(trace())
        if second == first:
            return
        if text_of(trace()) != first:
            raise UserError(
                "the loss is random by itself: two traces of it differ, so it has numbers of Python's random, of "
                "numpy or of a counter of its own. Draw noise from keys of the model's nnx.Rngs"
            )
        with pretend_process(0, 2):
            if text_of(trace()) == second:
                self._notes.append(
                    "model or loss ask for jax.process_count(): whether a step of several processes is that of one "
                    "was not looked at"
                )
                return
        self._of_processes = LayoutResult(
            layout=PROCESSES,
            text="the loss as the first of two processes traces it, and as the second",
            status="differs",
            differences=(
                Difference(
                    what=PROCESSES,
                    meaning="they compute different programs: model or loss ask for jax.process_index(). All processes "
                    "must compute the same; for noise fold in the index of the row",
                ),
            ),
        )

    def _balanced(self, layout: Layout) -> bool:
        """Whether a layout is compared with its balance loss: that is of the tokens of a call, not of a whole step."""
        if layout.calls_once or not self._has_balance:
            return True
        self._notes.append(f"{layout.name} is compared without {BALANCE}, which each part has of its own tokens")
        return False

    def _begun(self, name: str) -> _Begun | LayoutResult | None:
        """A layout whose programs are traced; or why it cannot be compared."""
        layout = self._layout(name)
        if isinstance(layout, str):
            return None if name == OWN_MESH else LayoutResult(layout=name, text=layout, status="left out")
        balanced = self._balanced(layout)
        try:
            truth = self._truth(layout.truth, balanced=balanced)
        except Exception as error:
            return _without_reference(layout, error)
        loss = self._subject.loss if balanced else drop_balance(self._subject.loss)
        try:
            program = StepProgram.compile_program(
                self._subject.model, loss, layout, self._weights, self._batch(layout.batch)
            )
        except Exception as error:
            return _not_computed(layout, error)
        return _Begun(layout, truth, program)

    def _result(self, begun: _Begun | LayoutResult | None) -> LayoutResult | None:
        if not isinstance(begun, _Begun):
            return begun
        layout, order = begun.layout, begun.truth.order
        try:
            reference = begun.truth.measure()
        except Exception as error:
            return _without_reference(layout, error)
        try:
            outcome = begun.program.run()
        except Exception as error:
            return _not_computed(layout, error)
        found, largest = differences(outcome, reference, layout, order, self._weights.streams)
        start, update = self._of_start(layout, order), self._of_update(layout, order)
        found = [*start, *found, *self._of_noise(begun, outcome, without=not found), *update]
        whole = layout.divides_parameters and not begun.program.divides_parameters
        return LayoutResult(
            layout=layout.name,
            text=f"{layout.text}, but each parameter is whole" if whole else layout.text,
            status="differs" if found else "agrees",
            differences=tuple(found),
            compared=len(outcome.values),
            largest=largest,
        )

    def _of_noise(self, begun: _Begun, outcome: Outcome, *, without: bool) -> list[Difference]:
        """The random streams that draw other numbers in a layout; `without`: whether it agrees without noise."""
        layout, truth = begun.layout, begun.truth
        reference = truth.measure()
        of_count = differences_in_count(outcome, reference, layout)
        streams = tuple(sorted(name for name in outcome.drawn if outcome.drawn[name] or reference.drawn.get(name)))
        if not streams or not layout.calls_once or layout.batch != layout.truth:  # parts that are calls draw anew
            return of_count
        if not without:
            self._notes.append(f"the noise of {layout.name} was not compared, as it differs without noise")
            return of_count
        together = self._with_noise(begun, streams)
        if together is None:
            return []  # what another layout draws and does not use, or draws in other pieces, is no mistake
        each = {name: self._with_noise(begun, (name,)) for name in streams} if len(streams) > 1 else {}
        guilty = {name: found for name, found in each.items() if found is not None}
        in_words = {difference.name: difference for difference in of_count}
        return [
            in_words.get(name) or difference_in_noise(name, truth.lines.get(name, []), *found)
            for name, found in (guilty or dict.fromkeys(streams, together)).items()
        ]

    def _with_noise(self, begun: _Begun, streams: tuple[str, ...]) -> tuple[Difference, float, float] | None:
        """(the first result that differs with the noise of these streams, the loss, the loss on one device)."""
        reference, outcome = begun.truth.measure_with_noise(streams), begun.program.run(noise=streams)
        found, _ = differences(outcome, reference, begun.layout, begun.truth.order, self._weights.streams)
        return (found[0], float(outcome.values[LOSS]), float(reference.exact[LOSS])) if found else None

    def _of_start(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """What differs in the weights before the step, of a model of the user's own that is made in the layout."""
        model = self._subject.model
        if isinstance(model, nnx.Module | TransformerBuilder) or layout.batch != "rows" or layout.mesh.size == 1:
            return []
        self._initials = self._initials or InitialCheck(model, self._single("rows"))
        return self._initials.differences(layout, order)

    def _of_update(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """What differs in the update by an optimizer of the user's own, of the gradient of one device."""
        subject = self._subject
        if not subject.has_own_optimizer or not layout.calls_once or layout.batch != "rows":
            return []
        if self._updates is None:
            reference, single = self._truth("rows").measure(), self._single("rows")
            gradient = {name: reference.exact[GRADIENT + name].astype(np.float32) for name in self._weights.params}
            optimizer = for_run(subject.optimizer, subject.curriculum.shapes, {})
            self._updates = UpdateCheck(
                subject.model, optimizer, single, self._weights, gradient, subject.curriculum.total_steps
            )
        return self._updates.differences(layout, order)


def _without_reference(layout: Layout, error: Exception) -> LayoutResult:
    """What becomes of a layout that has no reference; that of whole rows must be there."""
    if layout.truth == "rows":
        raise error
    what = "documents in rows" if layout.truth == "documents" else "a few rows"
    text = f"model or loss do not take {what} on one device: {first_line(error)}"
    return LayoutResult(layout=layout.name, text=text, status="left out")


def _not_computed(layout: Layout, error: Exception) -> LayoutResult:
    """What becomes of a layout where the package refuses it, or the user's code or XLA fails, in whatever way."""
    if isinstance(error, UserError):
        return LayoutResult(layout=layout.name, text=first_line(error), status="left out")
    return LayoutResult(layout=layout.name, text=f"{layout.text}: {first_line(error)}", status="failed")


def report_json(report: LayoutReport) -> dict[str, Any]:
    """A report as plain values; a number that is not finite is None."""
    fields: dict[str, Any] = dataclasses.asdict(report)
    fields["agree"] = report.agree
    for result in fields["results"]:
        result["differences"] = [
            {
                name: None if isinstance(value, float) and not np.isfinite(value) else value
                for name, value in each.items()
            }
            for each in result["differences"]
        ]
    return fields
