"""The dataclass of a component's settings."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def component(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass of settings, whose fields `Config` inherits.

    A `Config` may be changed, so type checkers are not told that the fields are frozen.
    """
    return dataclass(frozen=True, kw_only=True)(cls)
