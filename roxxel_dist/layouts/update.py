"""The update of an optimizer of the user's own, in a layout, of the very gradient of one device.

So what differs is the optimizer's: a norm of one device's part, or an update that one copy alone gets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.layouts.compare import UPDATE, Difference, compared
from roxxel_dist.layouts.device_count import devices_of
from roxxel_dist.layouts.layout import Layout, everywhere
from roxxel_dist.layouts.one_step import Arrays, Outcome, Weights, compile_step, copies_of
from roxxel_dist.layouts.reference import SAMPLES, Reference, moved, of_samples
from roxxel_dist.train.step.optimizer import Optimizer, for_model, updates_of
from roxxel_dist.train.step.state import StateBuilder

UNIT = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class UpdateCheck:
    """The update on one device, and what makes it elsewhere."""

    model: nnx.Module | Callable[[], nnx.Module]
    optimizer: Optimizer
    weights: Weights
    gradient: Arrays
    steps: int
    reference: Reference

    @classmethod
    def made(
        cls, model: Any, optimizer: Optimizer, layout: Layout, weights: Weights, gradient: Arrays, steps: int
    ) -> "UpdateCheck":
        """For the gradient of one device, float32 by name; `steps` is of the run, in whose middle the update is."""
        apply = _program(model, optimizer, layout, weights, steps)
        samples = [apply(moved(gradient, UNIT, seed)) for seed in range(SAMPLES)]
        terms = sum(value.size for value in gradient.values())
        reference = of_samples(apply(gradient).values, samples, UNIT, terms, {})
        return cls(
            model=model, optimizer=optimizer, weights=weights, gradient=gradient, steps=steps, reference=reference
        )

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters whose update differs in a layout; what the optimizer raises there passes."""
        outcome = _program(self.model, self.optimizer, layout, self.weights, self.steps)(self.gradient)
        return compared([UPDATE + name for name in order], outcome, self.reference, layout)[0]


def _program(
    model: Any, optimizer: Optimizer, layout: Layout, weights: Weights, steps: int
) -> Callable[[Mapping[str, np.ndarray]], Outcome]:
    with devices_of(layout.mesh):
        builder = StateBuilder.of_model(model, lambda params: {}, layout.mesh, fsdp=layout.fsdp, dtype=jnp.float32)
    own, params = for_model(optimizer, builder.split.params.matrices), builder.shapes[0].params

    def update(params: Any, gradient: Any, numbers: Any) -> Any:
        transformation = own.build(numbers, steps // 2)
        return updates_of(transformation, gradient, transformation.init(params), params, jnp.float32(1))[0]

    whole = everywhere(layout.mesh)
    numbers = {name: np.float32(value) for name, value in own.settings(steps).items()}
    shapes = {name: jax.ShapeDtypeStruct((), np.float32, sharding=whole) for name in numbers}
    jitted = jax.jit(update, out_shardings={name: like.sharding for name, like in params.items()})
    with devices_of(layout.mesh):
        program = compile_step(jitted, (params, params, shapes), layout.mesh)

    def place(values: Mapping[str, np.ndarray]) -> Any:
        return {name: jax.device_put(values[name], like.sharding) for name, like in params.items()}

    def apply(gradient: Mapping[str, np.ndarray]) -> Outcome:
        updates = program(place(weights.params), place(gradient), jax.device_put(numbers, whole))
        each = {UPDATE + name: copies_of(leaf) for name, leaf in updates.items()}
        copies = {name: found for name, found in each.items() if len(found) > 1}
        return Outcome(values={name: found[0] for name, found in each.items()}, copies=copies, drawn={})

    return apply
