"""The second file of a sweep: what W&B's schema does not have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.sweep.expressions import Expression
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
    return Rules(
        derived={name: formula(["derived", name], text, [*names, *derived]) for name, text in derived.items()},
        constraints=tuple(formula(["constraints"], text, [*names, *derived]) for text in told.get("constraints") or ()),
        when={name: formula(["when", name], text, names) for name, text in when.items()},
        resources=resources,
    )
