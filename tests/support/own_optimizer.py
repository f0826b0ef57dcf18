"""Optimizers of a user's own, as a package on PYTHONPATH has them: some that are right, and some that are wrong."""

import jax
import jax.numpy as jnp
import optax

from roxxel_dist.train.step.by_parameter import decay_mask

NUMBER = 3


def adamw(config, learning_rate):
    """What the optimizer adamw is."""
    return optax.adamw(learning_rate, config.beta1, 0.95, weight_decay=config.weight_decay, mask=decay_mask)


def slow_adamw(config, learning_rate):
    """The same with a number of the user's."""
    return optax.chain(adamw(config, learning_rate), optax.scale(config.model_args["scale"]))


def no_transformation(config, learning_rate):
    return config.lr * learning_rate


def one_argument(config):
    return optax.adamw(config.lr)


def refusing(config, learning_rate):
    raise ValueError(f"lr is {config.lr}: it must be below 1e-9")


def branching(config, learning_rate):
    return optax.sgd(learning_rate) if learning_rate > 0 else optax.identity()


def growing(config, learning_rate):
    """Its count becomes a float with the first step."""
    return optax.GradientTransformation(
        lambda params: jnp.int32(0), lambda updates, count, params=None: (updates, count + 0.5)
    )


def line_search(config, learning_rate):
    return optax.lbfgs(learning_rate)


def drawing(config, learning_rate):
    """With a random key in its state."""
    return optax.chain(optax.add_noise(1e-3, 0.5, 7), optax.sgd(learning_rate))


def broken(config, learning_rate):
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (jax.nowhere, state))


def schedule_free_sgd(config, learning_rate):
    return optax.contrib.schedule_free(optax.sgd(learning_rate), learning_rate)
