"""The second file of a sweep: what W&B's schema does not have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from roxxel_dist.sweep.expressions import Expression, MissingError
from roxxel_dist.sweep.place import Place, is_amount, nearest

EXTRAS = ("constraints", "derived", "resources", "when")


class InfeasibleError(ValueError):
    """These parameters break a rule of the sweep: no trial is made of them. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the second file adds."""

    derived: Mapping[str, Expression] = field(default_factory=dict)
    constraints: tuple[Expression, ...] = ()
    when: Mapping[str, Expression] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of each trial, as Ray counts them: CPU (on each of its hosts), GPU (over all of them), and custom ones."""

    def complete(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a trial: those whose condition does not hold are left out, derived ones are added.

        What asks for a parameter that is left out is left out with it: a derived one, a condition, a constraint.

        Raises:
            InfeasibleError: a constraint does not hold, or a formula cannot be worked out for these values.
        """
        found = self._active(params)
        for name, formula in self.derived.items():
            try:
                found[name] = formula(found)
            except MissingError:
                found.pop(name, None)
            except ValueError as error:
                raise InfeasibleError(str(error)) from error
        for rule in self.constraints:
            if not _is_true(rule, found, unknown=True):
                told = ", ".join(f"{name} {found[name]!r}" for name in sorted(rule.names))
                raise InfeasibleError(f"the constraint {rule.text!r} does not hold for {told}")
        return found

    def _active(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Those whose condition holds; a condition may ask for a parameter that has one itself."""
        found = dict(params)
        for _ in self.when:
            found = {
                name: value
                for name, value in params.items()
                if name not in self.when or _is_true(self.when[name], found, unknown=False)
            }
        return found


def _is_true(formula: Expression, params: Mapping[str, Any], *, unknown: bool) -> bool:
    """Whether it does; `unknown` where it asks for a parameter that is left out."""
    try:
        return bool(formula(params))
    except MissingError:
        return unknown
    except ValueError as error:
        raise InfeasibleError(str(error)) from error


def rules_of(told: Mapping[str, Any], place: Place, parameters: Any) -> Rules:
    """The rules of a file, for parameters of such names. Raises ValueError that names file, line and key."""
    for key, part in told.items():
        if key not in EXTRAS:
            raise place.error([str(key)], f"there is no such key: {nearest(key, EXTRAS)}")
        if not isinstance(part, list if key == "constraints" else Mapping) and part is not None:
            form = "a list of formulas" if key == "constraints" else "a mapping of names to values"
            raise place.error([key], f"{part!r} must be {form}")
    derived, when, resources = (
        {str(k): v for k, v in (told.get(n) or {}).items()} for n in ("derived", "when", "resources")
    )
    names = [str(name) for name in (parameters if isinstance(parameters, Mapping) else ())]

    def formula(path: Sequence[str], text: Any, known: Sequence[str]) -> Expression:
        try:
            found = Expression(str(text))
        except ValueError as error:
            raise place.error(path, str(error)) from None
        for name in sorted(found.names - set(known)):
            raise place.error(path, f"{found.text!r}: there is no parameter {name!r}: {nearest(name, known)}")
        return found

    for name in when:
        if name not in names:
            raise place.error(["when", name], f"there is no such parameter: {nearest(name, names)}")
    for name, amount in resources.items():
        if not is_amount(amount):
            raise place.error(["resources", name], f"{amount!r} must be a number, 0 or more")
    formulas = {name: formula(["derived", name], text, [*names, *derived]) for name, text in derived.items()}
    # A formula that asks for its own name means the parameter of that name.
    needed = {name: (found.names & set(derived)) - ({name} & set(names)) for name, found in formulas.items()}
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        raise place.error(["derived"], f"these need one another: {', '.join(map(str, error.args[1]))}") from None
    return Rules(
        derived={name: formulas[name] for name in order},
        constraints=tuple(formula(["constraints"], text, [*names, *derived]) for text in told.get("constraints") or ()),
        when={name: formula(["when", name], text, names) for name, text in when.items()},
        resources=resources,
    )
