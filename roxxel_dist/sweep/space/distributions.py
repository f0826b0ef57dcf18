"""W&B's distributions of one parameter, each as its inverse CDF: from u in [0, 1] to a value.

Every engine searches the unit cube and turns its points into values here, so that all of them cover every distribution,
and mean the same by it as W&B does. (Source: W&B's sweep configuration reference.)
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

Numbers = Mapping[str, float]


@lru_cache(maxsize=256)
def _ends(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Where each choice ends in u."""
    return tuple(accumulate(weights))


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One parameter of a search space."""

    name: str
    """W&B's name of the distribution."""
    quantile: Callable[[float], Any]
    """From u in [0, 1] to a value; never decreasing, where values can be compared."""
    choices: Sequence[Any] | None = None
    """All values, where there are finitely many, in the order of u; numeric ones are sorted."""
    weights: tuple[float, ...] | None = None
    """How likely each choice is; None: all alike."""
    grid_order: Sequence[int] | None = None
    """The numbers of the choices in the order of the file, which is the order of a grid; None: as they are."""
    quantized: tuple[int, Callable[[int], float]] | None = None
    """Where rounding leaves finitely many values: how many, and the u of each, counted from 0 in the order of u."""

    @property
    def count(self) -> int | None:
        """How many values there are; None: endless."""
        return len(self.choices) if self.choices is not None else self.quantized[0] if self.quantized else None

    def grid_point(self, number: int) -> float:
        """The u of a value, counted from 0 in the order of a grid."""
        if self.choices is None and self.quantized:
            return self.quantized[1](number)
        return self.to_unit(number if self.grid_order is None else self.grid_order[number])

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to search."""
        return self.choices is not None and len(self.choices) == 1

    @property
    def is_ordered(self) -> bool:
        """Whether neighbours in u are neighbours in value."""
        return self.choices is None or isinstance(self.choices, range) or all(map(_is_number, self.choices))

    def index_at(self, u: float) -> int:
        """Which choice is at u in [0, 1], counted from 0."""
        count = len(self.choices or ())
        return min(bisect_right(_ends(self.weights), u) if self.weights else int(u * count), count - 1)

    def to_unit(self, number: int) -> float:
        """The u in the middle of a choice: the one that stands for it."""
        if self.weights is None:
            return (number + 0.5) / len(self.choices or ())
        return _ends(self.weights)[number] - self.weights[number] / 2


CONTINUOUS: dict[str, tuple[dict[str, float | None], str]] = {
    "uniform": ({"min": None, "max": None}, "min"),
    "log_uniform": ({"min": None, "max": None}, "min"),
    "log_uniform_values": ({"min": None, "max": None}, "positive"),
    "inv_log_uniform": ({"min": None, "max": None}, "min"),
    "inv_log_uniform_values": ({"min": None, "max": None}, "positive"),
    "normal": ({"mu": 0.0, "sigma": 1.0}, "sigma"),
    "log_normal": ({"mu": 0.0, "sigma": 1.0}, "sigma"),
    "beta": ({"a": 1.0, "b": 1.0}, "beta"),
}
"""The numbers that each takes (None: must be given), and the rule that they must keep."""
QUANTIZED = ("uniform", "log_uniform", "log_uniform_values", "normal", "log_normal", "beta")
"""Those that there are with `q_` too: rounded to multiples of q (1)."""
KEYS = {"value", "values", "probabilities", "min", "max", "mu", "sigma", "a", "b", "q", "distribution"}
OTHERS = ("constant", "categorical", "categorical_w_probabilities", "int_uniform")
EXACT = 2**53
"""Integers that a float tells apart."""
NAMES = (*OTHERS, *CONTINUOUS, *(f"q_{name}" for name in QUANTIZED))


def distribution(spec: Mapping[str, Any]) -> Distribution:
    """The distribution of a parameter as W&B's YAML has it, such as `{min: 0.1, max: 1.0}`.

    Without `distribution` the keys decide: `value`, `values` (with `probabilities`), or `min` and `max`, which mean
    `int_uniform` where both are integers and `uniform` otherwise.

    Raises:
        ValueError: what cannot be; names the key, the value and the rule.
    """
    stray = sorted(set(spec) - KEYS)
    if stray:
        raise ValueError(f"there is no key {stray[0]!r}: there are {', '.join(sorted(KEYS))}")
    name = spec.get("distribution") or _implied(spec)
    if name not in NAMES:
        raise ValueError(f"distribution: {name!r} is none: there are {', '.join(NAMES)}")
    given = {key: value for key, value in spec.items() if key != "distribution"}
    if name == "constant":
        _only(name, given, {"value": None})
        return Distribution(name=name, quantile=lambda u: given["value"], choices=(given["value"],))
    if name in ("categorical", "categorical_w_probabilities"):
        return _categorical(name, given)
    if name == "int_uniform":
        return _integers(given)
    return _continuous(name, given)


def _implied(spec: Mapping[str, Any]) -> str:
    if "value" in spec:
        return "constant"
    if "values" in spec:
        return "categorical_w_probabilities" if "probabilities" in spec else "categorical"
    if "min" in spec and "max" in spec:
        return "int_uniform" if all(type(spec[key]) is int for key in ("min", "max")) else "uniform"
    raise ValueError("say what it may be: `value`, `values`, `min` and `max`, or a `distribution`")


def _only(name: str, given: Mapping[str, Any], allowed: Mapping[str, float | None]) -> None:
    """Raises ValueError for a key that the distribution does not have, or one that it lacks."""
    for key in given:
        if key not in allowed:
            raise ValueError(f"{key}: {name} has no such key; it takes {', '.join(allowed)}")
    for key, default in allowed.items():
        if default is None and key not in given:
            raise ValueError(f"{name} needs {key}")


def _categorical(name: str, given: Mapping[str, Any]) -> Distribution:
    weighted = name == "categorical_w_probabilities"
    _only(name, given, {"values": None, **({"probabilities": None} if weighted else {})})
    values = given["values"]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"values: {values!r} must be a list with at least one value")
    weights = _weights(given["probabilities"], len(values)) if weighted else [1.0] * len(values)
    order = [number for number, weight in enumerate(weights) if weight > 0]
    if all(map(_is_number, values)):
        order.sort(key=lambda number: values[number])
    choices, chances = tuple(values[number] for number in order), tuple(weights[number] for number in order)
    place = {number: rank for rank, number in enumerate(order)}
    found = Distribution(
        name=name,
        quantile=lambda u: choices[found.index_at(u)],
        choices=choices,
        weights=chances if weighted else None,
        grid_order=tuple(place[number] for number in sorted(order)),
    )
    return found


def _weights(told: Any, count: int) -> list[float]:
    if not isinstance(told, Sequence) or len(told) != count:
        raise ValueError(f"probabilities: {told!r} must be a list of {count} numbers, one a value")
    if not all(_is_number(one) and one >= 0 for one in told) or not math.isclose(sum(told), 1, abs_tol=1e-6):
        raise ValueError(f"probabilities: {told!r} must be 0 or more each, and 1 together")
    return [float(one) for one in told]


def _integers(given: Mapping[str, Any]) -> Distribution:
    _only("int_uniform", given, {"min": None, "max": None})
    least, most = given["min"], given["max"]
    if type(least) is not int or type(most) is not int:
        raise ValueError(f"int_uniform: min {least!r} and max {most!r} must be integers")
    if least > most:
        raise ValueError(f"min {least} is larger than max {most}")
    if most - least >= EXACT:  # u has not so many values, and len() of a range has its limit too
        count = most - least + 1
        return Distribution(name="int_uniform", quantile=lambda u: min(least + int(u * count), most))
    choices = range(least, most + 1)
    return Distribution(
        name="int_uniform", quantile=lambda u: least + min(int(u * len(choices)), len(choices) - 1), choices=choices
    )


def _continuous(name: str, given: Mapping[str, Any]) -> Distribution:
    base = name.removeprefix("q_")
    defaults, rule = CONTINUOUS[base]
    allowed = {**defaults, **({"q": 1.0} if name != base else {})}
    _only(name, given, allowed)
    for key, value in given.items():
        if not _is_number(value) or not math.isfinite(value):
            raise ValueError(f"{key}: {value!r} must be a number" + _hint(value))
    numbers = {key: float(given.get(key, default)) for key, default in allowed.items()}
    _keep(rule, numbers)
    shape = FORMS[base]
    if name == base:
        return Distribution(name=name, quantile=lambda u: shape(u, numbers))
    step = given.get("q", 1)
    if step <= 0:
        raise ValueError(f"q: {step} must be more than 0")
    whole = type(step) is int

    def rounded(u: float) -> float | int:
        value = round(shape(u, numbers) / step) * step
        return int(value) if whole else value

    return Distribution(
        name=name, quantile=rounded, quantized=_steps(base, numbers, step) if "min" in numbers else None
    )


def _steps(base: str, numbers: Numbers, step: float) -> tuple[int, Callable[[int], float]] | None:
    """How many multiples of step a distribution between two bounds has, and where in u each of them is."""
    try:
        ends = [FORMS[base](u, numbers) for u in (0.0, 1.0)]
    except OverflowError:
        return None
    first, last = (round(end / step) for end in ends)
    width = ends[1] - ends[0] if base == "uniform" else math.log(ends[1] / ends[0]) if ends[0] else 0.0

    def place(number: int) -> float:
        value = min(max((first + number) * step, ends[0]), ends[1])
        return (value - ends[0] if base == "uniform" else math.log(value / ends[0])) / width if width else 0.0

    return (last - first + 1, place) if width or first == last else None


def _hint(value: Any) -> str:
    """YAML 1.1 takes 1e-4 for text."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return f": YAML reads {value} as text, write it with a point (1.0e-4)"
    return ""


