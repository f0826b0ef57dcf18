"""What code of the user's own makes before a step and after its gradient, in a layout: as on one device?

Before it the weights: jax draws the same numbers on any devices, so they differ where the code that makes the model
asks how many there are. After it the update, of the very gradient of one device: so what differs is the optimizer's, a
norm of one device's part, or an update that one copy alone gets.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from roxxel_dist.layouts.compare import INITIAL, UPDATE, Difference, compared, ratio_and_angle, share_of
from roxxel_dist.layouts.device_count import devices_of
from roxxel_dist.layouts.layout import Layout, everywhere
from roxxel_dist.layouts.one_step import Arrays, Outcome, Weights, compile_step, copies_of
from roxxel_dist.layouts.reference import SAMPLES, moved, norm, of_samples, wide
from roxxel_dist.model.split import trace_module
from roxxel_dist.train.step.optimizer import Optimizer, for_model, updates_of
from roxxel_dist.train.step.state import StateBuilder

NEAR = 1e-5
"""Of the norm of a parameter: more than rounding, and less than any other numbers."""
MEANING = "its numbers depend on the devices: draw the whole of it with one key, and let jax divide it"
UNIT = 2.0**-24


class InitialCheck:
    """How what builds a model makes it on one device."""

    def __init__(self, build: Callable[[], nnx.Module], single: Layout) -> None:
        self._build, self._single, self._trace = build, single, _trace(build, single)

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters in `order` that begin with other values in a layout; computed only if its trace differs."""
        if _same(self._trace, _trace(self._build, layout)):
            return []
        there, here = _values(self._build, self._single), _values(self._build, layout)
        each = (_difference(INITIAL + name, here[name], there[name]) for name in order)
        return [difference for difference in each if difference.distance > difference.bound]


def _difference(what: str, here: np.ndarray, there: np.ndarray) -> Difference:
    ratio, angle = ratio_and_angle(here, there)
    return Difference(
        what=what,
        ratio=ratio,
        angle_deg=angle,
        share=share_of(norm(here - there), norm(there)),
        distance=norm(here - there),
        bound=NEAR * norm(there),
        is_number=here.size == 1,
        meaning=MEANING,
    )


def _trace(build: Callable[[], nnx.Module], layout: Layout) -> ClosedJaxpr:
    with devices_of(layout.mesh):
        return trace_module(build, layout.mesh).jaxpr


def _same(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    return str(one) == str(other) and all(map(np.array_equal, one.consts, other.consts))


def _values(build: Callable[[], nnx.Module], layout: Layout) -> dict[str, Any]:
    with devices_of(layout.mesh):
        state, _ = StateBuilder.of_model(build, lambda params: {}, layout.mesh).build()
    return {name: wide(np.asarray(leaf)) for name, leaf in state.params.items()}


class UpdateCheck:
    """The update on one device of its gradient, float32 by name; `steps` is of the run, in whose middle it is."""

    def __init__(
        self, model: Any, optimizer: Optimizer, single: Layout, weights: Weights, gradient: Arrays, steps: int
    ) -> None:
        self._program, self._gradient = partial(_program, model, optimizer, weights, steps), gradient
        apply = self._program(single)
        samples = [apply(moved(gradient, UNIT, seed)) for seed in range(SAMPLES)]
        terms = sum(value.size for value in gradient.values())
        self._reference = of_samples(apply(gradient).values, samples, UNIT, terms, {})

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters whose update differs in a layout; what the optimizer raises there passes."""
        outcome = self._program(layout)(self._gradient)
        return compared([UPDATE + name for name in order], outcome, self._reference, layout)[0]


def _program(
    model: Any, optimizer: Optimizer, weights: Weights, steps: int, layout: Layout
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
