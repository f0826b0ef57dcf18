"""The learning-rate range test (Smith 2017, arXiv 1506.01186): a short training whose learning rate grows at each step.

A state of its own and one compiled program; the rate is read off the smoothed loss.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.determinism import enable_compilation_cache
from roxxel_dist.cluster.mesh import batch_sharding, scalars_on
from roxxel_dist.curriculum.phases import Curriculum
from roxxel_dist.curriculum.segments import check_batches
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.split import Leaves
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.training import LoopOptions
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import LONG, NamedOptimizer
from roxxel_dist.train.step.step import SPIKE_FACTOR, LossFn, fetch
from roxxel_dist.train.step.throughput import InflightThrottler
from roxxel_dist.train.steps import StepOptions, make_steps
from roxxel_dist.utils.display import figure

AT_THE_PEAK: Mapping[str, float] = {"warmup_steps": 0.0, "total_steps": float(LONG), "decay_steps": 1.0}
"""Settings that keep every schedule at `lr`: no warm-up, and a decay that never begins."""


def sweep_stream(curriculum: Curriculum, num_steps: int, seed: int, mesh: Mesh, grad_accum: int = 1) -> Stream:
    """The batches of a sweep: the training data, in the shape of the first phase, for so many steps.

    Raises ValueError for a batch that is not a multiple of `grad_accum`, or a phase that does not fit the data.
    """
    phase = replace(curriculum.phases[0], steps=num_steps)
    check_batches([phase.shape], grad_accum)
    sets = curriculum.primary_streamer, [phase], curriculum.mix_streamers
    plan = Curriculum(*sets, passes=curriculum.passes).plan(seed)
    return Stream(plan, curriculum.datasets, batch_sharding(mesh), grad_accum=grad_accum)


def sweep(
    model: Callable[[], nnx.Module],
    optimizer: NamedOptimizer,
    stream: Stream,
    loss_fn: LossFn,
    rates: Sequence[float],
    *,
    grad_accum: int = 1,
    options: LoopOptions,
    load: Callable[[Leaves, Leaves], Leaves] | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """The loss of each step of a training with these learning rates, one a step; fewer where it diverges.

    The program is the one that training compiles. Nothing is written to disk, beside compiled programs. The rate, warm-
    up and decay of the `optimizer` are left aside; `stream` has at least as many batches as there are rates, all of one
    shape, on a mesh; of the `options` types and `fsdp` count; `load` is as `StateBuilder.build` takes it.
    `done` is called with 1 after each step.
    """
    enable_compilation_cache()
    sharding = stream.sharding
    assert sharding is not None
    mesh: Any = sharding.mesh
    # A curve needs no bits that are the same on any devices, no average, and no bad steps left out.
    plain = replace(options, virtual_shards=0, ema=0.0, on_bad_step="raise")
    settings = {**optimizer.settings(LONG), **AT_THE_PEAK, SPIKE_FACTOR: 0.0}
    steps = make_steps(model, loss_fn, optimizer, sharding, StepOptions.of_run(plain, grad_accum), settings)
    state, hparams = steps.init(load=load)
    programs, in_flight = AotCompiler(mesh), InflightThrottler(mesh)
    try:
        programs.prepare("step", steps.train, state, hparams, stream.abstract())
        program = programs.get("step")
    finally:
        programs.close()
    losses, smoothed = list[float](), SmoothedLoss(len(rates))
    waiting = None
    for rate in rates:
        batch = next(stream)  # read while the devices work on the step before
        in_flight.wait_for_next()
        state, metrics = program(state, {**hparams, **scalars_on(mesh, {"lr": rate})}, batch)
        in_flight.add(metrics.scalars["loss"])
        if waiting is not None:  # the step before: every rank has the same number, so all stop at the same step
            losses.append(fetch(waiting))
            smoothed.add(losses[-1])
            if smoothed.has_diverged:
                in_flight.wait_for_all()
                return losses
        waiting = metrics.scalars["loss"]
        done(1)
    return [*losses, fetch(waiting)]


AVERAGED = 10
"""The smoothed loss is a running mean over about this fraction of the sweep: a tenth."""
WINDOW = 8
"""The slope at a step is that of the line through the smoothed losses this fraction of the sweep around it: an eighth.

