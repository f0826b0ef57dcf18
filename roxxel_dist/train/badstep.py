"""What is done and said when a step went wrong."""

from collections.abc import Callable
from typing import Any

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.train.health import Health

NAMED_ROWS = 3
MOST_SKIPPED = 20
"""Bad steps in a row that are skipped before the run ends: nothing is learned any more."""


class BadStep(FloatingPointError):
    """A step whose loss or gradient is no number, or whose loss is far above the ones before.

    Attributes:
        step: counted from 1.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


class Watch:
    """Looks at the health that comes with each logged step.

    Args:
        say: where lines for people go.
        skip: whether bad steps were left out.
    """

    def __init__(self, say: Callable[[str], None], *, skip: bool) -> None:
        self._say, self._skip, self._skipped = say, skip, 0

    def check(self, health: Any, plan: Plan, last_good: Callable[[], int | None]) -> None:
        """Take in the (fetched) health after a step.

        Raises:
            BadStep: a step went wrong and was not skipped, or too many were.
        """
        new, self._skipped = health.skipped - self._skipped, health.skipped
        ends = health.bad_step and (not self._skip or health.in_a_row >= MOST_SKIPPED)
        if not (ends or new):  # a skipped step stays noted: `last_good` would wait for the save under way at each row
            return
        bad = BadStep(health.bad_step, describe(health, plan, last_good()))
        if ends:
            raise bad
        self._say(f"{new} step(s) were left out. {bad}")


def describe(health: Health, plan: Plan, last_good: int | None) -> str:
    """The bad step that the (fetched) health of a run names, its rows, and the way back."""
    step: Any = health.bad_step
    return (
        f"step {step} went wrong: its loss is {health.bad_loss:g}, its gradient norm {health.bad_norm:g}, "
        f"the mean loss before {health.mean:g}. {_rows(plan, step)}. "
        f"The last good checkpoint is of step {last_good or 'none'}: go on from it with a smaller lr, "
        f"or let on_bad_step skip or rewind deal with such steps; if the data may be damaged, "
        f"`roxxel-dist data verify` looks at every token"
    )


def _rows(plan: Plan, step: int) -> str:
    rows = plan.rows(step - 1)
    named = [
        f"{plan.datasets[which]} token {offset:,}"
        for which, offset in zip(rows.dataset.tolist()[:NAMED_ROWS], rows.offset.tolist(), strict=False)
    ]
    more = len(rows.offset) - len(named)
    return f"Its rows begin at {', '.join(named)}" + (f" and {more} more" if more > 0 else "")
