"""A table of cases in one test, which tells all that is wrong in it."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def one_test(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, without an id for each case: for cases that cost little and share their fixtures.

    Every case is tried. Those that fail are raised together, each with its values as a note.
    """
    named = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [case if len(named) > 1 else (case,) for case in cases]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def each(**fixtures: Any) -> None:
            assert rows, "the table is empty"
            wrong: list[BaseException] = []
            for row in rows:
                try:
                    test(**dict(zip(named, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"of the case {row!r}")
                    wrong.append(error)
            if wrong:
                raise BaseExceptionGroup(f"{len(wrong)} of {len(rows)} cases of {test.__name__}", wrong)

        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name not in named]
        each.__signature__ = signature.replace(parameters=others)  # pyright: ignore[reportAttributeAccessIssue]
        return each

    return decorate
