"""Work of a step that several devices do: what XLA could not cut of a model of the user's own."""

from typing import Any

import jax
from jax.sharding import Mesh

from roxxel_dist.devices.program_cost import program_cost
from roxxel_dist.devices.traced_flops import traced_flops

MOST = 1.2
"""Times the work of one device that all may do together; padding of odd lengths is within it."""


def work_ratio(program: Any, jitted: Any, args: tuple[Any, ...], mesh: Mesh) -> float | None:
    """FLOPs of all devices over those of the step before it is divided; None where neither is known.

    Args:
        program: compiled for the devices of `mesh`.
        jitted: what it was made from; it is traced again.
        args: `jax.ShapeDtypeStruct`s with shardings.
        mesh: of the phase.
    """
    with jax.set_mesh(mesh):
        whole = traced_flops(jitted.trace(*args).jaxpr)
    here = program_cost(program.as_text(), [device.process_index for device in mesh.devices.flat]).flops
    return here * mesh.size / whole if here and whole else None
