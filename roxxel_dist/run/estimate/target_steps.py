"""What a step costs on a target: compiled by the target's compiler, and held against what it must do."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.jax_private import assume_compute_capability
from roxxel_dist.cluster.mesh import one_device
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.devices.program_cost import ProgramCost
from roxxel_dist.devices.targets import GPUS, Target, hosts_of, is_too_large, memory_in
from roxxel_dist.run.components import RunComponents, build_components
from roxxel_dist.run.estimate.step_costs import PartCost, bounds, costs_of, roofline_seconds
from roxxel_dist.run.estimate.target_process import Report
from roxxel_dist.settings.config import Config
from roxxel_dist.train.exact.cost import Key, key_of
from roxxel_dist.train.step.compile import Compiler, Composite, StepMemory, mesh_of, on_device
from roxxel_dist.train.steps import Kind, Steps
from roxxel_dist.train.validation.evaluator import Validation


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """A training or validation step on one device of the target. None: the compiler refused it, so nothing is known."""

    peak_bytes: int | None
    """The most memory that the step takes, its state and batch included."""
    device_bytes: int | None
    """The memory that a device has for it."""
    fits: bool
    flops_per_device: float | None = None
    """Of matrix products, convolutions and attention."""
    flops_ratio: float | None = None
    """`flops_per_device` x devices / FLOPs of the same step on one device: 1.0 if no device repeats another's work."""
    collectives: Mapping[str, float] = field(default_factory=dict)
    """Kind -> bytes that a device sends."""
    gathered: Mapping[str, float] = field(default_factory=dict)
    """Arrays that each device puts together from the parts of several: type and parts, as "bf16[64,512] x 4" -> bytes
    of the whole."""
    bound_seconds: Mapping[str, float] = field(default_factory=dict)
    """"compute", "memory" and "links": the least time that each takes, by data sheets; the step takes the longest of
    them at least."""
    costs: tuple[PartCost, ...] = ()
    """Each part of the step with all its kernels at the limit of the device, the longest first."""
    roofline_seconds: float | None = None
    """Their sum: what the step takes if each kernel is as fast as data sheets allow, and none overlaps another."""
    compile_seconds: float


@dataclass(frozen=True, kw_only=True)
class TargetPhase(TargetStep):
    """The training step of a phase, and its validation step."""

    validation: TargetStep | None = None
    """None without validation."""


class TargetCompiler:
    """Compiles steps for a target, in a process with the target's `environment`.

    Args:
        target: the devices.
        report: called with the name of a program before its compilation and after it.
        device_memory_gb: memory of a device in 10^9 bytes; None: that of the target's devices.
    """

    def __init__(self, target: Target, report: Report, device_memory_gb: float | None = None) -> None:
        self.target: Target = target
        self._report = report
        self.devices: list[Any] = target.devices()
        self.hosts: int = len(set(hosts_of(self.devices)))
        self.device_bytes: int | None = (
            int(device_memory_gb * 1e9) if device_memory_gb else target.device_bytes(self.devices[0])
        )
        if target.is_gpu:
            assume_compute_capability(GPUS[target.kind].capability)

    def compile(self, what: str, mesh: Mesh, jitted: Any, args: Sequence[Any]) -> Any:
        """The program of a jitted function for such `jax.ShapeDtypeStruct`s with shardings; while it is traced, the
        mesh of the last one, a batch, is set, else this one. Raises TooLarge."""
        self._report(what, False)
        try:
            with jax.set_mesh(mesh_of(args[-1], mesh)):
                options = self.target.compiler_options
                return jitted.lower(*args).compile(compiler_options=None if options is None else dict(options))
        except jax.errors.JaxRuntimeError as error:
            if not is_too_large(str(error)):
                raise
            raise TooLarge(memory_in(str(error))[0]) from error
        finally:
            self._report(what, True)

    def step(self, cost: ProgramCost, peak: int, mesh: Mesh, flops: float, seconds: float) -> TargetStep:
        """A step of such a cost and memory, compiled in so many seconds, beside its `flops` on one device."""
        device_kind = mesh.devices.flat[0].device_kind
        costs = costs_of(cost, device_kind)
        return TargetStep(
            peak_bytes=peak,
            device_bytes=self.device_bytes,
            fits=self.device_bytes is None or peak <= self.device_bytes,
            flops_per_device=cost.flops,
            flops_ratio=cost.flops * mesh.size / flops if flops else None,
            collectives=dict(cost.collectives),
            gathered=cost.gathered,
            bound_seconds=bounds(cost, device_kind),
            costs=costs,
            roofline_seconds=roofline_seconds(costs) if costs else None,
            compile_seconds=seconds,
        )


