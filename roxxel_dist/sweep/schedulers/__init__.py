"""Which trials get the next steps: W&B's hyperband stops trials; asha pauses them and lets them go on."""

from roxxel_dist.sweep.schedulers.base import Scheduler
from roxxel_dist.sweep.space.sweep_file import Sweep

__all__ = ["PAUSING", "Scheduler", "make_scheduler"]
PAUSING = ("asha",)
"""Those that pause trials: W&B's server does not know them, and a program must be able to go on."""


def make_scheduler(sweep: Sweep) -> Scheduler | None:
    """The scheduler of a sweep; None where every trial runs to its end. Raises ValueError for a rule that cannot be."""
    rule = sweep.early_terminate
    if rule is None:
        return None
    if rule["type"] == "asha":
        from roxxel_dist.sweep.schedulers.asha import Asha

        return Asha(rule, sweep.sign)
    from roxxel_dist.sweep.schedulers.hyperband import Hyperband

    return Hyperband(rule, sweep.sign)
