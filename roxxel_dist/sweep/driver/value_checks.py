"""Values of a sweep that no trial can run with: found one by one before the first trial, with their lines in the file.

A search passes over a configuration that cannot run, so it would leave such a value out without a word.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.settings.config import FIELD_TYPES, SECTIONS, Config, takes_fractions
from roxxel_dist.settings.values import type_name
from roxxel_dist.sweep.driver.sweep_run import SweepRun, field_of
from roxxel_dist.sweep.space.distributions import Distribution
from roxxel_dist.sweep.space.space import Parameter
from roxxel_dist.sweep.space.sweep_file import InfeasibleError

MOST_VALUES = 500
"""Values of one list that are looked at."""
CONFIGURATIONS = 100
"""Configurations that are tried with a value which does not go with the config alone."""
INSIDE = (0.02, 0.5, 0.98)
"""Where in a range values are looked at: its ends need not be drawn."""


def check_values(run: SweepRun) -> None:
    """Raises UserError for a listed value, or a range, with which no trial can run, whatever the other parameters are.

    A value that some values of another parameter exclude is left to the search.
    """
    for parameter in run.sweep.space.parameters:
        name = field_of(parameter)
        if name not in FIELD_TYPES or parameter.path not in {(name,), *((section, name) for section in SECTIONS)}:
            continue
        for place, value in _values(parameter.distribution):
            why = _wrong_type(name, value, parameter.distribution) or _refused(run, parameter, value)
            if why is None:
                continue
            text = f"{parameter.name}: {why}"
            raise (
                UserError(text)
                if run.sweep.locator is None
                else run.sweep.locator.error([*parameter.place, *place], why)
            )


def _values(kind: Distribution) -> Iterator[tuple[list[str | int], Any]]:
    """(the keys that lead to it, the value) of each listed value, or of some places of a range."""
    if kind.choices is None:
        yield from (([], kind.quantile(u)) for u in INSIDE)
    elif isinstance(kind.choices, range):
        yield ["min"], kind.choices[0]
        yield ["max"], kind.choices[-1]
    else:
        order = kind.grid_order or range(len(kind.choices))
        for number, index in list(enumerate(order))[:MOST_VALUES]:
            place: list[str | int] = ["value"] if kind.name == "constant" else ["values", number]
            yield place, kind.choices[index]


def _wrong_type(name: str, value: Any, kind: Distribution) -> str | None:
    """Why a field does not take a value of this type; None where it does."""
    try:
        Config.from_dict({name: value})
    except UserError as error:
        if isinstance(value, float) and kind.choices is None and not takes_fractions(name):
            what = type_name(FIELD_TYPES[name])
            cure = "write min and max without a point" if kind.is_implied else "use int_uniform, or a q_ one with q: 1"
            return f"{kind.name} draws fractions, such as {value:.4g}, and {name} must be {what}: {cure}"
        return str(error)
    return None


def _refused(run: SweepRun, parameter: Parameter, value: Any) -> str | None:
    """Why no trial can run with a value; None where some can, or other parameters are concerned."""
    name = field_of(parameter)
    try:
        Config.from_dict({name: value}).validate()
    except UserError:
        pass
    else:
        return None
    why = None
    for params in _with_value(run, parameter, value):
        try:
            run.trial_config(params)
        except UserError as error:
            why = str(error)
        else:
            return None
    others = run.swept_fields - {name}
    return None if why is None or others & set(re.findall(r"\w+", why)) else why


def _with_value(run: SweepRun, parameter: Parameter, value: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of some trials that have a value."""
    sweep = run.sweep
    for point in sweep.space.sample(CONFIGURATIONS):
        params = sweep.space.point(point)
        inner = params
        for key in parameter.path[:-1]:
            inner = inner[key]
        inner[parameter.path[-1]] = value
        try:
            resolved = sweep.rules.resolve(params)
        except InfeasibleError:
            continue
        if parameter.path[0] in resolved:
            yield resolved
