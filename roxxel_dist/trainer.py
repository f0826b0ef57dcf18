"""The Trainer, and the curriculum that it takes."""

from roxxel_dist.run.trainer import Curriculum, Phase, Trainer

__all__ = ["Curriculum", "Phase", "Trainer"]