Of the widths tried, with sweeps of 50 to 200 steps over 4 to 6 decades, these two came closest to the best rate; the
difference between neighbours, or a mean over a fixed number of steps, picks out noise in long and short sweeps.
"""
FALL_SHARE: Mapping[str, float] = {"sgd": 0.9, "muon": 0.9}
"""Optimizers whose suggestion is the rate at which the smoothed loss has done this share of its fall.

Their best rates are near those at which a training becomes unstable. The best rates of the others, which divide by the
size of a gradient, are far below these, where the loss falls fastest: with one and the same curve, that of muon was ten
times that of adamw. Found on settings that are not those of benchmarks/lr_finder.py.
"""
RISE = 0.5
"""The loss has diverged once it has risen again by this share of its earlier fall."""
LAG = 3
"""Steps between a rate and the fall that is due to it: a loss is measured before the update of its step, and momentum
spreads an update over the steps that follow. It is a number of steps, so short sweeps need it most."""
SPIKE = 5
"""Steps around one whose median loss stands for its own, where the slope is looked for."""
LEAST_RISE = 0.1
"""The same as a share of the first loss, for a loss that never fell."""
NOISES = 4.0
"""A loss that fell by less than so many times its usual change from step to step did not fall."""
LEAST_FALL = 1e-3
"""Nor did one that fell by less than this share of itself."""
FEWEST = 10
"""Steps that say anything at all."""
MOST = 10_000
"""Steps of a sweep: beyond it a curve gets no smoother, and each step is one of training."""


def sweep_rates(min_lr: float, max_lr: float, num_steps: int) -> list[float]:
    """Learning rates from `min_lr` to `max_lr`, each the same factor above the one before.

    Raises ValueError where the ends are not above 0 and in this order, or there are too few steps.
    """
    if not 0 < min_lr < math.inf:
        raise UserError(f"min_lr is {min_lr}: it must be above 0, and finite")
    if not min_lr < max_lr < math.inf:
        raise UserError(f"max_lr is {max_lr}: it must be above min_lr ({min_lr}), and finite")
    if not FEWEST <= num_steps <= MOST:
        raise UserError(f"num_steps is {num_steps}: a curve needs at least {FEWEST} steps, and at most {MOST:,}")
    return [min_lr * (max_lr / min_lr) ** (step / (num_steps - 1)) for step in range(num_steps)]


class SmoothedLoss:
    """The running mean, with weights that decay into the past, of the losses of a sweep of `num_steps`.

    It begins at 0, and the share of that 0 is divided out (the bias correction of Adam, Kingma & Ba 2015, arXiv
    1412.6980): the first value is the first loss, and a constant loss stays what it is. A step costs the same at any
    length: only the mean and its first, last and lowest values are kept.

    It has diverged once it stayed far above its lowest value for as many steps as it looks back, so that a few bad
    batches are no divergence.
    """

    def __init__(self, num_steps: int) -> None:
        self._past, self._mean, self._share = 1 - AVERAGED / num_steps, 0.0, 1.0
        self._first = self._last = self._lowest = math.nan
        self._patience = max(1, round(num_steps / AVERAGED))
        self.steps_above: int = 0
        """How many steps until now it was far above its lowest value."""

    def add(self, loss: float) -> float:
        """The smoothed loss with this one, of the next step."""
        self._mean = self._past * self._mean + (1 - self._past) * loss
        self._share *= self._past
        self._last = self._mean / (1 - self._share)
        if math.isnan(self._first):
            self._first = self._lowest = self._last
        self._lowest = min(self._lowest, self._last)
        rise = max(RISE * (self._first - self._lowest), LEAST_RISE * abs(self._first))
        self.steps_above = self.steps_above + 1 if self._last - self._lowest > rise else 0
        return self._last

    @property
    def has_diverged(self) -> bool:
        """Whether it is no number, or was far above its lowest value for long."""
        return not math.isfinite(self._last) or self.steps_above >= self._patience


def smooth(losses: Iterable[float], num_steps: int) -> list[float]:
    """The smoothed losses of a sweep of `num_steps`, or of its beginning."""
    return list(map(SmoothedLoss(num_steps).add, losses))


def cut_at_divergence(losses: Iterable[float], num_steps: int) -> list[float]:
    """The losses up to the first that is no number, without it, or where the smoothed loss began to diverge."""
    smoothed, found = SmoothedLoss(num_steps), list[float]()
    for loss in itertools.takewhile(math.isfinite, losses):
        found.append(loss)
        smoothed.add(loss)
        if smoothed.has_diverged:
            return found[: len(found) - smoothed.steps_above + 1]
    return found


def median_losses(losses: Sequence[float]) -> list[float]:
    """The median at each loss of the `SPIKE` losses around it: one or two bad batches leave no trace."""
    half, last = SPIKE // 2, max(len(losses) - SPIKE, 0)
    begins = (min(max(step - half, 0), last) for step in range(len(losses)))
    return [statistics.median(losses[begin : begin + SPIKE]) for begin in begins]


def suggest(rates: Sequence[float], losses: Sequence[float], num_steps: int, optimizer: str = "adamw") -> float:
    """The rate `LAG` steps before the smoothed loss falls most steeply by the logarithm of the rate.

    That is looked for before its lowest point. With sgd and muon it is the rate at which nine tenths of the fall to
    this point are done (`FALL_SHARE`).

    Rates and losses are one a step, rates evenly spaced by their logarithm, of a sweep of `num_steps` that may have
    stopped early. What comes after the loss diverged is left out. Raises ValueError where the loss did not fall.
    """
    usable = list(itertools.takewhile(math.isfinite, losses))
    if len(usable) < FEWEST:
        raise UserError(
            f"the loss was good for {len(usable)} steps only, up to a learning rate of "
            f"{rates[max(len(usable) - 1, 0)]:.2e}: use a smaller min_lr"
        )
    usable = cut_at_divergence(usable, num_steps)
    curve = smooth(median_losses(usable), num_steps)
    lowest = curve.index(min(curve))
    noise = statistics.median(abs(after - before) for before, after in itertools.pairwise(usable))
    start = statistics.fmean(median_losses(usable)[: max(1, len(usable) // AVERAGED)])
    if lowest == 0 or start - curve[lowest] <= max(NOISES * noise, LEAST_FALL * abs(start)):
        raise UserError(
            f"the loss did not fall between learning rates of {rates[0]:.2e} and {rates[len(usable) - 1]:.2e}: use a "
            f"smaller min_lr if it rose, a larger max_lr if it did not move"
        )
    if optimizer in FALL_SHARE:
        level = curve[0] - FALL_SHARE[optimizer] * (curve[0] - curve[lowest])
        return next(rate for rate, value in zip(rates, curve, strict=False) if value <= level)
    slopes = _slopes(curve, max(1, round(num_steps / WINDOW)))[: lowest + 1]
    return rates[max(slopes.index(min(slopes)) - LAG, 0)]


def _slopes(values: Sequence[float], half: int) -> list[float]:
    """The slope a step, at each value, of the line, by least squares, through those up to `half` before and behind it.

    By sums over all values before, so that a value costs the same at any `half`; they are of differences to the first
    value, which keeps their digits.
    """
    count = len(values)
    first = values[0]
    sums = list(itertools.accumulate((value - first for value in values), initial=0.0))
    moments = list(itertools.accumulate((at * (value - first) for at, value in enumerate(values)), initial=0.0))
    found = list[float]()
    for step in range(count):
        begin, end = max(step - half, 0), min(step + half + 1, count)
        size, middle = end - begin, (begin + end - 1) / 2
        spread = size * (size * size - 1) / 12  # the sum of squared distances of so many whole numbers to their mean
        found.append((moments[end] - moments[begin] - middle * (sums[end] - sums[begin])) / spread)
    return found


def plot_sweep(
    rates: Sequence[float], losses: Sequence[float], num_steps: int, suggested: float, picture: Path
) -> None:
    """Draw a sweep as a PNG: the loss by the learning rate, as it was and smoothed, and the suggestion as a line.

    Raises ImportError where matplotlib is not installed.
    """
    with figure(picture) as axes:
        axes.plot(rates, losses, color="0.7", lw=0.8, label="loss")
        axes.plot(rates, smooth(losses, num_steps), lw=1.6, label="smoothed")
        axes.axvline(suggested, color="tab:red", ls="--", lw=1.2, label=f"suggested: {suggested:.2e}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
