"""What code of the user's own does beside the gradient of a step: its draws, the weights it makes, its update.

The loss is traced on one device, and nothing is computed: that shows the order in which the backward pass finishes the
gradients of parameters, and the lines of the user's code that draw random numbers. Before a step come the weights: jax
draws the same numbers on any devices, so they differ where the code that makes the model asks how many there are. After
it comes the update, of the very gradient of one device: so what differs is the optimizer's, a norm of one device's
part, or an update that one copy alone gets.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Literal

from roxxel_dist.layouts.compare import INITIAL, UPDATE, Difference, compare_results, ratio_and_angle, share_of
from roxxel_dist.layouts.layout import Layout, devices_of, place_whole
from roxxel_dist.layouts.one_step import Arrays, Outcome, Weights, compile_step, copies_of
from roxxel_dist.layouts.reference import SAMPLES, norm, perturb, reference_of_samples, to_float64
from roxxel_dist.model.split import Leaves, trace_module
from roxxel_dist.train.step.optimizer import Optimizer, for_model, updates_of
from roxxel_dist.train.step.state import StateBuilder
from roxxel_dist.train.step.step import LossFn, measure

Place = tuple[int, ...]
"""The number of an equation; inside a loop or a called function those of all around it, outermost first."""
_NAMES = (
    "convert_element_type reshape transpose squeeze broadcast_in_dim expand_dims slice dynamic_slice concatenate "
    "sharding_constraint copy copy_p reduce_precision stop_gradient optimization_barrier pvary pcast"
)
COPIES = frozenset(_NAMES.split(" "))
"""Equations whose result is the parameter still: it is used where that is."""
PACKAGE = Path(__file__).parents[1]
CALLS = ("jit", "pjit")
"""Equations whose inside jax keeps from an earlier call, so its lines are those of that call."""


def backward_order(jaxpr: Any, names: list[str]) -> list[str]:
    """The named parameters, the first inputs of the loss's jaxpr, in the order in which the backward pass finishes
    their gradients; those that are not used are last.

    The backward pass goes through the equations from the last to the first. The gradient of a parameter is a sum over
    all of its uses, so it is complete at its first use: those that are used first at the latest place come first.
    """
    first: dict[str, Place] = {}
    _walk_uses(jaxpr, dict(zip(jaxpr.invars, ([name] for name in names), strict=False)), (), first)
    known = [name for name in names if name in first]
    return sorted(known, key=lambda name: first[name], reverse=True) + [name for name in names if name not in first]


def _walk_uses(jaxpr: Any, holds: Mapping[Any, list[str]], place: Place, first: dict[str, Place]) -> list[list[str]]:
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
            results = _walk_uses(
                sub, {var: of(atom) for var, atom in zip(sub.invars, atoms, strict=False)}, here, first
            )
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


def loss_jaxpr(model: Any, loss_fn: LossFn, layout: Layout, weights: Weights, batch: Any) -> Any:
    """The jaxpr of the minimized loss; its first inputs are the parameters, and then the rest of the state, sorted."""
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


def text_of(jaxpr: Any) -> str:
    """A jaxpr as text, without the addresses of functions, which are others in each trace."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


def draw_lines(jaxpr: Any, names: Sequence[str], streams: frozenset[str]) -> dict[str, list[str]]:
    """stream -> "net.py:12" of each draw from it, in the order of the loss, without those of packages; `names` are
    those of the first inputs of its jaxpr, `streams` the random keys among them."""
    found: dict[str, list[str]] = {}
    held = {var: {name} for var, name in zip(jaxpr.invars, names, strict=False) if name in streams}
    _walk_draws(jaxpr, held, "", found)
    return {name: list(dict.fromkeys(line for line in lines if line)) for name, lines in found.items()}


def _walk_draws(jaxpr: Any, held: Mapping[Any, set[str]], call: str, found: dict[str, list[str]]) -> list[set[str]]:
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
            results = _walk_draws(sub, own, line if eqn.primitive.name in CALLS else call, found)
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


NEAR = 1e-5
"""Of the norm of a parameter: more than rounding, and less than any other numbers."""
MEANING = "its numbers depend on the devices: draw the whole of it with one key, and let jax divide it"
UNIT = 2.0**-24
MESH_OF_CALLS = re.compile(r"ctx_mesh=Mesh\([^()]*\([^()]*\)\)")
"""In the text of a jaxpr."""


class InitialCheck:
    """How what builds a model makes it on one device."""

    def __init__(self, build: Callable[[], nnx.Module], single: Layout) -> None:
        self._build, self._single, self._trace = build, single, _trace(build, single)

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters in `order` that begin with other values in a layout; computed only if its trace differs."""
        # Without this setting jax draws other numbers for an array that is divided in another way, by the same trace.
        is_same_divided = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        if is_same_divided and _same(self._trace, _trace(self._build, layout)):
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


def _trace(build: Callable[[], nnx.Module], layout: Layout) -> tuple[str, Sequence[Any]]:
    """What `build` computes, and its constants. Each function that it calls names the mesh that is set: that is left
    out, for what uses a mesh names its own."""
    with devices_of(layout.mesh):
        traced = trace_module(build, layout.mesh).jaxpr
    return MESH_OF_CALLS.sub("", text_of(traced)), traced.consts


def _same(one: tuple[str, Sequence[Any]], other: tuple[str, Sequence[Any]]) -> bool:
    return one[0] == other[0] and all(map(np.array_equal, one[1], other[1]))


def _values(build: Callable[[], nnx.Module], layout: Layout) -> dict[str, Any]:
    with devices_of(layout.mesh):
        state, _ = StateBuilder.of_model(build, lambda params: {}, layout.mesh).build()
    return {name: to_float64(np.asarray(leaf)) for name, leaf in state.params.items()}


class UpdateCheck:
    """The update on one device of its gradient, float32 by name; `steps` is of the run, in whose middle it is."""

    def __init__(
        self, model: Any, optimizer: Optimizer, single: Layout, weights: Weights, gradient: Arrays, steps: int
    ) -> None:
        self._program, self._gradient = partial(_program, model, optimizer, weights, steps), gradient
        apply = self._program(single)
        samples = [apply(perturb(gradient, UNIT, seed)) for seed in range(SAMPLES)]
        terms = sum(value.size for value in gradient.values())
        self._reference = reference_of_samples(apply(gradient).values, samples, UNIT, terms, {})

    def differences(self, layout: Layout, order: Sequence[str]) -> list[Difference]:
        """The parameters whose update differs in a layout; what the optimizer raises there passes."""
        outcome = self._program(layout)(self._gradient)
        return compare_results([UPDATE + name for name in order], outcome, self._reference, layout)[0]


def _program(
    model: Any, optimizer: Optimizer, weights: Weights, steps: int, layout: Layout
) -> Callable[[Mapping[str, np.ndarray]], Outcome]:
    with devices_of(layout.mesh):
        builder = StateBuilder.of_model(model, lambda params: {}, layout.mesh, fsdp=layout.fsdp, dtype=jnp.float32)
    own, params = for_model(optimizer, builder.split.params.matrices), builder.shapes[0].params

    def update(params: Any, gradient: Any, numbers: Any) -> Any:
        transformation = own.build(numbers, steps // 2)
        return updates_of(transformation, gradient, transformation.init(params), params, jnp.float32(1))[0]

    whole = place_whole(layout.mesh)
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
