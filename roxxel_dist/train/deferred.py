"""Metrics wait on the devices until the next step is dispatched; then they are fetched, checked and logged."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from roxxel_dist.input.verify_ahead import Verification
from roxxel_dist.train.metrics import MetricsLogger
from roxxel_dist.train.position import Position
from roxxel_dist.train.step.bad_steps import BadStepMonitor
from roxxel_dist.train.step.step import Metrics, fetch


class DeferredMetrics:
    """The metrics of the last step that was due, until they are fetched.

    Args:
        position: of the run; gets the running digest of the fetched metrics.
        verification: of the tokens that a step has read: waited for before its row.
        monitor: raises BadStep.
        saved_steps: gives the steps of the checkpoints, which are named where a step was bad.
        logger: of rows.

    Attributes:
        fetches: how often numbers were fetched from the devices.
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
