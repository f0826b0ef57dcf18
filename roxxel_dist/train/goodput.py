"""What share of a run's time went to training, from its timeline. No jax."""

from collections.abc import Mapping, Sequence
from typing import Any

from roxxel_dist.train.timeline import FINISHED

KINDS = {"start": "starting", "compile": "compiling", "restore": "restoring", "eval": "evaluating", "save": "saving"}
"""What an activity of the timeline is called; steps are "training" or "repeated"."""
SPENT = ("training", "repeated", "starting", "compiling", "restoring", "evaluating", "saving", "down")
"""What time is spent on, in the order in which it is told."""


def time_spent(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by kind, every one of `SPENT`; empty where there are no rows.

    - "repeated": steps that had been done before, by a process that was killed or before the run went back.
    - "down": from the last row of an attempt to the first of the next, if the run was not finished then. The steps that
      a killed process did not live to log are in it.

    Args:
        rows: of `timeline.jsonl`, in order.
    """
    if not rows:
        return {}
    spent: dict[str, float] = dict.fromkeys(SPENT, 0.0)
    highest = 0
    before: Mapping[str, Any] | None = None
    for row in rows:
        seconds = row["seconds"]
        if before is not None and before["attempt"] != row["attempt"] and before["activity"] != FINISHED:
            spent["down"] += max(0.0, row["begin"] - before["begin"] - before["seconds"])
        if row["activity"] == "step":
            first, last = row["steps"]
            again = seconds * max(0, min(last, highest) - first + 1) / (last - first + 1)
            spent["repeated"] += again
            spent["training"] += seconds - again
            highest = max(highest, last)
        elif kind := KINDS.get(row["activity"]):
            spent[kind] += seconds
        before = row
    return spent
