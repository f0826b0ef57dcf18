"""Rules that W&B's schema does not have: formulas over the parameters, such as `dim // 8` or `dim % kv_heads == 0`."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.cluster.exit_codes import UserError

LONGEST, DEEPEST = 2000, 50
"""Characters of a formula, and operations within one another."""
NODES = (
    ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Call, ast.IfExp, ast.expr_context,
    ast.BoolOp, ast.boolop, ast.UnaryOp, ast.USub, ast.UAdd, ast.Not,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn,
)  # fmt: skip
"""All that a formula is made of: no attribute, index, power or shift, and no call but of FUNCTIONS."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": float,
    "int": int,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": lambda number, digits=None: round(number, digits and max(digits, -400)),  # 10**-digits is worked out
    "sqrt": math.sqrt,
}
NUMERIC: dict[type[ast.AST], str] = {ast.Mult: "*", ast.Mod: "%"}


def _for_numbers(symbol: str, operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operation for numbers alone: of texts and lists `*` and `%` make any size."""

    def compute(left: Any, right: Any) -> Any:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise TypeError(f"{symbol} is for numbers")
        return operation(left, right)

    return compute


NAMESPACE: dict[str, Any] = {"__builtins__": {}, **{f"{name}()": function for name, function in FUNCTIONS.items()}}
NAMESPACE |= {"*()": _for_numbers("*", operator.mul), "%()": _for_numbers("%", operator.mod)}
"""By names that no parameter in a formula can have."""


MISSING = object()
"""The value of a formula that asks for a parameter that is left out."""


class MissingError(UserError):
    """A formula asks for a parameter that there is not."""


class _Compiled(ast.NodeTransformer):
    """A checked formula as it is run: its calls, `*` and `%` are those of NAMESPACE, and a tuple is a list."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = ast.Name(f"{ast.unparse(node.func)}()", ast.Load())
        return ast.Call(function, [self.visit(argument) for argument in node.args], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) not in NUMERIC:
            return node
        return ast.Call(ast.Name(f"{NUMERIC[type(node.op)]}()", ast.Load()), [node.left, node.right], [])

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        return ast.List([self.visit(element) for element in node.elts], ast.Load())


class Expression:
    """A formula: parsed by Python, refused where it is more than NODES, and run without Python's builtins.

    Args:
        text: as a person wrote it.

    Raises:
        ValueError: it is no formula, or does what formulas may not.
    """

    def __init__(self, text: str) -> None:
        self.text: str = text.strip()
        if len(self.text) > LONGEST:
            raise UserError(f"a formula of {len(self.text):,} characters: {LONGEST:,} are the maximum")
        try:
            tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error) or "it is nested too deeply"
            raise UserError(f"{self.text!r} is no formula ({why}): write one such as dim % kv_heads == 0") from None
        if _depth(tree.body) > DEEPEST:
            raise UserError(f"{self.text!r} is nested too deeply: {DEEPEST} levels of operations are the maximum")
        nodes = list(ast.walk(tree.body))
        for node in nodes:
            if not _is_allowed(node):
                raise UserError(
                    f"{self.text!r}: {ast.unparse(node)!r} cannot be in a formula; allowed: parameters, numbers, "
                    f"texts, lists, + - * / // %, and or not if, < <= == in …, {', '.join(FUNCTIONS)}"
                )
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        self.names: set[str] = {node.id for node in nodes if isinstance(node, ast.Name) and node not in functions}
        """The parameters that it asks for."""
        self._code = compile(ast.fix_missing_locations(_Compiled().visit(tree)), "<formula>", "eval")

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Its result for these parameters.

        Raises:
            MissingError: a parameter that there is not.
            ValueError: an operation that these values do not have.
        """
        known = {name: values[name] for name in sorted(self.names) if name in values}
        try:
            return eval(self._code, NAMESPACE, known)
        except NameError as error:
            raise MissingError(f"{self.text!r}: there is no parameter {error.name!r}") from None
        except (ArithmeticError, TypeError, ValueError) as error:
            shown = ", ".join(f"{name} {value!r}" for name, value in known.items())
            raise UserError(f"{self.text!r} cannot be worked out for {shown}: {error}") from None


def _depth(tree: ast.AST) -> int:
    """How many operations stand within one another."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | int | float | bool | None)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    operators = [getattr(node, "op", node), *getattr(node, "ops", ())]
    return isinstance(node, NODES) and all(isinstance(part, NODES) for part in operators)


class InfeasibleError(UserError):
    """These parameters break a rule of the sweep: no trial is made of them. The message names the rule."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The second file of a sweep."""

    derived: Mapping[str, Expression] = field(default_factory=dict)
    """In an order in which each needs only earlier ones."""
    constraints: tuple[Expression, ...] = ()
    when: Mapping[str, Expression] = field(default_factory=dict)
    """In an order in which each needs only earlier ones."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of each trial, as Ray counts them: CPU (on each of its hosts), GPU (over all of them), and custom ones."""

    def resolve(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of a trial: those whose condition does not hold are left out, derived ones are added.

        A constraint that names a left-out parameter counts as true. A derived parameter or a condition whose result
        needs a left-out parameter is left out too; `top_k if use_moe else 1` needs top_k only if use_moe is true.

        Raises:
            InfeasibleError: a constraint does not hold, or a formula cannot be worked out for these values.
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
                active[name] = value
        for rule in self.constraints:
            if rule.names <= active.keys() and not _value(rule, active, missing=True):
                shown = ", ".join(f"{name} {active[name]!r}" for name in sorted(rule.names))
                raise InfeasibleError(f"the constraint {rule.text!r} does not hold for {shown}")
        return active


def _value(formula: Expression, params: Mapping[str, Any], *, missing: Any) -> Any:
    """The result of a formula; `missing` where it asks for a parameter that is left out."""
    try:
        return formula(params)
    except MissingError:
        return missing
    except ValueError as error:
        raise InfeasibleError(str(error)) from error
