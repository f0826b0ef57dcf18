"""Programs of the trainers of tests, traced and compiled once in a process: a step is the same for the same parts.

Each trainer makes functions of its own, which jax has never seen. Here the functions of the trainers before are kept,
and a trainer of equal parts (the same model, loss function, optimizer, shapes and devices) gets those.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roxxel_dist.run import components, experiment
from roxxel_dist.train import programs, steps
from roxxel_dist.train.step import state
from roxxel_dist.weights import load

PLACES = (
    (steps, ("make_step", "make_eval_step")),
    (state, ("trace_module", "_init_programs")),
    (programs, ("check_update",)),
    (load, ("trace_module",)),
)
"""The modules and the functions whose results are kept."""
MOST = 50
"""Results of a function that are kept."""


READ_BY_BUILD = ("dim", "vocab_size", "dropout_rate", "seed")
"""What of a `Config` decides the model "runs:build"."""


class Kept:
    """A function whose results are kept: equal arguments give the same one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The result for equal arguments, or a new one."""
        given = (args, options)
        for known, result in self.known:
            if same(known, given):
                return result
        result = self.function(*args, **options)
        self.known = [*self.known[1 - MOST :], (given, result)]
        return result


def same(known: Any, given: Any) -> bool:
    """Whether arguments are equal. What cannot be compared, as arrays cannot, is another one."""
    try:
        return bool(known == given)
    except (TypeError, ValueError):
        return False


class KeptBuilder(Kept):
    """`model_builder`, whose results are new functions: of "runs:build" equal models have the same one."""

    def __call__(self, config: Any, *options: Any) -> Any:
        """The builder of the model of a config."""
        made = self.function(config, *options)
        if (config.model, config.parametrization) != ("runs:build", "standard"):
            return made
        given = [getattr(config, name) for name in READ_BY_BUILD]
        for known, result in self.known:
            if known == given:
                return result
        self.known = [*self.known[1 - MOST :], (given, made)]
        return made


KEPT: list[tuple[Any, str, Kept]] = [
    *((module, name, Kept(getattr(module, name))) for module, names in PLACES for name in names),
    (components, "model_builder", KeptBuilder(load.model_builder)),
]


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """Programs that are kept, for the trainers of a module."""
    with pytest.MonkeyPatch.context() as patch:
        keep(patch)
        yield


def keep(patch: pytest.MonkeyPatch) -> None:
    """The same while a patch lasts: a fixture of the whole session comes before those of a module."""
    for module, name, function in KEPT:
        patch.setattr(module, name, function)


def forget() -> None:
    """Forget all of them, as `tests/conftest.py` does where this process has become large."""
    for *_, function in KEPT:
        function.known.clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No programs that are kept: for a test that counts what is traced or compiled."""
    for module, name, function in KEPT:
        monkeypatch.setattr(module, name, function.function)


@pytest.fixture(scope="module", autouse=True)
def no_curve() -> Iterator[None]:
    """No picture of the losses at the end of each run, which takes a tenth of a second: those who ask look at one."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """The same while a patch lasts."""
    patch.setattr(experiment, "draw_curve", lambda run: "")
