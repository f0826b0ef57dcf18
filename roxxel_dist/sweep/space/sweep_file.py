"""The definition of a sweep: W&B's YAML as it is, and a second file (`extras`) for what W&B's schema does not have."""

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import FIELD_TYPES, SECTIONS, read_yaml
from roxxel_dist.settings.values import with_numbers
from roxxel_dist.sweep.space.constraints import Expression, InfeasibleError, Rules
from roxxel_dist.sweep.space.distributions import distribution, is_finite
from roxxel_dist.sweep.space.extras import DataExtras, Versus, data_extras
from roxxel_dist.sweep.space.space import Parameter, Params, Space
from roxxel_dist.sweep.space.values import check_value
from roxxel_dist.utils.component import EXPONENT

if TYPE_CHECKING:
    from roxxel_dist.sweep.space.passes import PassBudget

Keys = tuple[str | int, ...]
"""The path to a value of a file: keys of mappings, and numbers of items of lists."""
DEEPEST_KEYS = 50
METHODS = ("bayes", "random", "grid")
"""Methods of W&B."""
GOALS = ("minimize", "maximize")
KEYS = (
    "apiVersion", "command", "controller", "description", "early_terminate", "entity", "kind", "method", "metric",
    "name", "parameters", "program", "project", "run_cap",
)  # fmt: skip
RULES = {
    "hyperband": ("type", "min_iter", "max_iter", "s", "eta", "strict"),
    "asha": ("type", "min_iter", "max_iter", "s", "eta", "strict"),
}
"""The keys of each `early_terminate.type`; hyperband is W&B's own."""
METRIC, SERVER_METRIC = ("name", "goal", "weights"), ("impute", "impute_while_running", "target")
"""The keys of `metric`, and those that only W&B's server reads."""
MEANS = {"mean_loss": "val_loss", "mean_bpb": "val_bpb"}
"""Metrics that are means over data sets by `weights`, and what is logged of each set, as `val_loss/<name>`."""
PER_TOKEN = {"val_loss": "val_bpb", "train_loss": "val_bpb", "train_eval_loss": "val_bpb", "mean_loss": "mean_bpb"}
"""Metrics per token, before any `/`, and what measures the same per byte."""
EXTRAS = ("constraints", "derived", "mixtures", "phase_ends", "resources", "versus", "when")
LISTS = {"constraints": "a list of formulas", "mixtures": "a list of mixtures"}
"""The keys of the second file that hold lists; others are mappings."""

