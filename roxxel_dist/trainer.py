"""The one name `Trainer` for two things: a run made of parts, and a run made from a Config."""

from typing import Any, overload

from roxxel_dist.config import Config
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.experiment import Experiment
from roxxel_dist.train.trainer import Trainer as Loop

__all__ = ["Curriculum", "Phase", "Trainer"]


class Trainer(Loop):
    """A run made of parts: `Trainer(model, optimizer, curriculum, …)`, see `train.trainer.Trainer` for what it takes.

    With a `Config` as its only argument it is the `Experiment` of that: `Trainer(config).fit("corpus.txt")`.
    """

    @overload
    def __new__(cls, config: Config, /) -> Experiment: ...
    @overload
    def __new__(cls, *parts: Any, **options: Any) -> "Trainer": ...
    def __new__(cls, *parts: Any, **options: Any) -> Any:
        """An `Experiment` for a `Config` alone; else a trainer of these parts."""
        given = [*parts, *options.values()]
        if len(given) == 1 and isinstance(given[0], Config) and set(options) <= {"config"}:
            return Experiment(given[0])
        return super().__new__(cls)
