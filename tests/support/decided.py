"""Whether the decisions of a journal are those that follow from what stands before them."""

from collections.abc import Sequence
from typing import Any

from roxxel_dist.sweep.driver.decisions import Decisions
from roxxel_dist.sweep.samplers import make
from roxxel_dist.sweep.space.sweep_file import Sweep, as_sweep
from roxxel_dist.sweep.study.journal import DECIDING, History


def check_decisions(events: Sequence[dict[str, Any]], given: dict[str, Any] | Sweep, **limits: Any) -> int:
    """Compare each decision with that of a search made anew from the lines before it; returns how many there were."""
    sweep, history, count = as_sweep(given), History(), 0
    due: list[dict[str, Any]] = []

    def decisions() -> Decisions:
        return Decisions(sweep, history, lambda: make(sweep, seed=1), **limits)

    for event in events:
        kind = event["event"]
        told = {name: value for name, value in event.items() if name not in ("time", "awake", "seconds", "more")}
        if kind in ("pause", "stop"):
            assert told in due, f"{told} was not due"
            due.remove(told)
        elif kind in DECIDING:
            assert not due, f"{due} were not written before {told}"
        if kind in ("ask", "thaw"):
            assert decisions().next() == told
        count += kind in ("ask", "thaw", "pause", "stop")
        history.apply(event)
        if kind == "report":
            due = decisions().decide_pending()
    assert not due
    return count