def _keep(rule: str, numbers: Numbers) -> None:
    if rule in ("min", "positive") and numbers["min"] > numbers["max"]:
        raise ValueError(f"min {numbers['min']:g} is larger than max {numbers['max']:g}")
    if rule == "positive" and numbers["min"] <= 0:
        raise ValueError(f"min: {numbers['min']:g} must be more than 0, for its logarithm is used")
    if rule == "sigma" and numbers["sigma"] < 0:
        raise ValueError(f"sigma: {numbers['sigma']:g} must be 0 or more")
    if rule == "beta" and min(numbers["a"], numbers["b"]) <= 0:
        raise ValueError(f"a {numbers['a']:g} and b {numbers['b']:g} must be more than 0")


def _uniform(u: float, n: Numbers) -> float:
    return n["min"] + u * (n["max"] - n["min"])


def _log_uniform_values(u: float, n: Numbers) -> float:
    if u in (0.0, 1.0):
        return n["max"] if u else n["min"]  # exactly
    low, high = math.log(n["min"]), math.log(n["max"])
    return math.exp(low + u * (high - low))


def _inside(u: float) -> float:
    """The tails of a normal distribution are endless: its ends are left out."""
    return min(max(u, 1e-9), 1 - 1e-9)


def _normal(u: float, n: Numbers) -> float:
    from scipy.special import ndtri

    return n["mu"] + n["sigma"] * float(ndtri(_inside(u)))


def _beta(u: float, n: Numbers) -> float:
    from scipy.special import betaincinv

    return float(betaincinv(n["a"], n["b"], u))


FORMS: dict[str, Callable[[float, Numbers], float]] = {
    "uniform": _uniform,
    "log_uniform": lambda u, n: math.exp(_uniform(u, n)),
    "log_uniform_values": _log_uniform_values,
    # X with log(1/X) uniform: between min and max, or between the values' own.
    "inv_log_uniform": lambda u, n: math.exp(-_uniform(1 - u, n)),
    "inv_log_uniform_values": _log_uniform_values,
    "normal": _normal,
    "log_normal": lambda u, n: math.exp(_normal(u, n)),
    "beta": _beta,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
