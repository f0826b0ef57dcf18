"""The FLOPs of a traced program, before any compiler divides it among devices: what its compiled form is held against.

The rules are those of `program_cost`, which counts the same in a compiled program.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products of queries x keys in each kernel of splash attention; the backward ones compute the scores again."""
MEAN_TRIPS = "mean_trips_"
"""The `jax.named_scope` of a loop whose trips only the data decides is this and a number: how often it runs on average,
over all devices and over the loops that it is in."""


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
    """FLOPs of an attention kernel; else 0."""
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
    """FLOPs of the programs that an equation runs."""
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


def mean_trips(scope: str) -> float | None:
    """What the innermost scope of a loop says of its trips; transformations of jax put it in parentheses."""
    found = re.search(MEAN_TRIPS + r"([\d.]+)\)*$", scope)
    return float(found[1]) if found else None


def splash_flops(name: str, operands: Sequence[Sequence[int]]) -> float:
    """FLOPs of a kernel of splash attention, from the shapes of its operands: half of all pairs, as a causal mask has,
    also of the queries of a device in a cut row; or the pairs of the blocks of keys that a window leaves."""
    kind = next((kind for kind in ("dkv", "dq", "fwd") if kind in name), "fwd")
    # The first arrays of four dimensions, or of three with as many channels, are queries and keys: [B, H, L, K] and
    # [B, G, S, K], or without B. Before them are tables of blocks, [1, blocks, blocks].
    wide = [shape for shape in operands if len(shape) >= 3 and shape[-1] and shape[-2] >= 128]
    if not wide:
        return 0.0
    *many, length, size = wide[0]
    pairs = length * (wide[1][-2] if len(wide) > 1 else length) / 2
    blocks = next((shape for shape in operands if len(shape) == 3 and shape[-2] * 128 <= length), None)
    if blocks is not None and blocks[-1] < blocks[-2]:
        pairs = min(pairs, length * blocks[-1] * (length / blocks[-2]))
    return 2.0 * SPLASH_PRODUCTS[kind] * math.prod(many) * pairs * size


def cudnn_flops(q: Sequence[int], k: Sequence[int], backward: bool, causal: bool, window: int) -> float:
    """FLOPs of cuDNN's attention for queries [B, L, H, K] and keys [B, S, G, K], whose backward pass computes the
    scores again; `window` is 0 for none. A window is causal: one of the whole row leaves as many pairs as none."""
    rows, length, heads, size = q
    seen = min(window, length)
    pairs = length * seen - seen**2 / 2 if window else length * k[1] / (2 if causal else 1)
    return 2.0 * (5 if backward else 2) * rows * heads * pairs * size
