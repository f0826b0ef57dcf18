"""The steps of a learning-rate sweep: a state of its own, one compiled program, another rate at each step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.cluster.mesh import batch_sharding, scalars_on
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.stream import Stream
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.inflight import InFlight
from roxxel_dist.train.lr_finder import diverged
from roxxel_dist.train.optimizer import LONG, NamedOptimizer, first_state
from roxxel_dist.train.phase_programs import check_batches
from roxxel_dist.train.programs import Programs
from roxxel_dist.train.state import Leaves, init_state
from roxxel_dist.train.step import SPIKE_FACTOR, LossFn, fetch, make_step

AT_THE_PEAK: Mapping[str, float] = {"warmup_steps": 0.0, "total_steps": float(LONG), "decay_steps": 1.0}
"""What makes every schedule stay at `lr`: no warm-up, and a decay that does not come."""


def sweep_stream(curriculum: Curriculum, num_steps: int, seed: int, mesh: Mesh, grad_accum: int = 1) -> Stream:
    """What a sweep reads: the data to train on, in the shape of the first phase, for so many steps.

    Raises:
        ValueError: a batch that does not divide by `grad_accum`, or a phase that does not fit the data.
    """
    phase = replace(curriculum.phases[0], steps=num_steps)
    check_batches([phase.shape], grad_accum)
    plan = Curriculum(curriculum.primary_streamer, [phase], curriculum.mix_streamers).plan(seed)
    return Stream(plan, curriculum.datasets, batch_sharding(mesh))


def sweep(
    model: Callable[[], nnx.Module],
    optimizer: NamedOptimizer,
    stream: Stream,
    loss_fn: LossFn,
    rates: Sequence[float],
    *,
    grad_accum: int = 1,
    options: LoopOptions,
    load: Callable[[Leaves], Leaves] | None = None,
) -> list[float]:
    """The loss of each step of a training with these learning rates; fewer where it diverges.

    The program is the one that training compiles. Nothing is written to disk, beside compiled programs.

    Args:
        model: builds the module.
        optimizer: whose rate, warm-up and decay are left aside.
        stream: at least as many batches as rates, all of one shape, on a mesh.
        loss_fn: see `Trainer`.
        rates: one a step.
        grad_accum: micro-batches a step.
        options: of the run: its types, and `fsdp`.
        load: gives the parameters to begin with, see `init_state`.
    """
    enable_compilation_cache()
    sharding = stream.sharding
    assert sharding is not None
    mesh: Any = sharding.mesh
    dtype = jnp.bfloat16 if options.use_bf16 else None
    parts, state, settings = init_state(model, first_state(optimizer), mesh, fsdp=options.fsdp, dtype=dtype, load=load)
    settings |= scalars_on(mesh, {**optimizer.settings(LONG), **AT_THE_PEAK, SPIKE_FACTOR: 0.0})
    step = make_step(
        parts, loss_fn, optimizer, state, sharding,
        grad_accum=grad_accum, compute_dtype=jnp.bfloat16 if options.bf16_compute else None,
    )  # fmt: skip
    programs, in_flight = Programs(mesh), InFlight(mesh)
    try:
        programs.prepare("step", step, state, settings, stream.abstract())
        program = programs.get("step")
    finally:
        programs.close()
    losses: list[float] = []
    waiting = None
    for rate in rates:
        batch = next(stream)  # read while the devices work on the step before
        in_flight.make_room()
        state, metrics = program(state, {**settings, **scalars_on(mesh, {"lr": rate})}, batch)
        in_flight.add(metrics.scalars["loss"])
        if waiting is not None:  # the step before: every rank has the same number, so all stop at the same step
            losses.append(fetch(waiting))
            if diverged(losses, len(rates)):
                in_flight.settle()
                return losses
        waiting = metrics.scalars["loss"]
    return [*losses, fetch(waiting)]