class TooLarge(Exception):
    """A program does not fit; `bytes` are those that it needs, where its compiler says them."""

    def __init__(self, needs: int | None) -> None:
        super().__init__(needs)
        self.bytes = needs


class TargetPrograms:
    """The programs of a step on a mesh, compiled for a target, each once; `what` says what a program of a name is, for
    messages, and `seconds` what they took to trace and compile."""

    def __init__(self, target: TargetCompiler, mesh: Mesh, what: Callable[[str], str]) -> None:
        self._target, self._mesh, self._what = target, mesh, what
        self._known: dict[Key, Any] = {}
        self.seconds: float = 0.0

    def one(self, jitted: Any, args: Sequence[Any], mesh: Mesh) -> Any:
        """`Compiler.one`. Raises TooLarge."""
        key, begun = key_of(jitted, args), time.perf_counter()
        if key not in self._known:
            try:
                self._known[key] = self._target.compile(self._what(jitted.__name__), mesh, jitted, args)
            finally:
                self.seconds += time.perf_counter() - begun
        return self._known[key]

    def each(self, jitted: Any, args: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """`Compiler.each`."""
        own = on_device(args, devices[0])
        return [self.one(jitted, own, one_device(self._mesh, devices[0]))] * len(devices)


def measure_step(
    target: TargetCompiler, what: str, steps: Steps, kind: Kind, batch: Any, flops: float, simulated: Steps
) -> tuple[TargetStep, StepMemory | None]:
    """(the cost of a step; its memory, None if it does not fit).

    Args:
        target: its compiler, which compiles each program once.
        what: for messages.
        steps: on the mesh of the target.
        kind: which step is meant.
        batch: as shapes.
        flops: of the same step on one device.
        simulated: see `Steps.cost`.
    """
    many = isinstance(steps.program(kind), Composite)
    programs = TargetPrograms(target, steps.mesh, lambda name: f"{what}, {name}" if many else what)
    try:
        cost, memory = steps.cost(kind, batch, Compiler(programs.one, programs.each), simulated)
    except TooLarge as error:
        known = {"device_bytes": target.device_bytes, "compile_seconds": programs.seconds}
        return TargetStep(peak_bytes=error.bytes, fits=False, **known), None
    return target.step(cost, memory.peak, steps.mesh, flops, programs.seconds), memory


COMPILED_AT_ONCE = 2
"""The compilers use few threads each; more programs at once would need more memory than most machines have."""


def measure_phases(
    target: TargetCompiler,
    components: RunComponents,
    steps: Steps,
    plan: Plan,
    last_steps: Sequence[int],
    batches: Sequence[Any],
    validation: Validation,
) -> list[tuple[StepMemory | None, TargetPhase]]:
    """For each phase (the memory of its training step or None if it does not fit, what its steps cost), by the target's
    compiler; of a phase there is one step, from 0, and its batch."""
    alone, shapes = steps.on_one_device(), [plan.segment(step).shape for step in last_steps]

    def make_simulated(mesh: Mesh) -> Steps:
        # Kernels of the target cannot be traced for simulated devices; they change no number of calls.
        config = dataclasses.replace(components.config, attention="xla")
        return rebuild(config, components).steps(mesh, plan.total_steps)

    simulated = steps.simulated(make_simulated)

    def measure(what: str, kind: Kind, batch: Any) -> tuple[TargetStep, StepMemory | None]:
        return measure_step(target, what, steps, kind, batch, alone.flops(kind, batch), simulated)

    with ThreadPoolExecutor(COMPILED_AT_ONCE, "roxxel-target") as pool:
        trained, validated, programs = list[Future[Any]](), list[Future[Any] | None](), dict[Any, Future[Any]]()
        for step, shape, batch in zip(last_steps, shapes, batches, strict=True):
            what = f"step of phase {plan.phase(step) + 1} ({shape.batch_size:,} rows x {shape.seq_len:,} tokens)"
            trained.append(pool.submit(measure, f"the training {what}", "training", batch))
            rows, key = validation.batch(shape), validation.text(shape)
            if rows is not None and key not in programs:  # phases with rows of one length share it
                programs[key] = pool.submit(measure, f"the validation {what}", "validation", rows)
            validated.append(programs.get(key))
        found: list[tuple[StepMemory | None, TargetPhase]] = []
        try:
            for training, other in zip(trained, validated, strict=True):
                step, needs = training.result()
                evaluated = None if other is None else other.result()[0]
                found.append((needs, TargetPhase(**vars(step), validation=evaluated)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # none of the others is begun
            raise
    return found


def rebuild(config: Config, components: RunComponents, devices: Sequence[Any] | None = None) -> RunComponents:
    """The components of a changed config, with the schedule of those that there are."""
    made = build_components(config, components.data, devices=devices)
    return dataclasses.replace(made, optimizer=components.optimizer)
