"""A value of a field: whether it has the type of the field, and what YAML's words and numbers mean there."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from roxxel_dist.utils.component import EXPONENT

SWITCHES = {"true": "on", "yes": "on", "on": "on", "false": "off", "no": "off", "off": "off"}
"""Words for on and off, as YAML knows them."""


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field; a whole number fits where any number does."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    for option in options_of(kind):
        if get_origin(option) is Literal:
            if fits(value, option):
                return True
            continue
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return True
        if isinstance(value, get_origin(option) or option) and (option is bool or not isinstance(value, bool)):
            return True
    return False


def options_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def is_text(kind: Any) -> bool:
    """Whether a field takes text and no numbers."""
    options = {option for option in options_of(kind) if get_origin(option) is not Literal}
    return str in options and options <= {str, type(None)}


def type_name(kind: Any) -> str:
    """The values that a field takes, for a message: "a whole number or nothing"."""
    options = options_of(kind)
    if choices := [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]:
        return "one of " + ", ".join(["True", "False"] * (bool in options) + choices)
    names = {
        int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "nothing",
        list: "a list", dict: "a mapping",
    }  # fmt: skip
    return " or ".join(names[get_origin(option) or option] for option in options)


def as_choice(kind: Any, value: Any) -> Any:
    """The choice that a value means where it is one: YAML reads off and no as False, on and yes as True. Null is the
    choice "none". Other values are returned unchanged."""
    if get_origin(kind) is not Literal or value in get_args(kind):
        return value
    if isinstance(value, str):
        meant = SWITCHES.get(value.lower(), value)
    else:
        meant = "none" if value is None else {True: "on", False: "off"}.get(value) if isinstance(value, bool) else value
    return meant if meant in get_args(kind) else value


def with_numbers(value: Any) -> Any:
    """The same with text such as 5e-4, which YAML does not take for a number, converted to numbers at any depth."""
    if isinstance(value, Mapping):
        return {key: with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
