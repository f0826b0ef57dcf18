"""roxxel-dist: launch, feed and train language models in JAX and Flax NNX on many hosts.

The public names are imported when they are first used, so that `import roxxel_dist` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # for type checkers it is true; `typing` itself would delay the moment when Ctrl-C is heard

_WHERE = {
    "Roxxel": "data.dataset",
    "Phase": "curriculum.phases",
    "Curriculum": "curriculum.phases",
    "Plan": "curriculum.plan",
    "Logger": "train.log.choose",
    "Trainer": "run.trainer",
    "Checkpointer": "train.checkpointer",
    "Config": "settings.config",
    "Experiment": "run.experiment",
    "Generator": "weights.generator",
    "Transformer": "model.transformer",
    "UserError": "process.exit_codes",
    "attention": "model.attention.attend",
    "check_layouts": "layouts.check",
    "initialize": "cluster.distributed",
    "load_run": "weights.load",
    "read_run": "view.read",
    "read_study": "view.read",
    "token_losses": "model.loss",
}

if TYPE_CHECKING:
    from typing import Any

    from roxxel_dist.cluster.distributed import initialize as initialize
    from roxxel_dist.curriculum.phases import Curriculum as Curriculum
    from roxxel_dist.curriculum.phases import Phase as Phase
    from roxxel_dist.curriculum.plan import Plan as Plan
    from roxxel_dist.data.dataset import Roxxel as Roxxel
    from roxxel_dist.layouts.check import check_layouts as check_layouts
    from roxxel_dist.model.attention.attend import attention as attention
    from roxxel_dist.model.loss import token_losses as token_losses
    from roxxel_dist.model.transformer import Transformer as Transformer
    from roxxel_dist.process.exit_codes import UserError as UserError
    from roxxel_dist.run.experiment import Experiment as Experiment
    from roxxel_dist.run.trainer import Trainer as Trainer
    from roxxel_dist.settings.config import Config as Config
    from roxxel_dist.train.checkpointer import Checkpointer as Checkpointer
    from roxxel_dist.train.log.choose import Logger as Logger
    from roxxel_dist.view.read import read_run as read_run
    from roxxel_dist.view.read import read_study as read_study
    from roxxel_dist.weights.generator import Generator as Generator
    from roxxel_dist.weights.load import load_run as load_run

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # slow, and seldom needed

        return version("roxxel-dist")
    if name in _WHERE:
        import importlib

        from roxxel_dist.cluster.versions import check_versions

        check_versions()
        globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
