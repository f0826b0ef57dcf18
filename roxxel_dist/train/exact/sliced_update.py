"""An update of which each device computes its slices, with the bits of one that computes the whole.

The function of the whole arrays is traced once. What takes numbers at the same place of arrays that are cut alike stays
in slices. Anything else (a norm, a product of matrices, a mean of rows) takes whole arrays: their slices are gathered,
and every device computes it. So any optimizer can be cut, one of the user's own too. The function is split into stages,
each a program of one device, before which arrays are gathered: no more at a time than the largest one has, so that a
device never holds the gradient as a whole.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from roxxel_dist.train.exact.slices import Cut, Gather
from roxxel_dist.train.step.compile import Compile, CompileForEach

ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pow",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)
"""Primitives of jax whose result at a place depends on their arguments at that place, or on scalars."""
PRODUCTS = ("mul", "square", "integer_pow")
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of primitives that call a function once, such as that of `jax.jit`."""
INLINED = frozenset(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat"))
GATHERED_AT_LEAST = 1 << 24
"""Bytes that may be gathered at a time however small the arrays are."""


Key = tuple[int, int | None]
"""(a value, the dimension along which a device has its slice of it; None: it has the whole)."""


class Operation(NamedTuple):
    """A primitive of the traced function, with numbers of values for its variables."""

    eqn: Any
    """None: the result is the input, cut or whole as it is wanted."""
    inputs: list[Any]
    """Numbers of values, or constants."""
    outputs: list[int]

    @property
    def values(self) -> list[int]:
        """Of the inputs, those that are no constants."""
        return [value for value in self.inputs if isinstance(value, int)]

    @property
    def is_elementwise(self) -> bool:
        """Whether a result at a place depends on the inputs at that place alone."""
        return self.eqn is None or self.eqn.primitive.name in ELEMENTWISE


@dataclass
class Trace:
    """A function as a list of operations on numbered values, calls of functions inlined."""

    shapes: list[Any] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)

    def value(self, shape: Any) -> int:
        """The number of a new value."""
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def shape(self, value: Any) -> tuple[int, ...]:
        """Of a value or a constant."""
        return tuple((self.shapes[value] if isinstance(value, int) else value.aval).shape)

    def size(self, value: int) -> int:
        """Bytes of a whole value."""
        return math.prod(self.shape(value)) * self.shapes[value].dtype.itemsize

    def inline(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """The values of the results of a function of these values."""
        jaxpr, known = closed.jaxpr, dict[Any, Any]()
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            known[variable] = self.value(variable.aval)
            self.constants[known[variable]] = constant
        known |= zip(jaxpr.invars, inputs, strict=True)

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            args = [read(atom) for atom in eqn.invars]
            inner: Any = next((eqn.params[name] for name in CALLS if name in eqn.params), None)
            if eqn.primitive.name in INLINED and inner is not None:
                results = self.inline(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()), args)
            else:
                results = [self.value(variable.aval) for variable in eqn.outvars]
                self.operations.append(Operation(eqn, args, results))
            known |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in jaxpr.outvars]


