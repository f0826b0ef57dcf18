"""What a step costs on a target: compiled by the target's compiler, and held against what it must do."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.cluster.jax_private import assume_compute_capability
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.devices.program_cost import ProgramCost, program_cost
from roxxel_dist.devices.targets import GPUS, Target, hosts_of, is_too_large, memory_in
from roxxel_dist.devices.traced_flops import traced_flops
from roxxel_dist.run.estimate.step_costs import (
    COMPUTE,
    LINKS,
    MEMORY,
    PartCost,
    costs_of,
    link_seconds,
    roofline_seconds,
)
from roxxel_dist.run.estimate.target_process import Report
from roxxel_dist.train.step.compile import mesh_of


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """A training or validation step on one device of the target. None: the compiler refused it, so nothing is known."""

    peak_bytes: int | None
    """The most memory that the step takes, its state and batch included."""
    device_bytes: int | None
    """The memory that a device has for it."""
    fits: bool
    flops_per_device: float | None
    """Of matrix products, convolutions and attention."""
    flops_ratio: float | None
    """`flops_per_device` x devices / FLOPs of the same step on one device: 1.0 if no device repeats another's work."""
    collectives: Mapping[str, float]
    """Kind -> bytes that a device sends."""
    gathered: Mapping[str, float]
    """Arrays that each device puts together from the parts of several: type and parts, as "bf16[64,512] x 4" -> bytes
    of the whole."""
    bound_seconds: Mapping[str, float]
    """"compute", "memory" and "links": the least time that each takes, by data sheets; the step takes the longest of
    them at least."""
    costs: tuple[PartCost, ...]
    """Each part of the step with all its kernels at the limit of the device, the longest first."""
    roofline_seconds: float | None
    """Their sum: what the step takes if each kernel is as fast as data sheets allow, and none overlaps another."""
    compile_seconds: float


@dataclass(frozen=True, kw_only=True)
class TargetPhase(TargetStep):
    """The training step of a phase, and its validation step."""

    validation: TargetStep | None
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

    def measure(
        self, what: str, mesh: Mesh, jitted: Any, args: tuple[Any, ...], flops: float
    ) -> tuple[TargetStep, Any]:
        """(the cost of a jitted function for such (abstract) arguments, its program or None if it does not fit).

        Args:
            what: for messages.
            mesh: of the run; while it is traced, that of the last argument, a batch, is set.
            jitted: made by `jax.jit`.
            args: `jax.ShapeDtypeStruct`s with shardings.
            flops: of the same step on one device.
        """
        start, program, message = time.perf_counter(), None, ""
        self._report(what, False)
        try:
            with jax.set_mesh(mesh_of(args[-1], mesh)):
                options = self.target.compiler_options
                program = jitted.lower(*args).compile(compiler_options=None if options is None else dict(options))
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
            if not is_too_large(message):
                raise
        finally:
            self._report(what, True)
        seconds = time.perf_counter() - start
        if program is None:
            needs, _ = memory_in(message)
            step = TargetStep(
                peak_bytes=needs,
                device_bytes=self.device_bytes,
                fits=False,
                flops_per_device=None,
                flops_ratio=None,
                collectives={},
                gathered={},
                bound_seconds={},
                costs=(),
                roofline_seconds=None,
                compile_seconds=seconds,
            )
            return step, None
        cost = program_cost(program.as_text(), hosts_of(list(mesh.devices.flat)))
        peak, device_kind = peak_bytes(program), mesh.devices.flat[0].device_kind
        costs = costs_of(cost, device_kind)
        step = TargetStep(
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
        return step, program


def one_device_flops(mesh: Mesh, jitted: Any, args: tuple[Any, ...]) -> float:
    """FLOPs of a step on a mesh of one device: it is traced, and not compiled."""
    with jax.set_mesh(mesh):
        return traced_flops(jitted.trace(*args).jaxpr)


def peak_bytes(program: Any) -> int:
    """Memory of each device for a compiled program, from XLA's memory analysis."""
    account = program.memory_analysis()
    results = account.output_size_in_bytes - account.alias_size_in_bytes
    return account.argument_size_in_bytes + account.temp_size_in_bytes + results + account.generated_code_size_in_bytes


def bounds(cost: ProgramCost, device_kind: str) -> dict[str, float]:
    """Seconds by "compute", "memory" and "links", from the table of data sheets; empty for an unknown device."""
    known = accelerator(device_kind)
    if known is None:
        return {}
    return {
        COMPUTE: cost.flops / (known.tera_flops * 1e12),
        MEMORY: cost.bytes_accessed / (known.gigabytes_per_s * 1e9),
        LINKS: link_seconds(known, sum(cost.collectives.values()), cost.network_bytes),
    }
