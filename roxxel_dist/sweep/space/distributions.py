"""W&B's distributions of one parameter, each as its inverse CDF: from u in [0, 1] to a value.

Every sampler searches the unit cube and its points become values here, so that all of them cover every distribution,
and mean the same by it as W&B does. (Source: W&B's sweep configuration reference.)
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.values import as_text, check_value, excerpt

Numbers = Mapping[str, float]


@lru_cache(maxsize=256)
def _cumulative(weights: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(accumulate(weights))


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One parameter of a search space: it has `choices` or an `inverse_cdf`."""

    name: str
    """W&B's name of the distribution."""
    choices: Sequence[Any] | None = None
    """The values, where there are finitely many, in the order of u; numeric ones are sorted."""
    weights: tuple[float, ...] | None = None
    """The probability of each choice; None: all alike."""
    grid_order: Sequence[int] | None = None
    """The indices of the choices in the order of the file, which is the order of a grid; None: as they are."""
    inverse_cdf: Callable[[float], Any] | None = None
    """The map from u in [0, 1] to a value; never decreasing."""
    quantized: tuple[int, Callable[[int], float]] | None = None
    """The number of values, where rounding leaves finitely many, and the u of each, counted from 0 in the order of
    u."""
    note: str | None = None
    """A line for a person about the values that are drawn."""
    is_implied: bool = False
    """Whether the file names no distribution, and the keys and types of its values decided."""

    def quantile(self, u: float) -> Any:
        """The value at u in [0, 1]; never decreasing, where values can be compared."""
        return self.inverse_cdf(u) if self.inverse_cdf else (self.choices or ())[self.index_at(u)]

    @property
    def count(self) -> int | None:
        """The number of values; None: endless."""
        return len(self.choices) if self.choices is not None else self.quantized[0] if self.quantized else None

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to search."""
        return self.choices is not None and len(self.choices) == 1

    @property
    def is_ordered(self) -> bool:
        """Whether neighbours in u are neighbours in value."""
        return self.choices is None or isinstance(self.choices, range) or all(map(is_number, self.choices))

    def index_at(self, u: float) -> int:
        """The index of the choice at u in [0, 1]."""
        count = len(self.choices or ())
        return min(bisect_right(_cumulative(self.weights), u) if self.weights else int(u * count), count - 1)

    def to_unit(self, index: int) -> float:
        """The u in the middle of a choice: the one that stands for it."""
        if self.weights is None:
            return (index + 0.5) / len(self.choices or ())
        return _cumulative(self.weights)[index] - self.weights[index] / 2

    def grid_point(self, number: int) -> float:
        """The u of a value, counted from 0 in the order of a grid."""
        if self.quantized:
            return self.quantized[1](number)
        return self.to_unit(number if self.grid_order is None else self.grid_order[number])


def _uniform(u: float, n: Numbers) -> float:
    low, high = n["min"], n["max"]
    value = low + u * (high - low) if math.isfinite(high - low) else (1 - u) * low + u * high
    return min(max(value, low), high)


def _log_uniform_values(u: float, n: Numbers) -> float:
    if u in (0.0, 1.0):
        return n["max"] if u else n["min"]  # exactly
    low, high = math.log(n["min"]), math.log(n["max"])
    return min(max(math.exp(low + u * (high - low)), n["min"]), n["max"])


def _normal(u: float, n: Numbers) -> float:
    from scipy.special import ndtri

    return n["mu"] + n["sigma"] * float(ndtri(min(max(u, 1e-9), 1 - 1e-9)))  # its tails are endless


def _beta(u: float, n: Numbers) -> float:
    from scipy.special import betaincinv

    return float(betaincinv(n["a"], n["b"], u))


BOUNDS: dict[str, float | None] = {"min": None, "max": None}
MOMENTS: dict[str, float | None] = {"mu": 0.0, "sigma": 1.0}
CONTINUOUS: dict[str, tuple[dict[str, float | None], Callable[[float, Numbers], float]]] = {
    "uniform": (BOUNDS, _uniform),
    "log_uniform": (BOUNDS, lambda u, n: math.exp(_uniform(u, n))),
    "log_uniform_values": (BOUNDS, _log_uniform_values),
    # X with log(1/X) uniform: between min and max, or between the values' own.
    "inv_log_uniform": (BOUNDS, lambda u, n: math.exp(-_uniform(1 - u, n))),
    "inv_log_uniform_values": (BOUNDS, _log_uniform_values),
    "normal": (MOMENTS, _normal),
    "log_normal": (MOMENTS, lambda u, n: math.exp(_normal(u, n))),
    "beta": ({"a": 1.0, "b": 1.0}, _beta),
}
"""The numbers that each takes (None: must be given), and its inverse CDF."""
EXPONENTIAL = ("log_uniform", "inv_log_uniform", "log_normal")
"""Distributions whose numbers are of the logarithm of a value."""
KEYS = ("a", "b", "distribution", "max", "min", "mu", "probabilities", "q", "sigma", "value", "values")
NAMES = (
    *("constant", "categorical", "categorical_w_probabilities", "int_uniform"),
    *CONTINUOUS,
    *(f"q_{name}" for name in CONTINUOUS if not name.startswith("inv_")),  # rounded to multiples of q (1)
)
EXACT = 2**53
"""Integers that a float tells apart."""
SPREAD = 0x9E3779B97F4A7C15
"""An odd number: its multiples spread the last digits of integers that a float does not tell apart."""
ENDS = (0.0, 1.0)
FAR = 1e20
"""A `log_uniform` up to such a value is a mistake."""


def distribution(spec: Mapping[str, Any]) -> Distribution:
    """The distribution of a parameter as W&B's YAML has it, such as `{min: 0.1, max: 1.0}`.

    Without `distribution` the keys decide: `value`, `values` (with `probabilities`), or `min` and `max`, which mean
    `int_uniform` where both are integers and `uniform` otherwise. Raises ValueError that names key, value and rule.
    """
    stray = sorted(set(spec) - set(KEYS))
    if stray:
        raise UserError(f"there is no key {stray[0]!r}: there are {', '.join(KEYS)}")
    name = spec.get("distribution") or _implied(spec)
    if name not in NAMES:
        raise UserError(f"distribution: {name!r} does not exist: use one of {', '.join(NAMES)}")
    given = {key: value for key, value in spec.items() if key != "distribution"}
    for key in ("value", "values"):
        if key in given and not (key == "values" and isinstance(given[key], str)):
            given[key] = _kept(key, given[key])
    if name == "constant":
        _check_keys(name, given, {"value": None})
        return Distribution(name=name, choices=(given["value"],))
    if name in ("categorical", "categorical_w_probabilities"):
        return _categorical(name, given)
    found = _int_uniform(given) if name == "int_uniform" else _continuous(name, given)
    return replace(found, is_implied="distribution" not in spec)


def _kept(key: str, value: Any) -> Any:
    """A value, or all of a list of values. Raises UserError for the first that would not stay what it is."""
    if key == "values" and isinstance(value, tuple):  # of a dictionary of Python
        value = list(value)
    try:
        return check_value(value)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _implied(spec: Mapping[str, Any]) -> str:
    if "value" in spec:
        return "constant"
    if "values" in spec:
        return "categorical_w_probabilities" if "probabilities" in spec else "categorical"
    if "min" in spec and "max" in spec:
        return "int_uniform" if all(type(spec[key]) is int for key in ("min", "max")) else "uniform"
    raise UserError("no values: give `value`, `values`, `min` and `max`, or a `distribution`")


def _check_keys(name: str, given: Mapping[str, Any], allowed: Mapping[str, float | None]) -> None:
    """Raises ValueError for a key that the distribution does not have, or one that it lacks."""
    for key in given:
        if key not in allowed:
            raise UserError(f"{key}: {name} has no such key; it takes {', '.join(allowed)}")
    for key, default in allowed.items():
        if default is None and key not in given:
            raise UserError(f"{name} needs {key}")


def _categorical(name: str, given: Mapping[str, Any]) -> Distribution:
    is_weighted = name == "categorical_w_probabilities"
    _check_keys(name, given, {"values": None, **({"probabilities": None} if is_weighted else {})})
    values = given["values"]
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"values: {excerpt(values)} must be a list with at least one value")
    weights = given["probabilities"] if is_weighted else [1.0] * len(values)
    if not isinstance(weights, Sequence) or len(weights) != len(values):
        raise UserError(f"probabilities: {weights!r} must be a list of {len(values)} numbers, one for each value")
    valid = all(is_finite(weight) and weight >= 0 for weight in weights)
    if is_weighted and not (valid and math.isclose(sum(weights), 1, abs_tol=1e-6)):
        raise UserError(f"probabilities: {weights!r} must be 0 or more each, and their sum must be 1")
    texts = [as_text(value) for value in values]
    first: dict[str, int] = {}
    """The index of each different value."""
    for number, text in enumerate(texts):
        first.setdefault(text, number)
    if len(first) < len(values):  # a value that is given twice is one configuration, and twice as likely
        shares = dict.fromkeys(first.values(), 0.0)
        for text, weight in zip(texts, weights, strict=True):
            shares[first[text]] += float(weight) / sum(weights)
        values, weights, is_weighted = [values[number] for number in shares], list(shares.values()), len(shares) > 1
    order = [number for number, weight in enumerate(weights) if weight > 0]
    if all(map(is_number, values)):
        order.sort(key=lambda number: values[number])
    return Distribution(
        name=name,
        choices=tuple(values[number] for number in order),
        weights=tuple(float(weights[number]) for number in order) if is_weighted else None,
        grid_order=sorted(range(len(order)), key=order.__getitem__),
    )


def _int_uniform(given: Mapping[str, Any]) -> Distribution:
    _check_keys("int_uniform", given, BOUNDS)
    least, most = given["min"], given["max"]
    if type(least) is not int or type(most) is not int:
        raise UserError(f"int_uniform: min {excerpt(least)} and max {excerpt(most)} must be integers")
    if least > most:
        raise UserError(f"min {excerpt(least)} is larger than max {excerpt(most)}")
    count = most - least + 1
    if count > EXACT:  # u has not so many values, and len() of a range has its limit too

        def inverse_cdf(u: float) -> int:
            # Whole numbers alone: each part of the range that belongs to one u, and one of the numbers in it.
            part = int(u * EXACT)
            begin, end = part * count // EXACT, (part + 1) * count // EXACT
            return min(least + begin + part * SPREAD % (end - begin), most)

        return Distribution(name="int_uniform", inverse_cdf=inverse_cdf)
    return Distribution(name="int_uniform", choices=range(least, most + 1))


def _continuous(name: str, given: Mapping[str, Any]) -> Distribution:
    base = name.removeprefix("q_")
    defaults, inverse_cdf = CONTINUOUS[base]
    allowed = {**defaults, **({"q": 1.0} if name != base else {})}
    _check_keys(name, given, allowed)
    for key, value in given.items():
        if not is_finite(value):
            rule = ", and finite" if is_number(value) else as_number(value)
            raise UserError(f"{key}: {excerpt(value)} must be a number{rule}")
        if float(value) != value:
            raise UserError(
                f"{key}: {excerpt(value)} is no float, {float(value):.17g} is the nearest: write that, or use "
                "int_uniform"
            )
    numbers = {key: float(given.get(key, default)) for key, default in allowed.items()}
    if "min" in numbers and numbers["min"] > numbers["max"]:
        raise UserError(f"min {numbers['min']:g} is larger than max {numbers['max']:g}")
    if base.endswith("_values") and numbers["min"] <= 0:
        raise UserError(f"min: {numbers['min']:g} must be more than 0, for its logarithm is used")
    if numbers.get("sigma", 0.0) < 0:
        raise UserError(f"sigma: {numbers['sigma']:g} must be 0 or more")
    if min(numbers.get("a", 1.0), numbers.get("b", 1.0)) <= 0:
        raise UserError(f"a {numbers['a']:g} and b {numbers['b']:g} must be more than 0")
    low, high = _ends(name, base, numbers)
    if name == base:
        note = None
        if base == "log_uniform" and (1 < low <= high < math.e or high > FAR):
            bounds = f"{numbers['min']:.4g} to {numbers['max']:.4g}"
            note = (
                f"log_uniform takes exponents, so its values are {low:.4g} to {high:.4g}; for values of {bounds}, use "
                f"log_uniform_values"
            )
        return Distribution(name=name, inverse_cdf=lambda u: inverse_cdf(u, numbers), note=note)
    step = given.get("q", 1)
    if step <= 0:
        raise UserError(f"q: {step} must be more than 0")
    largest = max(-low, high)
    if largest / step > sys.float_info.max or round(largest / step) > sys.float_info.max / step:
        raise UserError(f"q: the multiples of {step:g} up to {largest:g} are no floats: use another q, or other bounds")

    def rounded(u: float) -> float | int:
        number = round(inverse_cdf(u, numbers) / step)
        # As people write it: the third multiple of 0.1 is 0.3, and not 0.30000000000000004.
        return number * step if isinstance(step, int) else float(number * Fraction(repr(float(step))))

    ends = [rounded(u) for u in ENDS]
    outside = [f"{end:g}" for end, beyond in zip(ends, (ends[0] < low, ends[1] > high), strict=True) if beyond]
    note = None
    if "min" in numbers and outside:
        note = (
            f"{name} rounds to multiples of {step:g}, as W&B does, so {' and '.join(dict.fromkeys(outside))} can be "
            f"drawn, outside of {low:g} to {high:g}"
        )
    return Distribution(name=name, inverse_cdf=rounded, quantized=_quantized(base, numbers, step), note=note)


def _ends(name: str, base: str, numbers: Numbers) -> tuple[float, float]:
    """The least and the largest value that can be drawn. Raises UserError where one of them is no float."""
    try:
        ends = [CONTINUOUS[base][1](u, numbers) for u in ENDS]
    except OverflowError:
        ends = [math.inf]
    is_exponential = base in EXPONENTIAL
    if all(map(math.isfinite, ends)) and not (is_exponential and ends[0] == 0):
        return ends[0], ends[1]
    given = " and ".join(f"{key} {value:g}" for key, value in numbers.items() if key != "q")
    if base == "log_normal":
        raise UserError(
            f"{name}: {given} are of the logarithm, and e^({numbers['mu']:g} ± 6 x {numbers['sigma']:g}) is no float: "
            f"use smaller ones, such as mu: log of a usual value, sigma: 1"
        )
    if is_exponential:
        raise UserError(
            f"{name}: {given} are exponents of e, and e^{max(numbers.values(), key=abs):g} is no float: for values use "
            f"{name}_values"
        )
    raise UserError(f"{name}: with {given} values can be drawn that are no floats: use smaller numbers")


def _quantized(base: str, numbers: Numbers, step: float) -> tuple[int, Callable[[int], float]] | None:
    """The number of multiples of step that a distribution between two bounds has, and the u of each; None: without
    bounds."""
    if "min" not in numbers:
        return None
    low, high = (CONTINUOUS[base][1](u, numbers) for u in ENDS)
    first, last = round(low / step), round(high / step)
    # A uniform range may be wider than a float can say, but half of it is not; and so may high / low, but no logarithm.
    scale = (lambda value: value / 2) if base == "uniform" else math.log
    if first != last and not (low < high and (low or base == "uniform")):
        return None

    def unit(number: int) -> float:
        value = min(max((first + number) * step, low), high)
        return (scale(value) - scale(low)) / (scale(high) - scale(low)) if first != last else 0.0

    return last - first + 1, unit


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float can be."""
    return is_number(value) and abs(value) <= sys.float_info.max


def as_number(value: Any) -> str:
    """The form of a text that is a number, such as '1e-4', without quotes; empty for anything else."""
    try:
        return f": write {float(value)!r}, without quotes" if isinstance(value, str) else ""
    except ValueError:
        return ""