class Plan:
    """Which values are cut, and which operations take whole ones.

    Attributes:
        operations: those of the trace, and what makes the results cut as they are wanted.
        cuts: of a value that is cut, the dimension.
        uniform: the scalar of values that have it at all places. These are never kept.
        whole: of each operation, the values that are cut and that it needs whole.
        kept: the values of the results.
        results: the same as a set.
    """

    def __init__(
        self, trace: Trace, cuts: dict[int, int], results: Sequence[Any], wanted: Sequence[int | None]
    ) -> None:
        self.trace, self.cuts = trace, dict(cuts)
        self.uniform: dict[int, Any] = {}
        self.whole: list[set[int]] = []
        self.operations: list[Operation] = []
        for operation in trace.operations:
            source = operation.inputs[0] if operation.inputs else None
            if operation.eqn.primitive.name == "broadcast_in_dim" and trace.shape(source) == ():
                self.uniform[operation.outputs[0]] = source
            else:
                self._add(operation, self._cut_of(operation))
        self.kept: list[int] = []
        for value, dimension in zip(results, wanted, strict=True):
            kept = value
            ready = isinstance(value, int) and value not in self.uniform and self.cuts.get(value) == dimension
            if not ready or value in self.kept:  # two results are two arrays: one of them may be donated
                kept = trace.value(trace.shapes[value] if isinstance(value, int) else value.aval)
                self._add(Operation(None, [value], [kept]), dimension)
            self.kept.append(kept)
        self.results: set[int] = {*self.kept}
        self._compute_whole()
        self._compute_slices()

    def _add(self, operation: Operation, dimension: int | None) -> None:
        self.operations.append(operation)
        self.whole.append(set() if dimension is not None else {i for i in operation.values if i in self.cuts})
        if dimension is not None:
            self.cuts |= dict.fromkeys(operation.outputs, dimension)

    def _cut_of(self, operation: Operation) -> int | None:
        """The dimension along which the results of an operation are cut; None: it computes whole arrays."""
        cuts = {self.cuts[value] for value in operation.values if value in self.cuts}
        if len(cuts) != 1 or not operation.is_elementwise:
            return None
        shapes = {self.trace.shape(value) for value in operation.inputs} - {()}
        return cuts.pop() if len(shapes) == 1 else None

    def _compute_whole(self) -> None:
        """Of operations whose results are taken whole alone, gather the one input that is cut in place of these: in
        one program with what takes them."""
        takers = self.takers()
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            cut = {value for value in operation.values if value in self.cuts}
            if self.whole[number] or len(cut) != 1:
                continue
            if operation.eqn is not None and operation.eqn.primitive.name == "convert_element_type":
                continue  # XLA leaves out that a number was rounded, if it sees that before it is made wide again
            taken = [value in self.whole[n] for value in operation.outputs for n in takers.get(value, ())]
            if taken and all(taken) and self.results.isdisjoint(operation.outputs):
                self.whole[number] = cut
                for value in operation.outputs:
                    del self.cuts[value]
                    for taker in takers[value]:
                        self.whole[taker].discard(value)

    def _compute_slices(self) -> None:
        """Operations on whole arrays take slices of them where no more is taken of the result."""
        takers = self.takers()
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            value = operation.outputs[0]
            shapes = {self.trace.shape(i) for i in operation.inputs} - {()}
            if self.whole[number] or value in self.cuts or not operation.is_elementwise or len(shapes) != 1:
                continue
            takes = [self.cuts.get(self.operations[n].outputs[0]) for n in takers.get(value, ())]
            along = {dimension for dimension in takes if dimension is not None}
            if len(along) == 1 and None not in takes and value not in self.results:
                self.cuts[value] = along.pop()

    def first_of_whole(self) -> str:
        """The first primitive that computes something else of whole arrays than the sum of products, or nothing."""
        arrays, products = set[int](), set[int]()
        for number, operation in enumerate(self.operations):
            name = "" if operation.eqn is None else operation.eqn.primitive.name
            large = {value for value in operation.outputs if self.trace.shape(value)}
            # A square is added to that of the imaginary part, 0.
            if name in PRODUCTS or (name == "add" and products.intersection(operation.values)):
                products |= large
            if not (self.whole[number] or arrays.intersection(operation.values)):
                continue
            if operation.is_elementwise:
                arrays |= large
            elif name != "reduce_sum" or large or not products.issuperset(operation.values):
                return name
        return ""

    def is_anchored(self, number: int, stage: int) -> bool:
        """Whether an operation is computed in its stage alone, and later ones take its results: where it has computed
        of whole arrays, and more than a number."""
        operation = self.operations[number]
        is_cheap = operation.eqn is None or operation.eqn.primitive.name == "broadcast_in_dim"
        is_large = any(self.trace.shape(value) and value not in self.cuts for value in operation.outputs)
        return bool(self.whole[number]) or (is_large and stage > 0 and not is_cheap)

    def takers(self) -> dict[int, list[int]]:
        """Of each value the operations that take it."""
        found: dict[int, list[int]] = {}
        for number in range(len(self.operations)):
            for value in self.needs(number) | self.whole[number]:
                found.setdefault(value, []).append(number)
        return found

    def sources(self, stage: "Stage") -> list[Key]:
        """What is gathered before a stage, as a device has it."""
        return [(value, self.cuts[value]) for value in stage.gathered]

    def needs(self, number: int) -> set[int]:
        """The values that an operation takes, but constants and those that it needs whole."""
        values = [self.uniform.get(value, value) for value in self.operations[number].values]
        return {i for i in values if isinstance(i, int)} - {*self.trace.constants} - self.whole[number]


