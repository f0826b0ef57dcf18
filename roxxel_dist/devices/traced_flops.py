"""The FLOPs of a traced program, before any compiler divides it among devices: what its compiled form is held against.

The rules are those of `program_cost`, which counts the same in a compiled program.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from roxxel_dist.devices.program_cost import cudnn_flops, mean_trips, splash_flops


def flops_of(jitted: Any, args: Sequence[Any], mesh: Mesh) -> float:
    """FLOPs of a jitted function for such (abstract) arguments on a mesh: it is traced, and not compiled."""
    with jax.set_mesh(mesh):
        return traced_flops(jitted.trace(*args).jaxpr)


def traced_flops(jaxpr: Any, trips: float = 1) -> float:
    """FLOPs of matrix products, convolutions and attention kernels, a multiply and an add as two.

    Args:
        jaxpr: `jax.stages.Traced.jaxpr`, or one within it.
        trips: of the loop that it is in.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    total, used = 0.0, set(map(id, jaxpr.outvars))
    for each in reversed(jaxpr.eqns):  # what no result needs, no compiler keeps
        if each.effects or not used.isdisjoint(map(id, each.outvars)):
            used.update(map(id, each.invars))
            total += _of_equation(each, trips)
    return total


def _of_equation(eqn: Any, trips: float) -> float:
    count = COUNTS.get(eqn.primitive.name)
    if count is not None:
        shapes = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
        out = getattr(eqn.outvars[0].aval, "shape", ())
        return 2.0 * math.prod(out) * count(eqn.params, shapes)
    return _of_kernel(eqn) or _of_inner(eqn, trips)


def _of_kernel(eqn: Any) -> float:
    """Of an attention kernel; else 0."""
    name, params = eqn.primitive.name, eqn.params
    shapes = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
    if name == "pallas_call":
        kernel, estimate = str(params.get("name") or params.get("name_and_src_info")), params.get("cost_estimate")
        if "splash_mha" in kernel or estimate is None:
            return splash_flops(kernel, shapes) if "splash_mha" in kernel else 0.0
        return float(estimate.flops)
    if name.startswith("dot_product_attention_"):
        window, causal = int(params.get("sliding_window_length") or 0), "CAUSAL" in str(params.get("mask_type"))
        return cudnn_flops(shapes[0], shapes[1], "bwd" in name, causal, window)
    return 0.0


def _of_inner(eqn: Any, trips: float) -> float:
    """Of the programs that an equation runs."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return params["length"] * traced_flops(params["jaxpr"], params["length"])
        case "while":
            mean = mean_trips(str(eqn.source_info.name_stack))
            count = (trips + 1) / 2 if mean is None else mean
            return count * traced_flops(params["body_jaxpr"], count)
        case "cond":
            return max(traced_flops(branch, trips) for branch in params["branches"])
        case "shard_map":
            # Its name differs between versions of jax.
            axes = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]
            devices = math.prod(params["mesh"].shape[axis] for axis in axes)
            return devices * traced_flops(params["jaxpr"], trips)
        case _:
            return sum(traced_flops(each, trips) for each in _programs(params.values()))


def _dot_contraction(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    return math.prod(shapes[0][i] for i in contracted)


def _convolution_contraction(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> float:
    return math.prod(shapes[1]) / shapes[1][params["dimension_numbers"].rhs_spec[0]]


def _ragged_contraction(params: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> float:
    numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    ragged = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    (contracted, _), _ = numbers
    size = math.prod(shapes[0][i] for i in contracted)
    # Where the ragged dimension is contracted, each of its rows is in one group alone: the groups share them.
    return size // shapes[2][-1] if set(ragged) & set(contracted) else size


def _programs(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Jaxpr | ClosedJaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


COUNTS = {
    "dot_general": _dot_contraction,
    "ragged_dot": _ragged_contraction,
    "ragged_dot_general": _ragged_contraction,
    "conv_general_dilated": _convolution_contraction,
}
"""Multiplications for each number of the result."""
