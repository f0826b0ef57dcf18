"""Small formulas over the parameters of a trial, such as `dim // 8` or `dim % kv_heads == 0`.

Read by Python's own parser and worked out here, node by node: a formula in a file can compare and count, and no more.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

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
