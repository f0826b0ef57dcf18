"""Rules that W&B's schema does not have: formulas over the parameters, such as `dim // 8` or `dim % kv_heads == 0`."""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes, InvalidExpression, NameNotDefined

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.sweep.space.values import check_value

LONGEST, MOST = 2000, 200
"""Characters and syntax nodes of a formula."""
EXPRESSIONS = (
    ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Call, ast.IfExp, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare,
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": float,
    "int": int,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": lambda number, digits=None: round(number, digits and max(digits, -400)),  # it computes 10**-digits
    "sqrt": math.sqrt,
}
HUGE = ast.Pow, ast.LShift, ast.RShift
"""Operators whose results can have any size."""
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    kind: function for kind, function in DEFAULT_OPERATORS.items() if kind not in HUGE
}
MISSING = object()
"""The value of a formula that asks for a parameter that is left out."""


class MissingError(UserError):
    """A formula asks for a parameter that does not exist."""


class Expression:
    """A formula in Python's syntax, evaluated by simpleeval: no attributes, no indices, no calls but of FUNCTIONS.
    Raises ValueError for a text that is no formula, or has an expression that formulas must not have."""

    def __init__(self, text: str) -> None:
        self.text: str = text.strip()
        if len(self.text) > LONGEST:
            raise UserError(f"a formula of {len(self.text):,} characters: {LONGEST:,} are the maximum")
        try:
            self._tree: ast.expr = ast.parse(self.text, mode="eval").body
        except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise UserError(f"{self.text!r} is no formula ({why}): write one such as dim % kv_heads == 0") from None
        nodes = [node for node in ast.walk(self._tree) if isinstance(node, ast.expr)]
        if len(nodes) > MOST:
            raise UserError(f"{self.text!r} has {len(nodes)} names, numbers and operations: {MOST} are the maximum")
        for node in nodes:
            if not self._is_allowed(node):
                raise UserError(
                    f"{self.text!r}: {ast.unparse(node)!r} cannot be in a formula; allowed: parameters, numbers, "
                    f"texts, lists, + - * / // %, and or not if, < <= == in …, {', '.join(FUNCTIONS)}"
                )
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        self.names: set[str] = {node.id for node in nodes if isinstance(node, ast.Name) and node not in functions}
        """The parameters that it asks for."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The result for these parameters. Raises MissingError where a parameter does not exist, ValueError for an
        operation that these values do not have."""
        known = {name: values[name] for name in sorted(self.names) if name in values}
        try:
            return EvalWithCompoundTypes(OPERATORS, FUNCTIONS.copy(), known).eval(self.text, self._tree)
        except NameNotDefined as error:
            raise MissingError(f"{self.text!r}: there is no parameter {error.name!r}") from None
        except (ArithmeticError, TypeError, ValueError, InvalidExpression) as error:
            shown = ", ".join(f"{name} {value!r}" for name, value in known.items())
            raise UserError(f"{self.text!r} cannot be worked out for {shown}: {error}") from None

    @staticmethod
    def _is_allowed(node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str | int | float | bool | None)
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        operators = [*getattr(node, "ops", ()), *([node.op] if isinstance(node, ast.BinOp | ast.UnaryOp) else ())]
        return isinstance(node, EXPRESSIONS) and all(type(operator) in OPERATORS for operator in operators)


class InfeasibleError(UserError):
    """These parameters break a rule of the sweep: no trial is made of them. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the second file of a sweep."""

    derived: Mapping[str, Expression] = field(default_factory=dict)
    """Formulas in an order in which each needs only earlier ones."""
    constraints: tuple[Expression, ...] = ()
    when: Mapping[str, Expression] = field(default_factory=dict)
    """Conditions in an order in which each needs only earlier ones."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of each trial, as Ray counts them: CPU (on each of its hosts), GPU (over all of them), and custom
    ones."""
    budget: Any = None
    """A `passes.PassBudget`: of passes over the data; None: no limit, or the data is not known."""

    @property
    def restrict(self) -> bool:
        """Whether any points of the space break a rule."""
        return bool(self.constraints) or self.budget is not None

    def resolve(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a trial: those whose condition does not hold are left out, derived ones are added.

        A constraint that names a left-out parameter counts as true. A derived parameter or a condition whose result
        needs a left-out parameter is left out too; `top_k if use_moe else 1` needs top_k only if use_moe is true.
        Raises InfeasibleError where a constraint does not hold, a formula cannot be worked out, or the budget of passes
        is not enough.
        """
        active = dict(params)
        for name, condition in self.when.items():
            if not _value(condition, active, missing=False):
                active.pop(name, None)
        for name, formula in self.derived.items():
            value = _value(formula, active, missing=MISSING)
            if value is MISSING:
                active.pop(name, None)
            else:
                active[name] = _kept(formula, value)
        for rule in self.constraints:
            if rule.names <= active.keys() and not _value(rule, active, missing=True):
                shown = ", ".join(f"{name} {active[name]!r}" for name in sorted(rule.names))
                raise InfeasibleError(f"the constraint {rule.text!r} does not hold for {shown}")
        if self.budget is not None:
            self.budget.check(active)
        return active


def _kept(formula: Expression, value: Any) -> Any:
    """The value of a derived parameter, with lists for tuples. Raises InfeasibleError where it cannot be kept."""
    try:
        return check_value(list(value) if isinstance(value, tuple) else value)
    except UserError as error:
        raise InfeasibleError(f"{formula.text!r}: {error}") from None


def _value(formula: Expression, params: Mapping[str, Any], *, missing: Any) -> Any:
    """The result of a formula; `missing` where it asks for a parameter that is left out."""
    try:
        return formula(params)
    except MissingError:
        return missing
    except ValueError as error:
        raise InfeasibleError(str(error)) from error
