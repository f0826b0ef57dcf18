"""The name of an argument in a message: as its reader types it, a keyword in Python and a flag at the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

_running: list[str] = []
"""A mark for each command line of this process that is running: one may be within another."""


@contextmanager
def command_line() -> Iterator[None]:
    """Address the messages within it to a person at a command line, in all threads of the process."""
    _running.append("command line")
    try:
        yield
    finally:
        _running.pop()


def argument(name: str, value: object = True) -> str:
    """An argument and its value, for a message: `resume=True` in Python, `--resume` at the command line.

    Every message that tells its reader to give an argument has it from this function. `value` may be a word in capitals
    that stands for a value, as in `data_path=PATH` and `--data_path PATH`. A message about a flag that only the command
    line has, or about code that only a program has, writes it as it is.
    """
    if not _running:
        return f"{name}={value}"
    return f"--{name}" if value is True else f"--{name} {value}"
