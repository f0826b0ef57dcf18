"""The flags among the words of a command, read without knowing which there are."""

from collections import deque
from collections.abc import Container, Iterator, Sequence


def flag(words: Sequence[str], name: str) -> str | None:
    """The value of a flag, however it is spelled; the last one counts."""
    return {other: value for other, value, _ in split_flags(words)}.get(name)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The value of each flag, guessed without knowing which flags take one; "" if none follows."""
    return {name: value or "" for name, value, _ in split_flags(words) if name}


def split_flags(words: Sequence[str], switches: Container[str] = ()) -> Iterator[tuple[str, str | None, list[str]]]:
    """(name, value, its words) of every flag, and ("", None, [word]) of a word that belongs to none.

    A flag's name has _ where - was written. Its value is what follows `=`, or the next word, unless that is a flag too;
    of `switches` only `True` and `False` are values.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            yield "", None, [word]
            continue
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        is_switch = name.removeprefix("no_") in switches
        if equals:
            yield name, value, [word]
        elif rest and not rest[0].startswith("--") and (not is_switch or rest[0].lower() in ("true", "false")):
            yield name, rest[0], [word, rest.popleft()]
        else:
            yield name, None, [word]
