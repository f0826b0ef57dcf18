"""A sweep as its file has it: what is searched, how, and for what. W&B's YAML is read as it is.

What W&B's schema does not have may stand in a second file of its own (`extras`): values that follow from others, rules
that a trial must keep, and parameters that matter only under a condition.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roxxel_dist.sweep.distributions import Distribution, distribution
from roxxel_dist.sweep.expressions import Expression

METHODS = ("bayes", "random", "grid")
GOALS = ("minimize", "maximize")
KEYS = (
    "apiVersion", "command", "controller", "description", "early_terminate", "entity", "kind", "method", "metric",
    "name", "parameters", "program", "project", "run_cap",
)  # fmt: skip
EXTRAS = ("constraints", "derived", "resources", "when")
HYPERBAND = ("type", "min_iter", "max_iter", "s", "eta", "strict")
Params = dict[str, Any]


class InfeasibleError(ValueError):
    """These parameters break a rule of the sweep: no trial is made of them. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, and where it stands in the file (several names where parameters are nested)."""

    path: tuple[str, ...]
    distribution: Distribution

    @property
    def name(self) -> str:
        """Its names with points between."""
        return ".".join(self.path)


@dataclass(frozen=True, kw_only=True)
class Space:
    """All parameters, in the order of the file."""

    parameters: tuple[Parameter, ...]

    @property
    def free(self) -> tuple[Parameter, ...]:
        """Those that there is something to search about: one dimension each."""
        return tuple(one for one in self.parameters if not one.distribution.is_constant)

    @property
    def size(self) -> int | None:
        """How many different points there are; None where they are endless."""
        counts = [one.distribution.count for one in self.free]
        return math.prod(count for count in counts if count is not None) if None not in counts else None

    def point(self, u: Sequence[float]) -> Params:
        """The parameters at a point of the unit cube, one number a free parameter; nested as in the file."""
        values = iter(u)
        pairs = [
            (one.path, one.distribution.quantile(0.0 if one.distribution.is_constant else next(values)))
            for one in self.parameters
        ]
        return nested(pairs)

    def grid(self) -> Iterator[list[float]]:
        """Every point, in the order of W&B: names sorted, values as listed, the last name changing fastest.

        Raises:
            ValueError: they are endless; names a parameter that is.
        """
        endless = [one.name for one in self.free if one.distribution.count is None]
        if endless:
            raise ValueError(
                f"parameters.{endless[0]}: a grid needs values that can be counted: give `values`, `min` and `max` "
                f"that are integers, or a `q_` distribution with bounds, or use another method"
            )
        dims = sorted(range(len(self.free)), key=lambda dim: self.free[dim].path, reverse=True)
        for position in range(self.size or 0):
            point, rest = [0.0] * len(dims), position
            for dim in dims:
                kind = self.free[dim].distribution
                rest, turn = divmod(rest, kind.count or 1)
                point[dim] = kind.turn(turn)
            yield point


def nested(pairs: Any) -> Params:
    """Paths and values as dictionaries within dictionaries."""
    found: Params = {}
    for path, value in pairs:
        place = found
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return found


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the second file adds."""

    derived: Mapping[str, Expression] = field(default_factory=dict)
    constraints: tuple[Expression, ...] = ()
    when: Mapping[str, Expression] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of each trial, as Ray counts them: CPU, GPU, and custom ones."""

    def complete(self, params: Mapping[str, Any]) -> Params:
        """The parameters of a trial: those whose condition does not hold are left out, derived ones are added.

        Raises:
            InfeasibleError: a constraint does not hold.
            ValueError: a formula cannot be worked out.
        """
        found = {name: value for name, value in params.items() if name not in self.when or self.when[name](params)}
        for name, formula in self.derived.items():
            found[name] = formula({**params, **found})
        for rule in self.constraints:
            if not rule({**params, **found}):
                told = ", ".join(f"{name} {({**params, **found})[name]!r}" for name in sorted(rule.names))
                raise InfeasibleError(f"the constraint {rule.text!r} does not hold for {told}")
        return found


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, checked."""

    method: str
    metric: str
    goal: str
    space: Space
    program: str | None = None
    command: tuple[str, ...] | None = None
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    run_cap: int | None = None
    early_terminate: Mapping[str, Any] | None = None
    rules: Rules = field(default_factory=Rules)

    @property
    def sign(self) -> float:
        """What a value is multiplied by so that less is better."""
        return 1.0 if self.goal == "minimize" else -1.0


