"""A sweep as its file has it: what is searched, how, and for what. W&B's YAML is read as it is.

What W&B's schema does not have may stand in a second file of its own (`extras`): values that follow from others, rules
that a trial must keep, and parameters that matter only under a condition.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roxxel_dist.config import yaml_problem
from roxxel_dist.sweep.space.constraints import InfeasibleError, Rules, parse_rules
from roxxel_dist.sweep.space.distributions import Distribution, distribution
from roxxel_dist.sweep.space.yaml_errors import YamlLocator, is_amount, nearest

METHODS = ("bayes", "random", "grid")
GOALS = ("minimize", "maximize")
KEYS = (
    "apiVersion", "command", "controller", "description", "early_terminate", "entity", "kind", "method", "metric",
    "name", "parameters", "program", "project", "run_cap",
)  # fmt: skip
HYPERBAND = ("type", "min_iter", "max_iter", "s", "eta", "strict")
Params = dict[str, Any]

__all__ = ["InfeasibleError", "Parameter", "Params", "Rules", "Space", "Sweep", "nested", "read_sweep", "sweep_of"]


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
                point[dim] = kind.grid_point(turn)
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


def read_sweep(path: str | Path, extras: str | Path | None = None) -> Sweep:
    """The sweep of a file. Raises ValueError that names file, line and key."""
    sweep, locator = _load(path)
    more, other = _load(extras) if extras is not None else ({}, locator)
    return _sweep(sweep, locator, parse_rules(more, other, sweep.get("parameters")))


def sweep_of(sweep: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a dictionary, as `wandb.sweep` takes one. Raises ValueError that names the key."""
    locator = YamlLocator("sweep", {})
    return _sweep(sweep, locator, parse_rules(extras or {}, locator, sweep.get("parameters")))


def _load(path: str | Path) -> tuple[Mapping[str, Any], YamlLocator]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        found = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {yaml_problem(error)}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: must be a mapping of keys to values")
    return found, YamlLocator(str(path), dict(_lines(tree)))


def _lines(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key of a YAML document."""
    if isinstance(node.value, list):
        for key, value in (pair for pair in node.value if isinstance(pair, tuple)):
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


def _sweep(told: Mapping[str, Any], locator: YamlLocator, rules: Rules) -> Sweep:
    for key in told:
        if key not in KEYS:
            raise locator.error([str(key)], f"there is no such key: {nearest(key, KEYS)}")
    method = told.get("method", "bayes")
    if method not in METHODS:
        raise locator.error(["method"], f"{method!r} is none of W&B's: {nearest(method, METHODS)}; --method has others")
    metric = told.get("metric", {"name": "val_loss"})
    if not isinstance(metric, Mapping) or not isinstance(metric.get("name"), str):
        raise locator.error(["metric"], "must have a `name`, for instance val_loss, and may have a `goal`")
    goal = metric.get("goal", "minimize")
    if goal not in GOALS:
        raise locator.error(["metric", "goal"], f"{goal!r} is none: {nearest(goal, GOALS)}")
    parameters = told.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        raise locator.error(["parameters"], "there must be at least one, such as `lr: {min: 1.0e-4, max: 1.0e-2}`")
    run_cap = told.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise locator.error(["run_cap"], f"{run_cap!r} must be 1 or more trials")
    command = told.get("command")
    if command is not None and (not isinstance(command, list | tuple) or not command):
        raise locator.error(
            ["command"], f"{command!r} must be a list of words, such as ['${{env}}', '${{program}}', '${{args}}']"
        )
    texts = {key: told.get(key) for key in ("program", "name", "project", "entity")}
    for key, text in texts.items():
        if not isinstance(text, str | None):
            raise locator.error([key], f"{text!r} must be a text")
    return Sweep(
        method=method,
        metric=metric["name"],
        goal=goal,
        space=Space(parameters=tuple(_parameters(parameters, ("parameters",), locator))),
        command=None if command is None else tuple(map(str, command)),
        run_cap=run_cap,
        early_terminate=_early(told.get("early_terminate"), locator),
        rules=rules,
        **texts,
    )


def _parameters(told: Mapping[str, Any], path: tuple[str, ...], locator: YamlLocator) -> Iterator[Parameter]:
    for key, spec in told.items():
        here = (*path, str(key))
        if not isinstance(spec, Mapping):
            raise locator.error(here, f"{spec!r} must be a mapping: for one value write `{key}: {{value: {spec}}}`")
        if set(spec) == {"parameters"} and isinstance(spec["parameters"], Mapping):
            yield from _parameters(spec["parameters"], (*here, "parameters"), locator)
            continue
        try:
            found = distribution(spec)
        except ValueError as error:
            raise locator.error(here, str(error)) from None
        yield Parameter(path=tuple(here[1::2]), distribution=found)


def _early(told: Any, locator: YamlLocator) -> Mapping[str, Any] | None:
    if told is None:
        return None
    if not isinstance(told, Mapping) or told.get("type") != "hyperband":
        raise locator.error(["early_terminate"], "must have `type: hyperband`")
    for key in told:
        if key not in HYPERBAND:
            raise locator.error(["early_terminate", str(key)], f"there is no such key: {nearest(key, HYPERBAND)}")
    if "min_iter" not in told and not {"max_iter", "s"} <= set(told):
        raise locator.error(["early_terminate"], "needs `min_iter`, or `max_iter` and `s`")
    for key in set(told) - {"type", "strict"}:
        if not is_amount(told[key]) or not told[key]:
            raise locator.error(["early_terminate", str(key)], f"{told[key]!r} must be a number above 0")
    return told
