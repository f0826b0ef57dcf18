"""Where a model draws random numbers: the lines of the user's code, by random stream, read from the loss as traced."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from roxxel_dist.layouts.order import inner_jaxprs

PACKAGE = Path(__file__).parents[1]
CALLS = ("jit", "pjit")
"""Equations whose inside jax keeps from an earlier call, so its lines are those of that call."""


def draw_lines(jaxpr: Any, names: Sequence[str], streams: frozenset[str]) -> dict[str, list[str]]:
    """stream -> "net.py:12" of each draw from it, in the order of the loss; without those of packages.

    Args:
        jaxpr: of the loss.
        names: of its first inputs.
        streams: those of them that are random keys.
    """
    found: dict[str, list[str]] = {}
    held = {var: {name} for var, name in zip(jaxpr.invars, names, strict=False) if name in streams}
    _walk(jaxpr, held, "", found)
    return {name: list(dict.fromkeys(line for line in lines if line)) for name, lines in found.items()}


def _walk(jaxpr: Any, held: Mapping[Any, set[str]], call: str, found: dict[str, list[str]]) -> list[set[str]]:
    """Note each draw; returns the streams that the results of the jaxpr are keys of. `call`: the line of a call."""
    keys = dict(held)

    def of(atom: Any) -> set[str]:
        return set() if isinstance(atom, Literal) else keys.get(atom, set())

    for eqn in jaxpr.eqns:
        streams = set[str]().union(*map(of, eqn.invars))
        if not streams:
            continue
        line = call or _line(eqn)
        if eqn.primitive.name == "random_bits":
            for name in streams:
                found.setdefault(name, []).append(line)
            continue
        subs = inner_jaxprs(eqn)
        for sub in subs:
            atoms = eqn.invars[len(eqn.invars) - len(sub.invars) :]
            own = {var: of(atom) for var, atom in zip(sub.invars, atoms, strict=False)}
            results = _walk(sub, own, line if eqn.primitive.name in CALLS else call, found)
            for var, names in zip(eqn.outvars, results, strict=False):
                keys[var] = keys.get(var, set()) | names
        if not subs:
            keys |= {var: streams for var in eqn.outvars if _may_be_key(var.aval)}
    return [of(atom) for atom in jaxpr.outvars]


def _may_be_key(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32)


def _line(eqn: Any) -> str:
    """The line of the user's code that made an equation; empty where packages alone did."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        path = Path(frame.file_name)
        if path.is_file() and "site-packages" not in path.parts and PACKAGE not in path.parents:
            return f"{path.name}:{frame.line_num}"
    return ""
