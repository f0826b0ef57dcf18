"""The weights that a model of the user's own begins with, in a layout: those of one device.

jax draws the same numbers on any devices, so they differ where the code that makes the model asks how many there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from roxxel_dist.layouts.compare import INITIAL, Difference, ratio_and_angle, share_of
from roxxel_dist.layouts.device_count import devices_of
from roxxel_dist.layouts.layout import Layout
from roxxel_dist.layouts.reference import norm, wide
from roxxel_dist.model.split import trace_module
from roxxel_dist.train.step.state import StateBuilder

NEAR = 1e-5
"""Of the norm of a parameter: more than rounding, and less than any other numbers."""
MEANING = "its numbers depend on the devices: draw the whole of it with one key, and let jax divide it"


@dataclass(frozen=True, kw_only=True)
class InitialCheck:
    """How a model is made on one device."""

    build: Callable[[], nnx.Module]
    single: Layout
    trace: ClosedJaxpr

    @classmethod
    def made(cls, build: Callable[[], nnx.Module], single: Layout) -> "InitialCheck":
        """For what builds the model, and one device."""
        return cls(build=build, single=single, trace=_trace(build, single))

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters in `order` that begin with other values in a layout; computed only if its trace differs."""
        if _same(self.trace, _trace(self.build, layout)):
            return []
        there, here = _values(self.build, self.single), _values(self.build, layout)
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
