"""What a run tells: rows of the log, the bar, and lines for people."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from roxxel_dist.cluster.distributed import process_count, process_index
from roxxel_dist.cluster.mesh import fit_sharding
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.bad_steps import Health
from roxxel_dist.train.loggers.base import LogQueue
from roxxel_dist.train.resume import ResumePoint
from roxxel_dist.train.throughput import Device, Meter, mfu, peak_memory_gb
from roxxel_dist.train.train_step import BALANCE, Metrics, fetch

SHOW_EVERY_S = 0.1
OF_VALIDATION = re.compile(r"val_loss(/|$)|val_bal$|train_eval_loss$")


class Reporter:
    """Puts a step's numbers aside, and fetches and logs them when the device is busy with the next step.

    Args:
        logger: where everything goes.
        plan: what each step reads.
        last_step: of the run.
        start_step: steps done before this process began.
        flops_per_token: (tokens a row) -> floating-point operations of a step, for a token.
        devices: those of the mesh, of all processes.

    Attributes:
        fetches: how often numbers were fetched from the devices.
        before_row: called with the number of the step before its row is looked at and logged; may raise.
    """

    def __init__(
        self,
        logger: LogQueue,
        plan: Plan,
        last_step: int,
        start_step: int,
        flops_per_token: Callable[[int], float],
        devices: Iterable[Device],
    ) -> None:
        self.logger: LogQueue = logger
        self.plan: Plan = plan
        self.last_step: int = last_step
        self.start_step: int = start_step
        self._flops, self._devices = flops_per_token, list(devices)
        self._aside: tuple[int, Metrics] | None = None
        self._loss: float | None = None
        self._next_show = 0.0
        self.meter: Meter = Meter()
        self.before_row: Callable[[int], None] = lambda _: None
        self.fetches: int = 0

    def fetch(self, values: Any) -> Any:
        """Numbers from the devices; waits for them."""
        self.fetches += 1
        return fetch(values)

    def put_aside(self, done: int, metrics: Metrics) -> None:
        """Keep what a step told, on the device, for `log`; `done` counts from 1."""
        blended = self.plan.segment(done - 1).shape.blend == "row" and len(self.plan.datasets) > 1
        self._aside = done, metrics if blended else metrics._replace(row_loss=None)

    def rewind(self, step: int, plan: Plan) -> None:
        """The run goes back to where `step` steps were done, and follows another plan from there."""
        self.plan, self._aside = plan, None
        self.logger.rewind(step)
        self.meter.forget()

    def log(self, check: Callable[[Health], None], extra: Mapping[str, float] = MappingProxyType({})) -> bool:
        """Log the step that was put aside; returns whether there was one.

        Args:
            check: is given the health after that step before the row is logged, and may raise.
            extra: what was found beside it, such as "val_loss".
        """
        if self._aside is None:
            return False
        (done, metrics), self._aside = self._aside, None
        self.before_row(done)
        found: Any = self.fetch(metrics)
        check(found.health)
        self._loss = found.scalars["loss"]
        phase, length = self.plan.phase(done - 1), self.plan.shape(done - 1)[1]
        speed = self.meter.report()
        more = speed | {"phase": phase + 1, "tokens": self.plan.tokens(done)} | peak_memory_gb()
        if speed and (used := mfu(speed["tokens_per_s"], self._flops(length), self._devices)) is not None:
            more["mfu"] = used
        if found.row_loss is not None:
            more |= loss_by_dataset(found.row_loss, self.plan.rows(done - 1).dataset, self.plan.datasets)
        self.logger.row(make_row(done, found.scalars, extra, more))
        if done == self.last_step:
            self.show(done)  # it stays on the screen
        return True

    def introduce(self, sharding: NamedSharding, start: ResumePoint, *, finished: bool) -> None:
        """The first lines; the notes of `start` are the last of them."""
        mesh = sharding.mesh
        held = f"{len(mesh.local_devices or [])} of {mesh.size} {jax.devices()[0].platform} devices"
        self.logger.text(f"rank {process_index()} of {process_count()}: {held}")
        if finished:
            self.logger.text(f"this run is finished: step {self.start_step} is restored, nothing to do")
        elif self.start_step:
            self.logger.text(f"resuming after step {self.start_step} of {self.last_step}, from {start.whence}")
        for note in start.notes:
            self.logger.text(note)

    def phase(self, step: int, sharding: NamedSharding, grad_accum: int) -> None:
        """A phase begins with this step, from 0."""
        rows, length = self.plan.shape(step)
        lies = fit_sharding(sharding, (rows, length)).spec
        asked = lies == sharding.spec
        how = "" if asked else f", laid out as {lies} because its rows do not divide by the devices"
        if rows < grad_accum:
            how += f", in {rows} micro-batch(es) instead of {grad_accum} because it has no more rows"
        self.logger.text(
            f"phase {self.plan.phase(step) + 1}/{len(self.plan.shapes)} from step {step + 1}: "
            f"{rows} rows x {length} tokens a step{how}"
        )

    def show(self, done: int) -> None:
        """Where the run is, for the bar; as often as eyes can follow."""
        now = time.monotonic()
        if now < self._next_show and done != self.last_step:
            return
        self._next_show = now + SHOW_EVERY_S
        speed = self.meter.tokens_per_s
        left = self.plan.tokens(self.last_step) - self.plan.tokens(done)
        self.logger.status(
            {
                "step": done,
                "total": self.last_step,
                "start": self.start_step,
                "loss": self._loss,
                "tokens_per_s": speed,
                "eta_s": left / speed if speed else None,
                "phase": f"phase {self.plan.phase(done - 1) + 1}/{len(self.plan.shapes)}",
            }
        )


def make_row(
    done: int, scalars: Mapping[str, float], extra: Mapping[str, float], more: Mapping[str, float]
) -> dict[str, float]:
    """A row as `training_log.csv` begins: step, losses, balance; then everything else.

    Args:
        done: the step, from 1.
        scalars: what the step told: "loss" and others; what has the name of something else in the row is left out.
        extra: what was found beside it, such as "val_loss".
        more: speed and place.
    """
    values = dict(scalars)
    row = {"step": done, "train_loss": values.pop("loss"), "train_bal": values.pop(BALANCE, 0.0), **extra}
    if "val_loss" in extra:
        row.setdefault("val_bal", 0.0)
    own = {**row, **more}
    # A step that was not validated has no "val_loss", and a loss function's own is none.
    return own | {name: value for name, value in values.items() if name not in own and not OF_VALIDATION.match(name)}


def loss_by_dataset(row_loss: Any, dataset: Any, names: Sequence[str]) -> dict[str, float]:
    """{"loss/<name>"} of each data set that has rows in a batch: the mean of float32[B] over its rows, int[B]."""
    losses, which = np.asarray(row_loss), np.asarray(dataset)
    return {f"loss/{names[i]}": float(losses[which == i].mean()) for i in np.unique(which).tolist()}
