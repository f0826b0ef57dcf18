"""Which trials get the next steps: W&B's hyperband stops trials; asha and freeze_thaw pause them and let them go on."""

import math

from roxxel_dist.sweep.schedulers.base import Scheduler
from roxxel_dist.sweep.space.sweep_file import Sweep

__all__ = ["PAUSING", "Scheduler", "make_scheduler"]
PAUSING = ("asha", "freeze_thaw")
"""Those that pause trials: W&B's server does not know them, and a program must be able to go on."""


def make_scheduler(sweep: Sweep, seed: int, max_steps: float = math.inf) -> Scheduler | None:
    """The scheduler of a sweep; None where every trial runs to its end. Raises ValueError for a rule that cannot be.

    Args:
        sweep: the sweep.
        seed: of the search.
        max_steps: the budget of steps of all trials together.
    """
    rule = sweep.early_terminate
    if rule is None:
        return None
    if rule["type"] == "asha":
        from roxxel_dist.sweep.schedulers.asha import Asha

        return Asha(rule, sweep.sign)
    if rule["type"] == "freeze_thaw":
        from roxxel_dist.sweep.schedulers.freeze_thaw import FreezeThaw  # numpy

        return FreezeThaw(rule, sweep, seed, max_steps)
    from roxxel_dist.sweep.schedulers.hyperband import Hyperband

    return Hyperband(rule, sweep.sign)
