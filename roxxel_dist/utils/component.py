"""The dataclass of a component's settings, and the docstrings of its fields."""

import ast
import functools
import inspect
import itertools
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass of settings, whose fields `Config` inherits; `help` shows their docstrings.

    A `Config` may be changed, so type checkers are not told that the fields are frozen.
    """
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
        body = ast.parse(inspect.getsource(base)).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs


def _default(field: Any) -> str:
    return "" if field.default in (None, "", MISSING) else f" (default: {field.default})"
