"""The dataclass of a component's settings, and the docstrings of its fields."""

import ast
import functools
import inspect
import itertools
import re
import sys
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
MOST_WHOLE = 2**31 - 1
"""Of steps, rows, tokens and sizes: arrays on devices count in int32."""
EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


def number_of(text: str) -> int | float | None:
    """The number that 1e3 or 5e-4 is, which YAML takes for text: an int where it is whole; None for other text."""
    if not EXPONENT.fullmatch(text):
        return None
    number = float(text)
    return int(number) if number.is_integer() else number


@dataclass_transform(kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass of settings, whose fields `Config` inherits; `help` shows their docstrings. A
    `Config` may be changed, so type checkers are not told that the fields are frozen."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    made.__doc__ = DocWithFields(cls.__doc__ or "")  # pyright: ignore[reportAttributeAccessIssue]
    return made


class DocWithFields:
    """A docstring with those of the class's fields, which are read from the source on first access."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: type[Any]) -> str:
        """The docstring of the class."""
        docs = field_docs(owner)
        lines = [f"    {field.name}: {docs[field.name]}{_default(field)}" for field in fields(owner)]
        return "\n".join([inspect.cleandoc(self._text), "", "Attributes:", *lines])


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of those it extends, as one line."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        tree = _classes(base.__module__).get(base.__qualname__)
        if tree is None:  # of a function
            (tree,) = ast.parse(inspect.getsource(base)).body
        for field, text in itertools.pairwise(tree.body):  # pyright: ignore[reportAttributeAccessIssue]
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module; `inspect.getsource` would read the module again for each."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # there is none, as of a notebook
        return {}
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _default(field: Any) -> str:
    return "" if field.default in (None, "", MISSING) else f" (default: {field.default})"
