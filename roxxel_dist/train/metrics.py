"""The metrics of a run: rows of the log, the progress bar, and the lines that announce the run and its phases.

Those of a step wait on the devices until the next one is dispatched; then they are fetched, checked and logged.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from roxxel_dist.cluster.determinism import is_deterministic
from roxxel_dist.cluster.distributed import process_count, process_index
from roxxel_dist.cluster.mesh import device_type
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.input.verify_ahead import Verification
from roxxel_dist.process.exit_codes import REACHED_ENV
from roxxel_dist.train.log.base import LogQueue
from roxxel_dist.train.position import Position
from roxxel_dist.train.resume import ResumePoint
from roxxel_dist.train.step.bad_steps import BadStepMonitor
from roxxel_dist.train.step.batch_layout import BatchLayout, cut_rows_text
from roxxel_dist.train.step.digest_chain import hex_digest
from roxxel_dist.train.step.step import BALANCE, Metrics, fetch
from roxxel_dist.train.step.throughput import StepTimer, mfu, peak_memory_gb

SHOW_EVERY_S = 0.1
"""Seconds between records of the progress: one at every step cost the loop about a tenth of a millisecond."""
CROWDED, WELL = 4, 3
"""So many times its even share make an expert crowded; below the second it is well again."""
OF_VALIDATION = re.compile(r"val_(loss|bpb)(/|$)|val_bal$|train_eval_loss$|task/")


class MetricsLogger:
    """Makes rows of the metrics of steps, and records of the progress of the run.

    `start_step` counts the steps done before this process began; `flops_per_token` is (inputs a row) -> FLOPs of a
    training step, for one of them; `devices` are those of the mesh, of all processes; `computed_flops` is (phase, from
    0) -> FLOPs that they compute in a step together, None where that is not known.
    """

    def __init__(
        self,
        log: LogQueue,
        timer: StepTimer,
        last_step: int,
        start_step: int,
        flops_per_token: Callable[[int], float],
        devices: Iterable[Any],
        computed_flops: Callable[[int], float | None],
    ) -> None:
        self._log, self._timer = log, timer
        self._last_step, self._start_step = last_step, start_step
        self._flops, self._computed, self._devices = flops_per_token, computed_flops, list(devices)
        self._loss: Any = None
        self._crowded = False
        self._next_update = 0.0

    def log_row(self, plan: Plan, done: int, metrics: Metrics, losses: Mapping[str, float]) -> None:
        """Log the (fetched) metrics of a step, `done` from 1, and the `losses` of the validation after it."""
        self._loss = metrics.scalars["loss"]
        speed = self._timer.report()
        phase, (rows, length) = plan.phase(done - 1), plan.shape(done - 1)
        more = speed | {"phase": phase + 1, "tokens": plan.tokens(done)} | peak_memory_gb()
        computed = self._computed(phase)
        flops = {"mfu": self._flops(length - 1), "hfu": computed and computed / (rows * (length - 1))}
        for name, per_token in flops.items() if speed else ():
            if per_token and (used := mfu(speed["tokens_per_s"], per_token, self._devices)) is not None:
                more[name] = used
        if metrics.row_loss is not None:
            more |= loss_by_dataset(metrics, plan.rows(done - 1).dataset, plan.datasets)
        digest = "" if metrics.digest is None else hex_digest(metrics.digest)
        if metrics.load is not None:
            more |= expert_loads(load := even_shares(metrics.load))
            self._warn_of_crowd(done, load)
        self._log.row(make_row(done, metrics.scalars, losses, more), digest)
        if done == self._last_step:
            self.update_progress(plan, done)  # it stays on the screen

    def _warn_of_crowd(self, done: int, load_LxE: np.ndarray) -> None:
        """Log a warning where an expert is crowded, and again only after all were well."""
        most = float(load_LxE.max())
        if most >= CROWDED * (1 - 1e-6) and not self._crowded:
            layer, expert = np.unravel_index(load_LxE.argmax(), load_LxE.shape)
            self._crowded = True
            self._log.text(
                f"warning: step {done}: expert {expert} of block {layer} (both from 0) has {most:.1f} times its even "
                f"share of the tokens, so others learn little: raise alpha_balance, or lower lr"
            )
        elif most < WELL:
            self._crowded = False

    def log_startup(self, sharding: NamedSharding, start: ResumePoint, *, finished: bool) -> None:
        """Log the devices, and where the run begins; the notes of `start` come last."""
        mesh = sharding.mesh
        held = f"{len(mesh.local_devices or [])} of {mesh.size} {device_type(mesh).platform} devices"
        self._log.text(f"rank {process_index()} of {process_count()}: {held}")
        if finished:
            self._log.text(f"this run is finished: step {self._start_step} is restored, nothing to do")
        elif self._start_step:
            again = max(0, int(os.environ.get(REACHED_ENV) or 0) - self._start_step)
            lost = f"; {again} steps are done again" if again else ""
            done = f"step {self._start_step} of {self._last_step}"
            self._log.text(f"resuming after {done}, from {start.source_text}{lost}")
            if device_type(mesh).platform == "gpu" and not is_deterministic():
                self._log.text("the last bits of its losses may be others: on a GPU deterministic: true repeats them")
        for note in start.notes:
            self._log.text(note)

    def log_phase(self, plan: Plan, step: int, layout: BatchLayout, grad_accum: int, virtual_shards: int = 0) -> None:
        """Log that a phase begins with this step, from 0."""
        rows, length = plan.shape(step)
        how = "" if layout.is_plain else f": {layout}"
        if text := cut_rows_text(virtual_shards, rows, length):
            how += f"{', ' if how else ': '}{text}"
        if rows < grad_accum:
            how += f", in {rows} micro-batch(es) instead of {grad_accum} because it has no more rows"
        self._log.text(
            f"phase {plan.phase(step) + 1}/{len(plan.shapes)} from step {step + 1}: "
            f"{rows} rows x {length} tokens a step{how}"
        )
        if layout.repeated:
            who = "devices" if layout.together == 1 else "groups of devices"
            self._log.text(
                f"warning: {layout.repeated} of {layout.pieces + layout.repeated} {who} have no work of their own in "
                f"phase {plan.phase(step) + 1}: give it more rows or longer ones, or fewer devices"
            )

    def update_progress(self, plan: Plan, done: int) -> None:
        """Update the record of the progress bar, as often as eyes can follow."""
        now = time.monotonic()
        if now < self._next_update and done != self._last_step:
            return
        self._next_update = now + SHOW_EVERY_S
        speed = self._timer.tokens_per_s
        left = plan.predicted_tokens(self._last_step) - plan.predicted_tokens(done)
        self._log.status(
            {
                "step": done,
                "total": self._last_step,
                "start": self._start_step,
                "loss": self._loss,
                "tokens_per_s": speed,
                "eta_s": left / speed if speed else None,
                "phase": f"phase {plan.phase(done - 1) + 1}/{len(plan.shapes)}",
            }
        )


def make_row(
    done: int, scalars: Mapping[str, Any], losses: Mapping[str, float], more: Mapping[str, float]
) -> dict[str, float]:
    """A row as `training_log.csv` begins: step (from 1), losses, balance; then everything else.

    A scalar of the step ("loss" and others) is left out if another entry of the row has its name.
    """
    values = dict(scalars)
    row = {"step": done, "train_loss": values.pop("loss"), "train_bal": values.pop(BALANCE, 0.0), **losses}
    if "val_loss" in losses:
        row.setdefault("val_bal", 0.0)
    own = {**row, **more}
    # A step that was not validated has no "val_loss", and a loss function's own is none.
    taken = {f"val_{name}" for name in values}
    names = (name for name in values if name not in own and name not in taken and not OF_VALIDATION.match(name))
    return own | {name: values[name] for name in names}


def even_shares(load_LxE: Any) -> np.ndarray:
    """float64[layers, experts]: the load of each expert, in any unit, as multiples of the mean of its layer."""
    load_LxE = np.asarray(load_LxE, np.float64)
    return load_LxE / np.maximum(load_LxE.mean(1, keepdims=True), np.finfo(np.float64).tiny)


def expert_loads(load_LxE: np.ndarray) -> dict[str, float]:
    """What a row says of such a load: the least and the most of any layer, and the mean of the most of each layer."""
    busiest_L = load_LxE.max(1)
    least, mean, most = load_LxE.min(), busiest_L.mean(), busiest_L.max()
    return {"expert_load_min": float(least), "expert_load_mean": float(mean), "expert_load_max": float(most)}


def loss_by_dataset(metrics: Metrics, dataset: Any, names: Sequence[str]) -> dict[str, float]:
    """{"loss/<name>"} of each data set that predicts tokens in a batch: the mean of `row_loss` over its rows, by
    `row_weight`. `dataset`, int[B], is that of each row."""
    losses, which = np.asarray(metrics.row_loss, np.float64), np.asarray(dataset)
    weights = np.ones(losses.shape) if metrics.row_weight is None else np.asarray(metrics.row_weight, np.float64)
    counted = {name: (which == i) & (weights != 0) for i, name in enumerate(names)}
    return {
        f"loss/{name}": float(np.average(losses[rows], weights=weights[rows]))
        for name, rows in counted.items()
        if rows.any()
    }


class DeferredMetrics:
    """The metrics of the last step that was due, until they are fetched; `fetches` counts how often numbers were
    fetched from the devices.

    The `position` gets the running digest of fetched metrics; the `verification` of what a step has read is waited for
    before its row; the `monitor` raises BadStep, and names the `saved_steps`, those of the checkpoints.
    """

    def __init__(
        self,
        position: Position,
        verification: Verification,
        monitor: BadStepMonitor,
        saved_steps: Callable[[], Sequence[int]],
        logger: MetricsLogger,
    ) -> None:
        self._position, self._verification = position, verification
        self._monitor, self._saved_steps, self._logger = monitor, saved_steps, logger
        self._waiting: tuple[int, Metrics] | None = None
        self.fetches: int = 0

    def defer(self, done: int, metrics: Metrics) -> None:
        """Keep the metrics of a step for its row."""
        self._waiting = done, metrics

    def drop(self) -> None:
        """Forget them: the run goes back."""
        self._waiting = None

    def flush(self, losses: Mapping[str, float] = MappingProxyType({})) -> bool:
        """Fetch, check and log the deferred step, with the `losses` of a validation; returns whether there was one.

        Raises BadStep where it, or one before it, was bad.
        """
        if self._waiting is None:
            return False
        (done, metrics), self._waiting = self._waiting, None
        plan = self._position.plan
        self._verification.wait(done)
        blended = len(plan.datasets) > 1 and plan.segment(done - 1).shape.blend == "row"
        metrics = metrics if blended else metrics._replace(row_loss=None, row_weight=None)
        metrics = self.fetch(metrics)
        self._check(metrics)
        self._logger.log_row(plan, done, metrics, losses)
        return True

    def check(self, metrics: Metrics) -> None:
        """Fetch what decides whether a step that is not logged was bad. Raises BadStep."""
        self._check(self.fetch(metrics._replace(scalars={}, row_loss=None, row_weight=None, load=None)))

    def fetch(self, values: Any) -> Any:
        """The values on the host."""
        self.fetches += 1
        return fetch(values)

    def _check(self, metrics: Metrics) -> None:
        self._position.take_digest(metrics)
        self._monitor.check(metrics.health, self._position.plan, self._saved_steps)