def plan_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    cuts: Sequence[int | None],
    result_cuts: Callable[[Any], Sequence[int | None]],
) -> tuple[Plan, Any]:
    """(the plan of a function, its abstract result); see `SlicedFunction.compiled`. The first values are the inputs."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(*args)
    trace = Trace()
    inputs = [trace.value(leaf) for leaf in jax.tree.leaves(args)]
    given = {i: dimension for i, dimension in zip(inputs, cuts, strict=True) if dimension is not None}
    return Plan(trace, given, trace.inline(closed, inputs), result_cuts(result)), result


class Stage(NamedTuple):
    """A program of one device, before which arrays are gathered."""

    gathered: list[int]
    operations: list[int]
    inputs: list[Key]
    outputs: list[Key]


def stages_of(plan: Plan, inputs: Sequence[int]) -> list[Stage]:
    """The operations in stages, each result as early as it can be.

    A stage takes arguments of the function, and of others only what these have computed of whole arrays: all else it
    computes again. How XLA rounds depends on what it sees at once: of a product and the sum that takes it, or of two
    divisions, it makes one operation. So the bits are those of one program for all.
    """
    at, gathered = _earliest(plan, {*inputs})
    made_by = {value: number for number, each in enumerate(plan.operations) for value in each.outputs}
    anchored = [plan.is_anchored(number, at[number]) for number in range(len(at))]
    wanted: set[Key] = {(i, plan.cuts.get(i)) for i in (*plan.kept, *itertools.chain(*gathered)) if i in made_by}
    stages = list[Stage]()
    for stage in reversed(range(len(gathered))):
        outputs = sorted((key for key in wanted if at[made_by[key[0]]] == stage), key=str)
        numbers, taken = set[int](), set[Key]()
        left = list(outputs)
        while left:
            value, dimension = left.pop()
            number = made_by.get(value)
            if value in plan.uniform or value in plan.trace.constants:
                left += [(i, None) for i in [plan.uniform.get(value)] if isinstance(i, int)]
            elif number is None:
                taken.add((value, plan.cuts.get(value)))
            elif anchored[number] and at[number] < stage:
                taken.add((value, dimension if plan.trace.shape(value) else None))
            elif number not in numbers:
                numbers.add(number)
                operation = plan.operations[number]
                along = plan.cuts.get(operation.outputs[0])
                left += [(i, along) for i in operation.values if i not in plan.whole[number]]
        wanted |= {key for key in taken if key[0] in made_by}
        stages.append(Stage(gathered[stage], sorted(numbers), sorted(taken, key=str), outputs))
    return stages[::-1]


def _earliest(plan: Plan, known: set[int]) -> tuple[list[int], list[list[int]]]:
    """(the stage of each operation, the values that are gathered before each stage)."""
    size = plan.trace.size
    most = max([GATHERED_AT_LEAST, *(size(i) for whole in plan.whole for i in whole)])
    at, gathered, left = [0] * len(plan.operations), list[list[int]](), list(range(len(plan.operations)))
    while left or not gathered:
        now, total = dict[int, None](), 0
        for number in left if gathered else ():
            more = plan.whole[number] - {*now}
            if more and more <= known and plan.needs(number) <= known:
                total += sum(map(size, more))
                if now and total > most:
                    break
                now |= dict.fromkeys(sorted(more))
        for number in list(left):
            if plan.needs(number) <= known and plan.whole[number] <= {*now}:
                at[number] = len(gathered)
                left.remove(number)
                known |= {*plan.operations[number].outputs}
        gathered.append([*now])
    return at, gathered


@dataclass(frozen=True)
class CompiledStage:
    """A stage, ready to run."""

    stage: Stage
    gather: Gather
    sources: list[Key]
    """What is gathered, as a device has it."""
    programs: list[Any]
    """On each device of this process."""
    donated: list[Key]
    """Values whose memory it takes."""
    last_used: set[Key]
    """Values that no later stage takes."""

    def run(self, values: list[dict[Key, jax.Array]], numbers: Sequence[jax.Array]) -> None:
        """Add the results to the values of each device, and forget those that are not used any more."""
        stage, kept = self.stage, [key for key in self.stage.inputs if key not in {*self.donated}]
        whole = self.gather.run([[own[key] for key in self.sources] for own in values])
        for own, gathered, program, number in zip(values, whole, self.programs, numbers, strict=True):
            results = program([own[key] for key in self.donated], [own[key] for key in kept], gathered, number)
            for key in self.last_used:
                own.pop(key, None)
            own.update(zip(stage.outputs, results, strict=True))


@dataclass(frozen=True)
class SlicedFunction:
    """A function of trees of which each device has slices of some leaves, and gives such trees."""

    stages: list[CompiledStage]
    inputs: list[Key]
    results: list[Key]
    numbers: list[jax.Array]
    treedef: Any

    @classmethod
    def compiled(
        cls,
        function: Callable[..., Any],
        args: Sequence[Any],
        cuts: Sequence[int | None],
        result_cuts: Callable[[Any], Sequence[int | None]],
        cut: Cut,
        compile_one: Compile,
        for_each: CompileForEach,
    ) -> "SlicedFunction":
        """Of a function of (abstract) whole `args`, the first of which is donated.

        `cuts` are the dimensions that the leaves of `args` are cut along, and `result_cuts` gives those of the result.
        """
        plan, result = plan_of(function, args, cuts, result_cuts)
        trace, inputs = plan.trace, list(range(len(cuts)))
        stages, results = stages_of(plan, inputs), [(value, plan.cuts.get(value)) for value in plan.kept]
        last = {key: n for n, stage in enumerate(stages) for key in (*stage.inputs, *plan.sources(stage))}
        free = {(value, plan.cuts.get(value)) for value in inputs[: len(jax.tree.leaves(args[0]))]} - {*results}
        compiled = list[CompiledStage]()
        for n, stage in enumerate(stages):
            dead = {key for key, at in last.items() if at == n} - {*results}
            donated = _donated(plan, cut, stage, dead & free)
            shapes = [trace.shapes[i] for i in stage.gathered]
            gather = Gather.compiled(cut, shapes, [plan.cuts[i] for i in stage.gathered], compile_one)
            program = jax.jit(_program(plan, cut, stage, donated), donate_argnums=0)
            own = {key: _abstract(plan, cut, key) for key in stage.inputs}
            whole = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]
            kept = [own[key] for key in stage.inputs if key not in {*donated}]
            abstract = [own[key] for key in donated], kept, whole, jax.ShapeDtypeStruct((), jnp.int32)
            programs = for_each(program, abstract, cut.layout.devices)
            compiled.append(CompiledStage(stage, gather, plan.sources(stage), programs, donated, dead))
        keys = [(value, plan.cuts.get(value)) for value in inputs]
        return cls(compiled, keys, results, cut.numbers(), jax.tree.structure(result))

    def run(self, args: list[Any]) -> list[Any]:
        """The results on each device of this process, from the arguments of each; the list is emptied."""
        values = [dict(zip(self.inputs, jax.tree.leaves(own), strict=True)) for own in args]
        args.clear()
        for stage in self.stages:
            stage.run(values, self.numbers)
        return [jax.tree.unflatten(self.treedef, [own[key] for key in self.results]) for own in values]


def _abstract(plan: Plan, cut: Cut, key: Key) -> jax.ShapeDtypeStruct:
    """What a device has of a value."""
    value, dimension = key
    return jax.ShapeDtypeStruct(cut.part(plan.trace.shape(value), dimension), plan.trace.shapes[value].dtype)


def _donated(plan: Plan, cut: Cut, stage: Stage, dead: set[Key]) -> list[Key]:
    """Of the dead values that a stage takes, those whose memory can be a result's."""
    free = Counter((own.shape, own.dtype) for own in (_abstract(plan, cut, key) for key in stage.outputs))
    found = []
    for key in stage.inputs:
        own = _abstract(plan, cut, key)
        if key in dead and free[own.shape, own.dtype] > 0:
            free[own.shape, own.dtype] -= 1
            found.append(key)
    return found