__all__ = ["InfeasibleError", "Parameter", "Params", "Rules", "Space", "Sweep", "read_sweep", "sweep_of"]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep, checked."""

    method: str
    metric: str
    goal: str
    space: Space
    weights: Mapping[str, float] = field(default_factory=dict)
    """The share of each data set in a metric that is a mean over them, with sum 1; empty for another metric."""
    program: str | None = None
    command: tuple[str, ...] | None = None
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    run_cap: int | None = None
    early_terminate: Mapping[str, Any] | None = None
    rules: Rules = field(default_factory=Rules)
    data: DataExtras = field(default_factory=DataExtras)
    """The parts of the data that are searched: shares, and ends of phases."""
    versus: Versus | None = None
    """The two configurations that a study compares, and when it ends; None: it searches."""
    locator: "YamlLocator" = field(default_factory=lambda: YamlLocator("sweep", {}), compare=False, repr=False)
    """The lines of its keys in the file."""
    names_metric: bool = field(default=False, compare=False)
    """Whether the file says what the metric is."""

    def with_budget(self, budget: "PassBudget") -> "Sweep":
        """The sweep over the mixtures that the passes over the data leave. Raises ValueError where they leave none."""
        space = replace(self.space, mixtures=budget.spaces())
        return replace(self, space=space, rules=replace(self.rules, budget=budget))

    @property
    def logged(self) -> dict[str, float]:
        """The logged metrics of which `metric` is a mean, with their weights; empty where it is logged itself."""
        return {f"{MEANS[self.metric]}/{name}": weight for name, weight in self.weights.items()}

    @property
    def sign(self) -> float:
        """The factor by which a value is multiplied so that less is better."""
        return 1.0 if self.goal == "minimize" else -1.0


class YamlLocator:
    """Errors about the keys of a file, with their lines."""

    def __init__(self, file: str, lines: Mapping[Keys, int], *, strict: bool = True) -> None:
        self._file, self._lines = file, lines
        self.strict: bool = strict

    def error(self, path: Sequence[str | int], text: str) -> ValueError:
        """An error about a key, with the line of the nearest key above it that has one. Of an item of a list, which is
        a number from 0, the line is meant alone."""
        keys, names = tuple(path), [key for key in path if isinstance(key, str)]
        lines = [self._lines[key] for end in range(len(keys)) if (key := keys[: end + 1]) in self._lines]
        line = f", line {lines[-1]}" if lines else ""
        return UserError(f"{self._file}{line}: {'.'.join(names)}{': ' if names else ''}{text}")

    def check_keys(self, keys: Iterable[Any], known: Sequence[str], *path: str) -> None:
        """Raises ValueError for a key that there is not."""
        for key in keys:
            if key not in known:
                raise self.error([*path, str(key)], f"there is no such key: {hint_for(key, known)}")


def hint_for(name: Any, names: Sequence[str]) -> str:
    """A hint for an unknown name: the nearest known name, or all of them."""
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def read_sweep(path: str | Path, extras: str | Path | None = None, *, strict: bool = True) -> Sweep:
    """The sweep of a YAML file, and of a second one, `extras`. `strict`: refuse a key that only W&B's server reads.
    Raises UserError that names file, line and key."""
    sweep, locator = _load(path, strict=strict)
    more, other = _load(extras, strict=strict) if extras is not None else ({}, locator)
    return _sweep(sweep, locator, more, other)


def sweep_of(sweep: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> Sweep:
    """The sweep of a dictionary, as `wandb.sweep` takes one. Raises UserError that names the key."""
    locator = YamlLocator("sweep", {})
    return _sweep(sweep, locator, extras or {}, locator)


def as_sweep(sweep: Mapping[str, Any] | str | os.PathLike[str] | Sweep) -> Sweep:
    """The sweep of a file, of a dictionary, or as it is. Raises UserError as `read_sweep` and `sweep_of`, and for a
    metric that is named, is per token, and would rank tokenizers."""
    if isinstance(sweep, Sweep):
        return sweep
    found = read_sweep(os.fspath(sweep)) if isinstance(sweep, str | os.PathLike) else sweep_of(sweep)
    tokenizers = {one.name for one in found.space.free if one.path[-1] == "tokenizer_type"}
    is_ours = found.program is None or os.path.basename(found.program) == "train_sweep.py"
    if found.names_metric and is_ours and tokenizers:
        check_per_token(found, sorted(tokenizers))
    return found


def phrase_change(names: Sequence[str]) -> str:
    """Names and their verb for a message, as in "dim and lr change"."""
    return f"{' and '.join(names)} {'change' if len(names) > 1 else 'changes'}"


def check_per_token(sweep: Sweep, names: Sequence[str]) -> None:
    """Raises UserError for a metric per token, where some parameters change what a token is."""
    loss, slash, of_set = sweep.metric.partition("/")
    if loss not in PER_TOKEN:
        return
    better = f"val_bpb{slash}{of_set}" if loss == "val_loss" else PER_TOKEN[loss]
    weights = ", weights: {…}" if sweep.weights else ""
    why = (
        f"{sweep.metric} is per token, and {phrase_change(names)} what a token is, so that it does not compare the "
        f"trials: write metric: {{name: {better}, goal: minimize{weights}}}, which is per byte"
    )
    raise sweep.locator.error(["metric", "name"], why)


def _load(path: str | Path, *, strict: bool) -> tuple[Mapping[str, Any], YamlLocator]:
    content, tree = read_yaml(path, unique=strict, exponents=True)
    if not isinstance(content, Mapping):
        raise UserError(f"{path} is empty" if content is None else f"{path}: must be a mapping of keys to values")
    if "parameters" not in content and content.keys() & {*FIELD_TYPES, *SECTIONS}:
        raise UserError(
            f"{path}: this is a config, not the file of a sweep, which has `parameters`: give it with --config, and "
            f"the file of the sweep with --sweep_config"
        )
    locator = YamlLocator(str(path), dict(_lines(tree)), strict=strict)
    if strict:
        _check_numbers(tree, locator)
    return content, locator


def _lines(node: Any, path: Keys = ()) -> Iterator[tuple[Keys, int]]:
    """The line of every key of a YAML document, and of every item of a list."""
    for here, key, value in _entries(node, path):
        yield here, key.start_mark.line + 1
        yield from _lines(value, here)


def _entries(node: Any, path: Keys) -> Iterator[tuple[Keys, Any, Any]]:
    """(its keys, the node of its own key, its node) of every value in a node; not where an alias is in itself."""
    for number, entry in enumerate(node.value if isinstance(node.value, list) and len(path) < DEEPEST_KEYS else ()):
        key, value = entry if isinstance(entry, tuple) else (entry, entry)
        yield (*path, str(key.value) if isinstance(entry, tuple) else number), key, value


def _check_numbers(node: Any, locator: YamlLocator, path: Keys = ()) -> None:
    """Raises UserError for a number that YAML 1.1 reads as another one than people do: 010 is 8, and 1:30 is 90."""
    for here, _, value in _entries(node, path):
        _check_numbers(value, locator, here)
        if not isinstance(value.value, str) or not value.tag.endswith((":int", ":float")):
            continue
        text = value.value.replace("_", "")
        digits = text.lstrip("-+")
        if ":" in digits or (digits.isdigit() and digits != "0" and digits.startswith("0")):
            meant = "a number in units of 60" if ":" in digits else f"{int(digits, 8)}, for it begins with 0 (octal)"
            raise locator.error(here, f"in YAML {value.value} is {meant}: write the number, or quotes around it")
        if value.tag.endswith(":float") and EXPONENT.fullmatch(text):
            number = float(text)
            if math.isinf(number) or (number == 0 and digits.lower().partition("e")[0].strip("0.")):
                raise locator.error(here, f"{value.value} is {number:g} as a float: write another number")


def _sweep(content: Mapping[str, Any], locator: YamlLocator, extras: Mapping[str, Any], other: YamlLocator) -> Sweep:
    rules = _rules(extras, other, content.get("parameters"))
    data = data_extras(extras, content.get("parameters"), other.error)
    locator.check_keys(content, KEYS)
    method = content.get("method", "bayes")
    if method not in METHODS:
        why = f"{method!r} is not a method: {hint_for(method, METHODS)} (--method also takes tpe)"
        raise locator.error(["method"], why)
    metric = content.get("metric", {"name": "val_loss"})
    if not isinstance(metric, Mapping) or not isinstance(metric.get("name"), str):
        raise locator.error(["metric"], "must have a `name`, for example val_loss, and may have a `goal`")
    _check_unread(content, metric, locator)
    goal = metric.get("goal", "minimize")
    if goal not in GOALS:
        raise locator.error(["metric", "goal"], f"{goal!r} is not a goal: {hint_for(goal, GOALS)}")
    weights = _weights(metric, locator)
    parameters = content.get("parameters")
    if parameters is None and data:
        parameters = {}
    if not isinstance(parameters, Mapping) or not (parameters or data):
        raise locator.error(["parameters"], "there must be at least one, such as `lr: {min: 1.0e-4, max: 1.0e-2}`")
    run_cap = content.get("run_cap")
    if run_cap is not None and (type(run_cap) is not int or run_cap < 1):
        raise locator.error(["run_cap"], f"{run_cap!r} must be 1 or more trials")
    command = content.get("command")
    if command is not None and (not isinstance(command, list | tuple) or not command):
        raise locator.error(
            ["command"], f"{command!r} must be a list of words, such as ['${{env}}', '${{program}}', '${{args}}']"
        )
    texts = {key: content.get(key) for key in ("program", "name", "project", "entity")}
    for key, text in texts.items():
        if not isinstance(text, str | None):
            raise locator.error([key], f"{text!r} must be a text")
    return Sweep(
        method=method,
        metric=metric["name"],
        goal=goal,
        weights=weights,
        space=Space(
            parameters=(*_unique(_parameters(parameters, ("parameters",), locator), locator), *data.ends.values()),
            mixtures=tuple(spec.space() for spec in data.mixtures),
        ),
        command=None if command is None else tuple(map(str, command)),
        run_cap=run_cap,
        early_terminate=_early_terminate(with_numbers(content.get("early_terminate")), locator),
        rules=rules,
        data=data,
        versus=_versus(extras.get("versus"), other),
        locator=locator,
        names_metric="metric" in content,
        **texts,
    )


def _weights(metric: Mapping[str, Any], locator: YamlLocator) -> dict[str, float]:
    """The weights of a metric that is a mean over data sets, with sum 1; empty for any other metric."""
    weights = with_numbers(metric.get("weights"))
    if weights is None:
        return {}
    where = ["metric", "weights"]
    if metric["name"] not in MEANS:
        why = f"weights are of a mean over data sets, and the metric is {metric['name']!r}: use {' or '.join(MEANS)}"
        raise locator.error(where, why)
    if not isinstance(weights, Mapping) or not weights:
        raise locator.error(where, "must be names of validation sets with numbers, such as {code: 0.5, math: 0.5}")
    for name, weight in weights.items():
        if not is_finite(weight) or weight < 0:
            raise locator.error([*where, str(name)], f"{weight!r} must be a number, 0 or more")
    if not (largest := max(weights.values())):
        raise locator.error(where, "they sum to 0: at least one must be above 0")
    scaled = {str(name): weight / largest for name, weight in weights.items()}
    total = math.fsum(scaled.values())
    return {name: weight / total for name, weight in scaled.items() if weight}


def _check_unread(content: Mapping[str, Any], metric: Mapping[str, Any], locator: YamlLocator) -> None:
    """Raises UserError for keys that nothing reads where the search is made here."""
    if not locator.strict:
        return
    for key in metric:
        if key in SERVER_METRIC:
            why = "only W&B's server reads this key, and here this machine chooses the trials: leave it out"
            raise locator.error(["metric", str(key)], why)
    locator.check_keys(metric, METRIC, "metric")
    controller = content.get("controller")
    if controller not in (None, {"type": "local"}):
        why = (
            f"{controller!r}: only W&B's server reads this key, and here this machine chooses the trials: leave it out"
        )
        raise locator.error(["controller"], why)


def _parameters(specs: Mapping[str, Any], path: tuple[str, ...], locator: YamlLocator) -> Iterator[Parameter]:
    for key, spec in specs.items():
        here = (*path, str(key))
        if locator.strict and not (isinstance(key, str) and key.strip()):
            why = "is empty" if isinstance(key, str) else f"is read as {key!r}, which is no text: write it in quotes"
            raise locator.error(here, f"the name of a parameter {why}")
        if not isinstance(spec, Mapping):
            meant, of = ("a choice", "values") if isinstance(spec, list) else ("one value", "value")
            raise locator.error(here, f"{spec!r} must be a mapping: for {meant} write `{key}: {{{of}: {spec}}}`")
        if set(spec) == {"parameters"} and isinstance(spec["parameters"], Mapping):
            yield from _parameters(spec["parameters"], (*here, "parameters"), locator)
            continue
        try:
            # A text such as "1e-3" among the values is a text; as a bound it can only be a number.
            given = {name: each if name in ("value", "values") else with_numbers(each) for name, each in spec.items()}
            yield Parameter(path=tuple(here[1::2]), distribution=distribution(given))
        except ValueError as error:
            # The message names the key.
            place = _place_of(spec)
            raise locator.error([*here, *place], str(error).removeprefix("values: " if place else "")) from None


def _unique(parameters: Iterable[Parameter], locator: YamlLocator) -> Iterator[Parameter]:
    """The parameters. Raises UserError where two have one name: `a.b`, and b among the parameters of a."""
    paths: dict[str, tuple[str, ...]] = {}
    for parameter in parameters:
        if paths.setdefault(parameter.name, parameter.path) != parameter.path:
            raise locator.error(parameter.place, f"there are two parameters {parameter.name}: rename one of them")
        yield parameter


def _place_of(spec: Mapping[str, Any]) -> list[str | int]:
    """The keys of the first listed value that cannot be kept; empty where there is none."""
    values = spec.get("values")
    for number, value in enumerate(values if isinstance(values, list) else ()):
        try:
            check_value(value)
        except UserError:
            return ["values", number]
    return []


def _early_terminate(spec: Any, locator: YamlLocator) -> Mapping[str, Any] | None:
    if spec is None:
        return None
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or kind not in RULES:
        types = ", ".join(RULES)
        why = (
            f"must have a `type`: {types}"
            if kind is None
            else f"type {kind!r} does not exist: it must be one of {types}"
        )
        raise locator.error(["early_terminate"], why)
    if locator.strict:
        locator.check_keys(spec, RULES[kind], "early_terminate")
    if locator.strict and "min_iter" in spec and (more := sorted({"max_iter", "s"} & set(spec))):
        raise locator.error(["early_terminate"], f"min_iter and {more[0]}: give min_iter, or max_iter and s")
    if locator.strict and type(spec.get("strict", False)) is not bool:
        raise locator.error(["early_terminate", "strict"], f"{spec['strict']!r} must be true or false")
    if "min_iter" not in spec and not {"max_iter", "s"} <= set(spec):
        raise locator.error(["early_terminate"], "needs `min_iter`, or `max_iter` and `s`")
    for key in sorted(set(spec) - {"type", "strict"}):
        if not is_finite(spec[key]) or spec[key] <= 0:
            raise locator.error(["early_terminate", str(key)], f"{spec[key]!r} must be a number above 0")
    return spec


def _rules(content: Mapping[str, Any], locator: YamlLocator, parameters: Any) -> Rules:
    """The rules of the second file, for the parameters of the first."""
    locator.check_keys(content, EXTRAS)
    for key, part in content.items():
        if not isinstance(part, list if key in LISTS else Mapping) and part is not None:
            raise locator.error([key], f"{part!r} must be {LISTS.get(key, 'a mapping of names to values')}")
    derived, when, resources = (
        {str(name): value for name, value in (content.get(key) or {}).items()}
        for key in ("derived", "when", "resources")
    )
    resources = with_numbers(resources)
    names = [str(name) for name in (parameters if isinstance(parameters, Mapping) else ())]

    def formula(path: Sequence[str], text: Any, known: Sequence[str]) -> Expression:
        try:
            expression = Expression(str(text))
        except ValueError as error:
            raise locator.error(path, str(error)) from None
        for name in sorted(expression.names - set(known)):
            raise locator.error(path, f"{expression.text!r}: there is no parameter {name!r}: {hint_for(name, known)}")
        return expression

    for name in when:
        if name not in names:
            raise locator.error(["when", name], f"there is no such parameter: {hint_for(name, names)}")
    for name, amount in resources.items():
        if not is_finite(amount) or amount < 0:
            raise locator.error(["resources", name], f"{amount!r} must be a number, 0 or more")
    every = [*names, *derived]
    formulas = {name: formula(["derived", name], text, every) for name, text in derived.items()}
    # A formula that asks for its own name means the parameter of that name.
    needed = {name: (each.names & set(derived)) - ({name} & set(names)) for name, each in formulas.items()}
    conditions = {name: formula(["when", name], text, names) for name, text in when.items()}
    depends = {name: each.names & set(when) for name, each in conditions.items()}
    return Rules(
        derived={name: formulas[name] for name in _in_order("derived", needed, locator)},
        constraints=tuple(formula(["constraints"], text, every) for text in content.get("constraints") or ()),
        when={name: conditions[name] for name in _in_order("when", depends, locator)},
        resources=resources,
    )


def _versus(spec: Any, locator: YamlLocator) -> Versus | None:
    """The key that `roxxel-dist versus` has written."""
    try:
        return None if spec is None else Versus(**spec)
    except TypeError:
        raise locator.error(["versus"], "`roxxel-dist versus` writes this key: leave it out") from None


def _in_order(key: str, needed: Mapping[str, set[str]], locator: YamlLocator) -> list[str]:
    """The names of formulas, each after those that it needs. Raises UserError where some need each other."""
    try:
        return list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        cycle = ", ".join(dict.fromkeys(map(str, error.args[1])))
        raise locator.error(
            [key], f"each of these formulas needs the other: {cycle}: take one of these names out of a formula"
        ) from None
