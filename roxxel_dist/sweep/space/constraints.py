"""The second file of a sweep: what W&B's schema does not have.

Small formulas over the parameters of a trial, such as `dim // 8` or `dim % kv_heads == 0`.

Read by Python's own parser and worked out here, node by node: a formula in a file can compare and count, and no more.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from roxxel_dist.sweep.space.yaml_errors import YamlLocator, is_amount, nearest

LONGEST, DEEPEST = 2000, 50
"""Characters of a formula, and operations within one another."""


def _number(name: str, operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operation for numbers alone: of texts and lists `*` and `%` make any size."""

    def work(left: Any, right: Any) -> Any:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TypeError(f"{name} is for numbers")
        return operation(left, right)

    return work


BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _number("*", operator.mul),
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _number("%", operator.mod),
}
COMPARE: dict[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": float,
    "int": int,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
}


class MissingError(ValueError):
    """A formula asks for a parameter that there is not."""


class Expression:
    """A formula.

    Args:
        text: as a person wrote it.

    Raises:
        ValueError: it is no formula, or does what formulas may not.
    """

    def __init__(self, text: str) -> None:
        self.text: str = text.strip()
        if len(self.text) > LONGEST:
            raise ValueError(f"a formula of {len(self.text):,} characters: {LONGEST:,} are the most")
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise ValueError(f"{self.text!r} is no formula ({why}): write one such as dim % kv_heads == 0") from None
        if _depth(self._tree) > DEEPEST:
            raise ValueError(
                f"{self.text!r} is nested too deeply: {DEEPEST} operations within one another are the most"
            )
        for node in ast.walk(self._tree):
            self._check(node)
        called = [node.func for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        self.names: set[str] = {
            node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node not in called
        }
        """The parameters that it asks for."""

    def _check(self, node: ast.AST) -> None:
        fine = (
            isinstance(node, ast.Name | ast.BoolOp | ast.boolop | ast.IfExp | ast.List | ast.Tuple | ast.expr_context)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None))
            or (isinstance(node, ast.BinOp) and type(node.op) in BINARY)
            or (isinstance(node, ast.UnaryOp) and type(node.op) in UNARY)
            or (isinstance(node, ast.Compare) and all(type(op) in COMPARE for op in node.ops))
            or isinstance(node, ast.operator | ast.unaryop | ast.cmpop)
            or _is_call(node)
        )
        if not fine:
            known = "parameters, numbers, texts, lists, + - * / // %, and or not if, < <= == in …"
            raise ValueError(
                f"{self.text!r}: {ast.unparse(node)!r} cannot be in a formula; allowed: {known}, {', '.join(FUNCTIONS)}"
            )

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """What it comes to for these parameters.

        Raises:
            MissingError: a parameter that there is not.
            ValueError: an operation that these values do not have.
        """
        try:
            return _value(self._tree, values)
        except KeyError as error:
            raise MissingError(f"{self.text!r}: there is no parameter {error.args[0]!r}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            told = ", ".join(f"{name} {values[name]!r}" for name in sorted(self.names) if name in values)
            raise ValueError(f"{self.text!r} cannot be worked out for {told}: {error}") from None


def _depth(tree: ast.AST) -> int:
    """How many operations stand within one another."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _is_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and not node.keywords
    )


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            found = node.value
        case ast.Name():
            found = values[node.id]
        case ast.List() | ast.Tuple():
            found = [_value(one, values) for one in node.elts]
        case ast.UnaryOp():
            found = UNARY[type(node.op)](_value(node.operand, values))
        case ast.BinOp():
            found = BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.IfExp():
            found = _value(node.body if _value(node.test, values) else node.orelse, values)
        case ast.BoolOp():
            found = _either(node, values)
        case ast.Compare():
            found = _holds(node, values)
        case ast.Call(func=ast.Name(id=name)):
            found = FUNCTIONS[name](*(_value(one, values) for one in node.args))
        case _:
            raise TypeError(f"no formula: {ast.dump(node)}")
    return found


def _either(node: ast.BoolOp, values: Mapping[str, Any]) -> Any:
    """`and` and `or` as in Python: the first that decides."""
    decides = isinstance(node.op, ast.Or)
    found = None
    for one in node.values:
        found = _value(one, values)
        if bool(found) is decides:
            return found
    return found


def _holds(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = _value(other, values)
        if not COMPARE[type(op)](left, right):
            return False
        left = right
    return True


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

    def resolve(self, params: Mapping[str, Any]) -> dict[str, Any]:
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


def parse_rules(told: Mapping[str, Any], locator: YamlLocator, parameters: Any) -> Rules:
    """The rules of a file, for parameters of such names. Raises ValueError that names file, line and key."""
    for key, part in told.items():
        if key not in EXTRAS:
            raise locator.error([str(key)], f"there is no such key: {nearest(key, EXTRAS)}")
        if not isinstance(part, list if key == "constraints" else Mapping) and part is not None:
            form = "a list of formulas" if key == "constraints" else "a mapping of names to values"
            raise locator.error([key], f"{part!r} must be {form}")
    derived, when, resources = (
        {str(k): v for k, v in (told.get(n) or {}).items()} for n in ("derived", "when", "resources")
    )
    names = [str(name) for name in (parameters if isinstance(parameters, Mapping) else ())]

    def formula(path: Sequence[str], text: Any, known: Sequence[str]) -> Expression:
        try:
            found = Expression(str(text))
        except ValueError as error:
            raise locator.error(path, str(error)) from None
        for name in sorted(found.names - set(known)):
            raise locator.error(path, f"{found.text!r}: there is no parameter {name!r}: {nearest(name, known)}")
        return found

    for name in when:
        if name not in names:
            raise locator.error(["when", name], f"there is no such parameter: {nearest(name, names)}")
    for name, amount in resources.items():
        if not is_amount(amount):
            raise locator.error(["resources", name], f"{amount!r} must be a number, 0 or more")
    formulas = {name: formula(["derived", name], text, [*names, *derived]) for name, text in derived.items()}
    # A formula that asks for its own name means the parameter of that name.
    needed = {name: (found.names & set(derived)) - ({name} & set(names)) for name, found in formulas.items()}
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        raise locator.error(["derived"], f"these need one another: {', '.join(map(str, error.args[1]))}") from None
    return Rules(
        derived={name: formulas[name] for name in order},
        constraints=tuple(formula(["constraints"], text, [*names, *derived]) for text in told.get("constraints") or ()),
        when={name: formula(["when", name], text, names) for name, text in when.items()},
        resources=resources,
    )