def _program(plan: Plan, cut: Cut, stage: Stage, donated: list[Key]) -> Callable[..., list[jax.Array]]:
    """The function of one device that computes a stage."""
    kept = [key for key in stage.inputs if key not in {*donated}]

    def update_slices(
        given: list[jax.Array], others: list[jax.Array], gathered: list[jax.Array], number: jax.Array
    ) -> list[jax.Array]:
        taken = dict(zip([*donated, *kept], [*given, *others], strict=True))
        whole, own = dict(zip(stage.gathered, gathered, strict=True)), dict[int, Any](plan.trace.constants)

        def read(value: Any, dimension: int | None) -> Any:
            if not isinstance(value, int):
                return value.val
            shape = plan.trace.shape(value)
            if value in plan.uniform:
                return jnp.broadcast_to(read(plan.uniform[value], None), cut.part(shape, dimension))
            if shape == () or value in plan.cuts:
                dimension = plan.cuts.get(value)
            if (value, dimension) in taken:
                return taken[value, dimension]
            array = own[value] if value in own else taken[value, None]
            if dimension is None or value in plan.cuts:
                return array
            size = shape[dimension] // cut.slices
            return jax.lax.dynamic_slice_in_dim(array, number * size, size, dimension)

        for index in stage.operations:
            operation = plan.operations[index]
            dimension = plan.cuts.get(operation.outputs[0])
            args = [
                whole[i] if isinstance(i, int) and i in plan.whole[index] else read(i, dimension)
                for i in operation.inputs
            ]
            if operation.eqn is None:
                results: Any = args
            else:
                primitive = operation.eqn.primitive
                results = primitive.bind(*args, **operation.eqn.params)
                results = results if primitive.multiple_results else [results]
            own.update(zip(operation.outputs, results, strict=True))
        return [read(*key) for key in stage.outputs]

    return update_slices
