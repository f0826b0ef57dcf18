"""What the training benchmarks share: a run on random tokens whose blocks of steps take turns with the bare program.

The bare program is the very one that the trainer runs, called in a loop on one batch, waiting for the step before.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax._src.array import ArrayImpl

from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.run.trainer import Trainer
from roxxel_dist.train.step.throughput import InflightThrottler


class Observed(Trainer):
    """A trainer that calls `before(step)`, from 0, as each step begins."""

    before: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.open()
        progress = self.loop.held.progress
        enter = progress.enter

        def observed(step: int, phase: int) -> None:
            self.before(step - 1)
            enter(step, phase)

        progress.enter = observed


def random_tokens(path: Path, count: int, vocabulary: int) -> Roxxel:
    """`count` random tokens on disk."""
    data = Roxxel(path)
    tokens = np.random.default_rng(0).integers(0, vocabulary, count, np.uint16)
    data.write([tokens], separator=None, vocab_size=vocabulary)
    return data


def make_trainer(
    data: Roxxel, phases: Sequence[Phase], model: ModelConfig, folder: Path, *, leaves: int = 0, **options: Any
) -> Observed:
    """A run of the built-in Transformer with adamw; of a model with at least so many arrays as parameters."""

    def build() -> Transformer:
        transformer = Transformer(model, nnx.Rngs(0))
        for number in range(leaves - len(jax.tree.leaves(nnx.state(transformer, nnx.Param)))):
            setattr(transformer, f"extra_{number}", nnx.Param(jnp.zeros(8)))
        return transformer

    options.setdefault("val_fraction", 0.0)  # a validation at the end fetches too
    return Observed(build, optax.adamw(1e-4), Curriculum(data, phases), token_losses, folder, **options)


class Bare:
    """The compiled step of a trainer's first phase in a loop of its own, with a state and a batch of its own."""

    def __init__(self, trainer: Observed) -> None:
        loop = trainer.loop
        self.program = loop.enter_phase(0)
        self._state = jax.tree.map(jnp.copy, loop.position.state)
        self._hparams = loop.position.hparams
        self._batch = next(loop.programs.stream_from(0))
        self._throttler = InflightThrottler(trainer.mesh)

    def run(self, steps: int) -> None:
        """So many steps, to the end of the last."""
        for _ in range(steps):
            self._throttler.wait_for_next()
            self._state, metrics = self.program(self._state, self._hparams, self._batch)
            self._throttler.add(metrics.scalars["loss"])
        self._throttler.wait_for_all()


def take_turns(trainer: Observed, block: int, offset: int, clocks: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Run a trainer, and the bare program between blocks of its steps; the median of both, by each clock.

    Args:
        trainer: not run yet.
        block: steps in one turn; the first turn is left out.
        offset: steps before the first block begins.
        clocks: such as `time.perf_counter`.

    Returns:
        [seconds a step of the trainer, of the bare program] for each clock.
    """
    bare = Bare(trainer)
    bare.run(block)
    mine: list[list[float]] = []
    bares: list[list[float]] = []
    began: list[float] = []

    def read() -> list[float]:
        return [clock() for clock in clocks]

    def before(step: int) -> None:
        nonlocal began
        if step < offset or (step - offset) % block:
            return
        trainer.loop.throttler.wait_for_all()
        if began:
            mine.append([(now - then) / block for now, then in zip(read(), began, strict=True)])
            then = read()
            bare.run(block)
            bares.append([(now - before) / block for now, before in zip(read(), then, strict=True)])
        began = read()

    trainer.before = before
    gc.collect()
    trainer.run()
    return [[statistics.median(one[i] for one in found[1:]) for found in (mine, bares)] for i in range(len(clocks))]


@contextmanager
def conversions(step: Callable[[], int]) -> Iterator[set[int]]:
    """The steps in which the main thread had jax turn an array into numbers, in any library."""
    found: set[int] = set()
    kind: Any = ArrayImpl
    original = kind._value

    def counting(array: Any) -> object:
        if current_thread() is main_thread():
            found.add(step())
        return original.fget(array)

    kind._value = property(counting)
    try:
        yield found
    finally:
        kind._value = original


def step_times(trainer: Observed, look: Callable[[int], object] = lambda step: None) -> list[float]:
    """Run a trainer; wall-clock seconds from the begin of each step to that of the next; `look` sees each."""
    begins: list[float] = []

    def before(step: int) -> None:
        begins.append(time.perf_counter())
        look(step)

    trainer.before = before
    trainer.run()
    return [after - before for before, after in pairwise(begins)]


def stall(times: Sequence[float], first: int) -> float:
    """Seconds that the steps at a phase boundary took over the usual: `first` is the new phase's first, from 0.

    The loop waits for a step while it hands over the next, so the first step's time is spread over two turns.
    """
    before, after = statistics.median(times[first // 2 : first]), statistics.median(times[first + 2 :])
    return sum(times[first : first + 2]) - before - after
