"""How the values of a parameter lie on an axis of a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roxxel_dist.sweep.distributions import Distribution
from roxxel_dist.sweep.study import flat, short

MANY = 12
"""Values beyond which numbers are an axis of numbers, and no longer names beside each other."""
SPREAD = 30.0
"""Times that the largest is the smallest where a logarithm shows more."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The axis of one parameter, or of the metric."""

    name: str
    names: tuple[str, ...] | None
    """Values in a row beside each other; None for an axis of numbers."""
    is_log: bool

    def place(self, value: Any) -> float | None:
        """Where a value lies: its number among names, or itself. None for one that was left out."""
        if self.names is None:
            return float(value) if _is_number(value) else None
        return float(self.names.index(short(value))) if short(value) in self.names else None


def axis(name: str, values: Sequence[Any], distribution: Distribution | None = None) -> Axis:
    """The axis on which these values lie; of a parameter with endless values one of numbers, however few were tried."""
    known = [value for value in values if value is not None]
    distinct = {short(value): value for value in known}
    numeric = bool(known) and all(map(_is_number, known))
    endless = distribution is not None and distribution.choices is None
    if numeric and (endless or len(distinct) > MANY):
        least, most = min(known), max(known)
        is_log = distribution is not None and "log" in distribution.name
        return Axis(name=name, names=None, is_log=least > 0 and (is_log or most / least >= SPREAD))
    ordered = sorted(distinct, key=distinct.__getitem__) if numeric else sorted(distinct)
    return Axis(name=name, names=tuple(ordered), is_log=False)


def column(params: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """The value of a parameter in each of many trials; None where a trial has none."""
    return [flat(one).get(name) for one in params]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
