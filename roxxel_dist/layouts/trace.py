"""The loss of a model as jax traces it on one device; nothing is computed."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from roxxel_dist.layouts.device_count import devices_of
from roxxel_dist.layouts.layout import Layout
from roxxel_dist.layouts.one_step import Weights
from roxxel_dist.model.split import Leaves
from roxxel_dist.train.step.state import StateBuilder
from roxxel_dist.train.step.step import LossFn, measure


def loss_jaxpr(model: Any, loss_fn: LossFn, layout: Layout, weights: Weights, batch: Any) -> Any:
    """The jaxpr of the minimized loss; its first inputs are named by `first_inputs`."""
    with jax.set_mesh(layout.mesh), devices_of(layout.mesh):
        builder = StateBuilder.of_model(model, lambda params: {}, layout.mesh)
        split, rest = builder.split, builder.shapes[0].rest

        def loss_of(params: Leaves, rest: Leaves, hparams: Leaves, batch: Any) -> jax.Array:
            return measure(loss_fn, split.merge(params, rest, hparams, training=True), batch).minimized

        def shape(value: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(value.shape, value.dtype)

        hparams = {name: jnp.asarray(value) for name, value in weights.hparams.items()}
        args = weights.params, rest, hparams, batch
        return jax.make_jaxpr(loss_of)(*jax.tree.map(shape, args)).jaxpr


def first_inputs(weights: Weights) -> list[str]:
    """The names of the first inputs of `loss_jaxpr`: the parameters, and then the rest of the state, each sorted."""
    return [*sorted(weights.params), *sorted(weights.rest)]


def text_of(jaxpr: Any) -> str:
    """A jaxpr as text, without the addresses of functions, which are others in each trace."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
