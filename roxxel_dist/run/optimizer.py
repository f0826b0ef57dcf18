"""The optimizer of a Config: one by name, or what a function of the user's makes. Nothing is on a device yet."""

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from roxxel_dist.model.user_code import call_function, import_function, is_function
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.settings.training import SCHEDULE_FREE, OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer
from roxxel_dist.weights.load import parameter_widths


def build_optimizer(config: Config, build: Callable[[], nnx.Module]) -> NamedOptimizer:
    """The optimizer of a config, for the model that `build` makes.

    Raises ValueError where a function of the user's is not found, does not take (config, learning_rate), returns no
    optax transformation, or is named together with mup, which would not know its update.
    """
    settings = config.part(OptimizerConfig)
    if settings.optimizer == SCHEDULE_FREE and config.parametrization != "standard":
        raise UserError(
            f"parametrization is {config.parametrization}, and optimizer is {settings.optimizer}, whose average would "
            f"not have the rates by width: use adamw or muon, or leave parametrization out"
        )
    if not is_function(settings.optimizer):
        return NamedOptimizer(settings, widths=parameter_widths(config, build))
    if config.parametrization != "standard":
        raise UserError(
            f"parametrization is {config.parametrization}, and optimizer is {settings.optimizer!r}: how its updates "
            f"grow with the width is not known, so leave parametrization out, or name one of our optimizers"
        )
    make = import_function("optimizer", settings.optimizer)

    def own(rate: jax.Array) -> optax.GradientTransformation:
        mine = copy.deepcopy(config)  # the user's function may change it
        mine.model_args = mine.model_args or {}
        form = "def build(config, learning_rate)"
        made = call_function("optimizer", settings.optimizer, make, form, mine, rate)
        if isinstance(made, optax.GradientTransformation):
            return made
        raise UserError(
            f"optimizer is {settings.optimizer!r}: it returned a {type(made).__name__}, and must return an "
            f"optax.GradientTransformation"
        )

    jax.eval_shape(lambda rate: own(rate) and rate, jnp.float32(0))  # find a mistake now: the rate of a step is traced
    return NamedOptimizer(settings, own=own)
