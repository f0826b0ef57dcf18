"""`mixtures`, `phase_ends` and `versus` in the second file of a sweep: checked, as far as no data is needed."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.values import with_numbers
from roxxel_dist.sweep.space.distributions import distribution, is_number
from roxxel_dist.sweep.space.space import Parameter

if TYPE_CHECKING:
    from roxxel_dist.sweep.space.mixture import MixtureSpace

SHARE, END = "mixture.", "phase_end."
"""The beginnings of the names of shares and of ends of phases among the parameters of a trial."""
MIXTURE_KEYS = ("phases", "datasets", "max_passes", "step")
SHARE_KEYS = ("min", "max")
ROUNDING = 1e-9
MOST_ENDS = 10_000
Refuse = Callable[[Sequence[str], str], ValueError]
"""A function that makes an error about a key of the file, by its path and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """One entry of `mixtures`."""

    phases: tuple[int, ...]
    bounds: Mapping[str, tuple[float, float]]
    """Floor and cap of each data set."""
    max_passes: float | None = None
    """The most passes over each data set."""
    step: float | None = None

    def space(
        self, caps: Mapping[str, float] | None = None, tokens: Mapping[str, float] | None = None
    ) -> "MixtureSpace":
        """The space of the mixture, with lower caps and with natural shares where they are known. Raises ValueError
        where nothing is left to search."""
        from roxxel_dist.sweep.space.mixture import mixture_space  # numpy: not for --help

        floors, own = zip(*self.bounds.values(), strict=True)
        return mixture_space(
            self.phases,
            tuple(self.bounds),
            floors,
            [min(cap, (caps or {}).get(name, 1.0)) for name, cap in zip(self.bounds, own, strict=True)],
            None if tokens is None else [tokens[name] for name in self.bounds],
            self.step,
        )


