"""Rules that fields of several groups share."""

from collections.abc import Collection, Mapping


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raises ValueError for the first field that is given and below 1."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")
