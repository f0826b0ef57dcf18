"""The types of a command's arguments: fields of a dataclass, whose annotations may have marks."""

import dataclasses
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
POSITIONAL = "given by place"
Positional = Annotated[T, POSITIONAL]
"""The type of an argument that is given by place."""


@dataclasses.dataclass(frozen=True)
class Short:
    """A mark: the short form of an option, such as `-f`."""

    flag: str


def option_types(kind: Any) -> dict[str, Any]:
    """The type of each argument of a command by its name, with its marks; those of a config's fields among them."""
    hints = get_type_hints(kind, include_extras=True)
    types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    if types.pop("fields", None) is None:
        return types
    from roxxel_dist.settings.config import FIELD_TYPES

    return types | FIELD_TYPES


def parts(hint: Any) -> list[Any]:
    """The types that a value may have, without None."""
    if get_origin(hint) in (Union, UnionType):
        return [part for part in get_args(hint) if part is not type(None)]
    return [hint]


def plain(hint: Any) -> Any:
    """A type without its marks."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def marks(hint: Any) -> tuple[Any, ...]:
    """The marks of a type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()