@dataclass(frozen=True, kw_only=True)
class DataExtras:
    """The parts of the data that are searched."""

    mixtures: tuple[MixtureSpec, ...] = ()
    ends: Mapping[int, Parameter] = field(default_factory=dict)
    """The end of each phase that is searched, as a share of all steps; phases are counted from 1."""

    def __bool__(self) -> bool:
        """Whether any part is."""
        return bool(self.mixtures or self.ends)

    @property
    def key(self) -> str:
        """The key of the second file that asks for it, for messages."""
        return "mixtures" if self.mixtures else "phase_ends"

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The phases of each mixture, by the first of them."""
        return {spec.phases[0]: spec.phases for spec in self.mixtures}


def data_extras(content: Mapping[str, Any], parameters: Any, refuse: Refuse) -> DataExtras:
    """`mixtures` and `phase_ends` of the second file, `content`. `parameters` are those of the first file, whose names
    are taken; `refuse` makes the error. Raises ValueError that names key, value and rule."""
    entries = content.get("mixtures")
    if entries is not None and (not isinstance(entries, list) or not entries):
        form = "a list such as [{phases: [1], datasets: {self: {min: 0.2}, code: {}}}]"
        raise refuse(["mixtures"], f"{entries!r} must be {form}")
    specs = [_mixture(entry, ["mixtures", str(number)], refuse) for number, entry in enumerate(entries or (), 1)]
    seen: dict[int, int] = {}
    for number, spec in enumerate(specs, 1):
        for phase in spec.phases:
            if phase in seen:
                twice = "twice here" if seen[phase] == number else f"in entry {seen[phase]} too"
                raise refuse(["mixtures", str(number), "phases"], f"phase {phase} is {twice}: name each phase once")
            seen[phase] = number
    ends = _phase_ends(content.get("phase_ends"), refuse)
    for name in parameters if isinstance(parameters, Mapping) else ():
        taken = str(name).split(".")[0]
        if taken in ("mixture", "phase_end") and (specs if taken == "mixture" else ends):
            key = "mixtures" if taken == "mixture" else "phase_ends"
            raise refuse([key], f"the parameter {name!r} has the name of what {key} searches: give it in one place")
    return DataExtras(mixtures=tuple(specs), ends=ends)


def _mixture(entry: Any, path: list[str], refuse: Refuse) -> MixtureSpec:
    if not isinstance(entry, Mapping):
        raise refuse(path, f"{entry!r} must be a mapping with phases and datasets")
    for key in entry:
        if key not in MIXTURE_KEYS:
            raise refuse([*path, str(key)], f"there is no such key: there are {', '.join(MIXTURE_KEYS)}")
    phases = entry.get("phases")
    if not isinstance(phases, list) or not phases or any(type(phase) is not int or phase < 1 for phase in phases):
        raise refuse([*path, "phases"], f"{phases!r} must be a list of phases, counted from 1, such as [1, 2]")
    datasets = entry.get("datasets")
    if not isinstance(datasets, Mapping) or len(datasets) < 2:
        raise refuse(
            [*path, "datasets"],
            f"{datasets!r} must name two data sets or more, such as {{self: {{min: 0.2}}, code: {{}}}}",
        )
    bounds = {
        str(name): _bounds(given, [*path, "datasets", str(name)], refuse)
        for name, given in with_numbers(datasets).items()
    }
    numbers = with_numbers({key: entry.get(key) for key in ("max_passes", "step")})
    most, step = numbers["max_passes"], numbers["step"]
    if most is not None and not (is_number(most) and 0 < most <= sys.float_info.max):
        raise refuse([*path, "max_passes"], f"{most!r} must be a number above 0")
    if step is not None and not is_number(step):
        raise refuse([*path, "step"], f"{step!r} must be a number, such as 0.1")
    lows, highs = zip(*bounds.values(), strict=True)
    for which, side, rule, sign in (("min", lows, "at most", 1), ("max", highs, "at least", -1)):
        if sign * ((total := math.fsum(side)) - 1) > ROUNDING:
            terms = " + ".join(f"{share:g} ({name})" for name, share in zip(bounds, side, strict=True))
            raise refuse([*path, "datasets"], f"the {which} sum to {total:g}, and must sum to {rule} 1: {terms}")
    spec = MixtureSpec(phases=tuple(phases), bounds=bounds, max_passes=most, step=step)
    if len(set(phases)) == len(phases):
        try:
            spec.space()
        except UserError as error:
            raise refuse([*path, "datasets"], str(error)) from None
    return spec


def _bounds(given: Any, path: list[str], refuse: Refuse) -> tuple[float, float]:
    from roxxel_dist.curriculum.phases import LEAST_SHARE  # numpy: not for --help

    if not isinstance(given, Mapping | None):
        raise refuse(path, f"{given!r} must be a mapping such as {{min: 0.1, max: 0.5}}, or {{}}")
    given = given or {}
    for key in given:
        if key not in SHARE_KEYS:
            raise refuse([*path, str(key)], f"there is no such key: there are {', '.join(SHARE_KEYS)}")
    low, high = given.get("min", 0.0), given.get("max", 1.0)
    for key, share in (("min", low), ("max", high)):
        if not is_number(share) or not 0 <= share <= 1:  # nor NaN
            raise refuse([*path, key], f"{share!r} must be a share from 0 to 1")
        if 0 < share < LEAST_SHARE:
            raise refuse([*path, key], f"{share!r} must be 0, or at least {LEAST_SHARE:g}, as every share of a phase")
    if low > high:
        raise refuse(path, f"min {low:g} is above max {high:g}")
    return float(low), float(high)


def _phase_ends(given: Any, refuse: Refuse) -> dict[int, Parameter]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not given:
        raise refuse(["phase_ends"], f"{given!r} must be a mapping such as {{1: [0.5, 0.9]}}")
    ends: dict[int, Parameter] = {}
    spans: dict[int, tuple[float, float]] = {}
    for phase, span in given.items():
        path = ["phase_ends", str(phase)]
        if type(phase) is not int or phase < 1:
            raise refuse(path, f"{phase!r} must be the number of a phase, counted from 1")
        numbers = [with_numbers({"n": n})["n"] for n in span] if isinstance(span, list) else []
        if len(numbers) not in (2, 3) or not all(is_number(n) and 0 < n < 1 for n in numbers):
            form = "must be two shares of all steps, between 0 and 1, such as [0.5, 0.9]; a third is the step between"
            raise refuse(path, f"{span!r} {form} values")
        low, high, *step = numbers
        if not low < high:
            raise refuse(path, f"{span!r}: the first number must be below the second")
        if step and not step[0] < high - low + ROUNDING:
            raise refuse(path, f"{span!r}: the third number must be at most {high - low:g}, the width")
        count = int((high - low) / step[0] + ROUNDING) + 1 if step else 0
        if count > MOST_ENDS:
            raise refuse(path, f"{span!r}: so small a step gives {count:,} values, and {MOST_ENDS:,} are the maximum")
        kind = {"values": [round(low + turn * step[0], 9) for turn in range(count)]} if step else None
        kind = kind or {"distribution": "uniform", "min": float(low), "max": float(high)}
        ends[phase], spans[phase] = Parameter(path=(f"{END}{phase}",), distribution=distribution(kind)), (low, high)
    ends = dict(sorted(ends.items()))
    for before, after in pairwise(ends):
        if spans[before][0] >= spans[after][1]:
            raise refuse(
                ["phase_ends", str(after)],
                f"{list(spans[after])} is never above {list(spans[before])}, the end of phase {before}: ends must "
                f"increase from phase to phase",
            )
    return ends


SIDE, SEED = "side", "seed"
"""The parameters of such a study: the side is no field of a Config. Sorted, the two trials of a seed are neighbours."""
SIDES = ("A", "B")
SEEDS = 10_000
"""The number of seeds that can be asked for."""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The key `versus` of the second file of a study."""

    changes: Mapping[str, Any]
    """The fields of side B that differ from the config of the study, which is side A."""
    names: Mapping[str, str]
    """The names that people call each side by."""
    level: float = 0.9
    smallest: float | None = None
    """A difference that matters: an interval within plus and minus this one says that there is none."""

    def __post_init__(self) -> None:
        """Raises UserError for a number that is none."""
        if not 0.5 <= self.level < 1:
            raise UserError(f"--level {self.level:g}: must be at least 0.5 and below 1, such as 0.9")
        if self.smallest is not None and not 0 < self.smallest < float("inf"):
            raise UserError(f"--smallest {self.smallest:g}: must be more than 0, in units of the metric")

    def fields(self, side: str) -> Mapping[str, Any]:
        """The changes of a side to the config of the study."""
        return self.changes if side == SIDES[1] else {}

    @classmethod
    def parameters(cls, seed: int) -> dict[str, Any]:
        """The parameters of the sweep that trains the pairs, from a seed on."""
        return {SEED: {"min": seed, "max": seed + SEEDS - 1}, SIDE: {"values": [*SIDES]}}
