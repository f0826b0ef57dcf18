"""The order in which the backward pass finishes the gradients of parameters, read from the loss as jax traced it."""

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Literal

Place = tuple[int, ...]
"""The number of an equation; inside a loop or a called function those of all around it, outermost first."""
_NAMES = (
    "convert_element_type reshape transpose squeeze broadcast_in_dim expand_dims slice dynamic_slice concatenate "
    "sharding_constraint copy copy_p reduce_precision stop_gradient optimization_barrier pvary pcast"
)
COPIES = frozenset(_NAMES.split(" "))
"""Equations whose result is the parameter still: it is used where that is."""
NEVER: Place = (1 << 40,)


def backward_order(jaxpr: Any, names: list[str]) -> list[str]:
    """The parameters in the order in which the backward pass finishes their gradients.

    The backward pass goes through the equations from the last to the first. The gradient of a parameter is a sum over
    all of its uses, so it is complete at its first use: those that are used first at the latest place come first.

    Args:
        jaxpr: of the loss; its first inputs are the parameters.
        names: of these.

    Returns:
        The names; those that are not used are last.
    """
    first: dict[str, Place] = {}
    _walk(jaxpr, dict(zip(jaxpr.invars, ([name] for name in names), strict=False)), (), first)
    known = [name for name in names if name in first]
    return sorted(known, key=lambda name: first[name], reverse=True) + [name for name in names if name not in first]


def _walk(jaxpr: Any, holds: Mapping[Any, list[str]], place: Place, first: dict[str, Place]) -> list[list[str]]:
    """Note the first use of each parameter; returns the parameters that the results of the jaxpr are copies of."""
    held = dict(holds)

    def of(atom: Any) -> list[str]:
        return [] if isinstance(atom, Literal) else held.get(atom, [])

    for number, eqn in enumerate(jaxpr.eqns):
        if not any(of(atom) for atom in eqn.invars):
            continue
        here = (*place, number)
        inner = [(sub, eqn.invars[len(eqn.invars) - len(sub.invars) :]) for sub in inner_jaxprs(eqn)]
        for sub, atoms in inner:
            results = _walk(sub, {var: of(atom) for var, atom in zip(sub.invars, atoms, strict=False)}, here, first)
            for var, names in zip(eqn.outvars, results, strict=False):
                held[var] = held.get(var, []) + names
        if inner:
            continue
        used = [name for atom in eqn.invars for name in of(atom)]
        if eqn.primitive.name in COPIES:
            held |= dict.fromkeys(eqn.outvars, used)
            continue
        for name in used:
            first.setdefault(name, here)
    return [of(atom) for atom in jaxpr.outvars]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs inside an equation that take the last of its inputs, all of them in most."""
    found: list[Any] = []
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(each, "jaxpr", each)
            if hasattr(sub, "eqns") and len(sub.invars) <= len(eqn.invars):
                found.append(sub)
    return found


def coarsest(jaxpr: Any) -> float:
    """The unit roundoff of the coarsest floating type that a jaxpr computes in: 2^-24 of float32, 2^-8 of bfloat16."""
    text = str(jaxpr)
    if "bf16[" in text:
        return 2.0**-8
    return 2.0**-11 if "f16[" in text else 2.0**-24