class _Place:
    """Tells where in a file something stands."""

    def __init__(self, file: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self._file, self._lines = file, lines

    def error(self, path: Sequence[str], text: str) -> ValueError:
        """An error about a key, with the line of the nearest thing that has one."""
        known = next((path[:end] for end in range(len(path), 0, -1) if tuple(path[:end]) in self._lines), None)
        line = f", line {self._lines[tuple(known)]}" if known is not None else ""
        return ValueError(f"{self._file}{line}: {'.'.join(path)}{': ' if path else ''}{text}")


def read_sweep(path: str | Path, extras: str | Path | None = None) -> Sweep:
    """The sweep of a file. Raises ValueError that names file, line and key."""
    sweep, place = _load(path)
    more, other = _load(extras) if extras is not None else ({}, place)
    return _sweep(sweep, place, _rules(more, other))


def sweep_of(sweep: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a dictionary, as `wandb.sweep` takes one. Raises ValueError that names the key."""
    place = _Place("sweep", {})
    return _sweep(sweep, place, _rules(extras or {}, place))


def _load(path: str | Path) -> tuple[Mapping[str, Any], _Place]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        found = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: must be a mapping of keys to values")
    return found, _Place(str(path), dict(_lines(tree)))


def _lines(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key of a YAML document."""
    if isinstance(node.value, list):
        for key, value in (pair for pair in node.value if isinstance(pair, tuple)):
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


def _nearest(name: Any, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def _sweep(told: Mapping[str, Any], place: _Place, rules: Rules) -> Sweep:
    for key in told:
        if key not in KEYS:
            raise place.error([str(key)], f"there is no such key: {_nearest(key, KEYS)}")
    method = told.get("method", "bayes")
    if method not in METHODS:
        raise place.error(["method"], f"{method!r} is none: {_nearest(method, METHODS)}")
    metric = told.get("metric", {"name": "val_loss"})
    if not isinstance(metric, Mapping) or not isinstance(metric.get("name"), str):
        raise place.error(["metric"], "must have a `name`, for instance val_loss, and may have a `goal`")
    goal = metric.get("goal", "minimize")
    if goal not in GOALS:
        raise place.error(["metric", "goal"], f"{goal!r} is none: {_nearest(goal, GOALS)}")
    parameters = told.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        raise place.error(["parameters"], "there must be at least one, such as `lr: {min: 1.0e-4, max: 1.0e-2}`")
    run_cap = told.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise place.error(["run_cap"], f"{run_cap!r} must be 1 or more trials")
    command = told.get("command")
    return Sweep(
        method=method,
        metric=metric["name"],
        goal=goal,
        space=Space(parameters=tuple(_parameters(parameters, ("parameters",), place))),
        command=None if command is None else tuple(map(str, command)),
        run_cap=run_cap,
        early_terminate=_early(told.get("early_terminate"), place),
        rules=rules,
        **{key: told.get(key) for key in ("program", "name", "project", "entity")},
    )


def _parameters(told: Mapping[str, Any], path: tuple[str, ...], place: _Place) -> Iterator[Parameter]:
    for key, spec in told.items():
        here = (*path, str(key))
        if not isinstance(spec, Mapping):
            raise place.error(here, f"{spec!r} must be a mapping: for one value write `{key}: {{value: {spec}}}`")
        if set(spec) == {"parameters"} and isinstance(spec["parameters"], Mapping):
            yield from _parameters(spec["parameters"], (*here, "parameters"), place)
            continue
        try:
            found = distribution(spec)
        except ValueError as error:
            raise place.error(here, str(error)) from None
        yield Parameter(path=tuple(here[1::2]), distribution=found)


def _early(told: Any, place: _Place) -> Mapping[str, Any] | None:
    if told is None:
        return None
    if not isinstance(told, Mapping) or told.get("type") != "hyperband":
        raise place.error(["early_terminate"], "must have `type: hyperband`")
    for key in told:
        if key not in HYPERBAND:
            raise place.error(["early_terminate", str(key)], f"there is no such key: {_nearest(key, HYPERBAND)}")
    if "min_iter" not in told and not {"max_iter", "s"} <= set(told):
        raise place.error(["early_terminate"], "needs `min_iter`, or `max_iter` and `s`")
    return told


def _rules(told: Mapping[str, Any], place: _Place) -> Rules:
    for key in told:
        if key not in EXTRAS:
            raise place.error([str(key)], f"there is no such key: {_nearest(key, EXTRAS)}")

    def formula(path: Sequence[str], text: Any) -> Expression:
        try:
            return Expression(str(text))
        except ValueError as error:
            raise place.error(path, str(error)) from None

    return Rules(
        derived={name: formula(["derived", name], text) for name, text in (told.get("derived") or {}).items()},
        constraints=tuple(formula(["constraints"], text) for text in told.get("constraints") or ()),
        when={name: formula(["when", name], text) for name, text in (told.get("when") or {}).items()},
        resources=told.get("resources") or {},
    )
