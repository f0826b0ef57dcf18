"""The trackers that a config asks for beside the run's own files: W&B and TensorBoard."""

import importlib.util
from pathlib import Path

from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.extras import pip_install
from roxxel_dist.settings.config import Config
from roxxel_dist.train.log.base import Tracker
from roxxel_dist.train.log.tensorboard import TensorboardTracker
from roxxel_dist.train.log.wandb import WandbTracker


def check_installed(config: Config) -> None:
    """Raises UserError for a tracker whose package is not installed: a night without its files is lost."""
    for field, wanted, package in (
        ("wandb", config.wandb != "off", "wandb"),
        ("tensorboard", config.tensorboard, "tensorboardX"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            value = getattr(config, field)
            raise UserError(
                f"{field} is {value}, and the package {package} is not installed: {pip_install(field)}, or leave "
                f"{field} out"
            )


def trackers_of(config: Config, run: Path) -> list[Tracker]:
    """Those of rank 0; other ranks have none."""
    trackers = list[Tracker]()
    if is_primary() and config.wandb != "off":
        about = {"name": config.name, "notes": config.notes, "tags": config.tags}
        trackers.append(WandbTracker(run, config.wandb, config.wandb_project, **about, config=config.to_dict()))
    if is_primary() and config.tensorboard:
        trackers.append(TensorboardTracker(run, config.to_dict()))
    return trackers
