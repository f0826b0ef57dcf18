"""What a compiled program does on one device, from its text: FLOPs, bytes moved, and bytes sent to other devices.

XLA's own cost analysis counts the body of a loop once, knows no kernels, and on GPUs has no FLOPs. So the text of the
optimized program (HLO) is read: each instruction, times the trips of the loops that it is in.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roxxel_dist.devices.hlo import Array, Instruction, parse
from roxxel_dist.devices.traced_flops import cudnn_flops, mean_trips, splash_flops

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "opt-barrier", "iota", "call-start", "call-done", "async-done", "async-update",
    "copy-done", "slice-done", "domain",
    *(f"{kind}{end}" for kind in COLLECTIVES for end in ("", "-start", "-done")),
}  # fmt: skip
"""Instructions that move no memory of their own; the bytes of collectives are counted apart."""
GROUPED_PRODUCT = "grouped_product"
"""The name of a kernel for GPUs of which each row is multiplied by one matrix: its last operands are the rows, and the
matrices, or what their gradient is of."""


class Kernel(NamedTuple):
    """An instruction that a device runs as one program, and what one launch of it does."""

    name: str
    paths: tuple[str, ...]
    """Where it was traced: transformations and `jax.named_scope`s, such as "jit(step)/jvp(mlp)/dot_general". Of several
    instructions that are one kernel, what tells most of it comes first."""
    flops: float
    bytes_accessed: float
    sent_bytes: float
    network_bytes: float
    """Of these, what its share of its host's network sends."""
    launches: float


@dataclass
class ProgramCost:
    """The cost of one run of a program on one device."""

    flops: float = 0.0
    """Of matrix products, convolutions and attention kernels, a multiply and an add as two."""
    bytes_accessed: float = 0.0
    """Read from and written to the device's memory."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Kind -> bytes that the device sends, in a ring where there is one."""
    network_bytes: float = 0.0
    """Of these, what its share of its host's network sends."""
    gathered: dict[str, float] = field(default_factory=dict)
    """Type of each array that is gathered, whole -> bytes."""
    has_open_loops: bool = False
    """Whether there is a loop whose trips only the data decides."""
    kernels: list[Kernel] = field(default_factory=list)
    """Those of a loop once, with all their launches."""

    @property
    def launches(self) -> float:
        """Launches of all kernels, collectives among them."""
        return sum(kernel.launches for kernel in self.kernels)

    def add(self, other: "ProgramCost", times: float = 1.0) -> None:
        """Add another cost, so many times."""
        self.flops += times * other.flops
        self.bytes_accessed += times * other.bytes_accessed
        self.network_bytes += times * other.network_bytes
        for kind, count in other.collectives.items():
            self.collectives[kind] += times * count  # pyright: ignore[reportArgumentType]
        self.gathered |= other.gathered
        self.has_open_loops |= other.has_open_loops
        self.kernels += [kernel._replace(launches=times * kernel.launches) for kernel in other.kernels]


def program_cost(text: str, hosts: Sequence[int]) -> ProgramCost:
    """The cost of an optimized HLO program.

    A loop whose trips only the data decides counts as often as its scope says (`MEAN_TRIPS`). Without one it counts as
    often, on average, as a triangle is wide: (n + 1) / 2 times within a loop of n trips, and once elsewhere.

    Args:
        text: `jax.stages.Compiled.as_text()`.
        hosts: the host of each device, in the order of the mesh.
    """
    computations, entry = parse(text)
    return _Analysis(computations, hosts).cost(entry, 1)


class _Analysis:
    def __init__(self, computations: dict[str, list[Instruction]], hosts: Sequence[int]) -> None:
        self.computations, self.hosts = computations, hosts
        self._known: dict[tuple[str, float, frozenset[Any]], ProgramCost] = {}
        self._by_name = {name: {each.name: each for each in body} for name, body in computations.items()}

    def cost(self, name: str, trips: float, begun: Set[Any] = frozenset()) -> ProgramCost:
        """The cost of a run of a computation, in a loop of so many trips, without the collectives that are `begun`."""
        key = name, trips, frozenset(begun)
        if key not in self._known:
            total = self._known[key] = ProgramCost()
            channels = set(begun)
            for each in self.computations[name]:
                self._add(total, name, each, trips, channels)
        return self._known[key]

    def _add(self, total: ProgramCost, where: str, each: Instruction, trips: float, channels: set[Any]) -> None:
        match each.opcode:
            case "while":
                mean = mean_trips(each.path.removesuffix("/while"))
                found = self._trips(where, each) if mean is None else mean
                count = (trips + 1) / 2 if found is None else float(found)
                total.has_open_loops |= found is None
                total.add(self.cost(each.called_computations()[0], count, channels), count)
            case "conditional":
                costs = [self.cost(name, trips, channels) for name in each.called_computations()]
                total.add(max(costs, key=lambda cost: (cost.flops, cost.bytes_accessed)))
            case "call" | "call-start" | "async-start":  # newer TPUs start collectives on their SparseCores by a call
                for name in each.called_computations():
                    total.add(self.cost(name, trips, channels))
            case _:
                total.add(self._kernel(where, each, trips, channels))

    def _kernel(self, where: str, each: Instruction, trips: float, channels: set[Any]) -> ProgramCost:
        """The cost of an instruction that runs no computation as a part of the program."""
        found = ProgramCost()
        match each.opcode:
            case "fusion":
                for name in each.called_computations():
                    found.flops += self.cost(name, trips).flops
                    # Where a collective overlaps with computing, each fusion on its way names it, also those of loops
                    # that run meanwhile: it is one by its channel. A TPU adds and scatters at once, in a fusion of that
                    # name.
                    for inner in self.computations[name]:
                        kind = inner.opcode.removesuffix("-start")
                        if kind in COLLECTIVES:
                            scatters = name.startswith("all-reduce-scatter")
                            kind = "reduce-scatter" if kind == "all-reduce" and scatters else kind
                            self._collective(found, name, inner, kind, channels)
            case "dot" | "convolution" | "custom-call" | "ragged-dot":
                found.flops = self._flops(where, each)
            case _:
                kind = each.opcode.removesuffix("-start")
                if kind in COLLECTIVES:  # those of a `shard_map` have one channel together
                    self._collective(found, where, each, kind, set())
        is_free = each.opcode in FREE or 'custom_call_target="AllocateBuffer"' in each.rest
        if not is_free:
            found.bytes_accessed = self._bytes(where, each)
        if not is_free or found.collectives:
            sent = sum(found.collectives.values())
            own = found.flops, found.bytes_accessed, sent, found.network_bytes
            found.kernels.append(Kernel(each.name, self._paths(where, each), *own, 1))
        return found

    def _paths(self, where: str, each: Instruction) -> tuple[str, ...]:
        """The places where a kernel was traced: of a fusion, its largest matrix product if it has one, then the whole,
        then its other parts; of a copy that the compiler added, what it copies, and of a parameter, what takes the
        copy."""
        called = each.called_computations() if each.opcode == "fusion" else []
        inner = [(name, part) for name in called for part in self.computations[name]]
        products = ((self._product(name, part), name, part) for name, part in inner)
        flops, name, largest = max(products, key=lambda found: found[0], default=(0.0, "", each))
        first = self._paths(name, largest) if flops else ()
        found = *first, *(part.path for part in (each, *(part for _, part in inner)) if part.path)
        if found or not each.operands:
            return found
        copied = self._by_name[where].get(each.operands[0])
        if copied is not None and copied.opcode != "parameter" and (found := self._paths(where, copied)):
            return found
        return tuple(self._takers(where, each.name))

    def _takers(self, where: str, name: str) -> Iterator[str]:
        """The places where what takes a result was traced; behind the end of an asynchronous copy, what takes it."""
        for other in self.computations[where]:
            if name in other.operands:
                if other.path:
                    yield other.path
                elif other.opcode in ("copy-done", "slice-done", "bitcast"):
                    yield from self._takers(where, other.name)

    def _product(self, where: str, each: Instruction) -> float:
        """FLOPs of an instruction within a fusion."""
        if each.opcode == "fusion":
            return sum(self.cost(name, 1).flops for name in each.called_computations())
        is_product = each.opcode in ("dot", "convolution", "custom-call", "ragged-dot")
        return self._flops(where, each) if is_product else 0.0

    def _trips(self, where: str, loop: Instruction) -> int | None:
        """How often a loop runs; None where only the data decides.

        A scan counts from a constant to a constant, by ones, or by as many turns as XLA has put into one. Not every
        compiler writes down what it knows of it.
        """
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found[1])
        condition = loop.attribute("condition")
        body = self.computations.get((condition or "").lstrip("%"), [])
        root = next((each for each in body if each.is_root), None)
        if root is None:
            return None
        names, known, test = list(root.operands), {each.name: each for each in body}, root
        if root.opcode == "fusion":
            inner = self.computations[root.called_computations()[0]]
            test = next(each for each in inner if each.is_root)
            places = {each.name: int(each.argument) for each in inner if each.opcode == "parameter"}
            if not all(name in places for name in test.operands):
                return None
            names = [root.operands[places[name]] for name in test.operands]
        if test.opcode != "compare" or len(names) != 2:
            return None
        counter, limit = (self._constant(where, loop, known[name]) for name in names)
        if counter is None or limit is None or test.attribute("direction") != "LT":
            return None
        return max(0, -(-(limit - counter) // self._step(loop, known[names[0]])))

    def _step(self, loop: Instruction, counter: Instruction) -> int:
        """What a loop adds to its counter in each turn; 1 where that is not plain to see."""
        body = self._by_name[loop.called_computations()[0]]
        root = next(each for each in body.values() if each.is_root)
        index = int(counter.attribute("index") or 0)
        if counter.opcode != "get-tuple-element" or root.opcode != "tuple" or index >= len(root.operands):
            return 1
        grown = body.get(root.operands[index])
        if grown is None or grown.opcode != "add":
            return 1
        added = [body[name].argument for name in grown.operands if name in body and body[name].opcode == "constant"]
        return int(added[0]) if added and re.fullmatch(r"[1-9]\d*", added[0]) else 1

    def _constant(self, where: str, loop: Instruction, each: Instruction) -> int | None:
        """What a loop's condition compares: a constant, or the value that the loop begins with."""
        if each.opcode == "constant":
            return int(each.argument) if re.fullmatch(r"-?\d+", each.argument) else None
        if each.opcode != "get-tuple-element":
            return None
        outside, index = self._by_name[where], int(each.attribute("index") or 0)
        begin = outside.get(loop.operands[0])
        if begin is None or begin.opcode != "tuple":
            return None
        value = outside.get(begin.operands[index])
        while value is not None and value.opcode in ("copy", "bitcast") and value.operands:
            value = outside.get(value.operands[0])
        return self._constant(where, loop, value) if value is not None and value.opcode == "constant" else None

    def _operands(self, where: str, each: Instruction) -> list[list[Array]]:
        known = self._by_name[where]
        return [known[name].results if name in known else [] for name in each.operands]

    def _flops(self, where: str, each: Instruction) -> float:
        operands = [array.shape for operand in self._operands(where, each) for array in operand]
        size = math.prod(each.results[0].shape) if each.results else 0
        match each.opcode:
            case "dot" | "ragged-dot":
                return 2.0 * size * math.prod(operands[0][i] for i in each.numbers("lhs_contracting_dims"))
            case "convolution":
                return _convolution_flops(each, operands[0], operands[1])
            case _:
                return _kernel_flops(each, operands, size)

    def _bytes(self, where: str, each: Instruction) -> float:
        """Read and written. What a fusion takes a slice of counts as that slice, and what it updates in place as the
        update."""
        results, operands = each.results, self._operands(where, each)
        if re.search(r'custom_call_target="__cu(blas|dnn)', each.rest) and len(results) > 1:
            # The last one is memory that the library may use, 32 MiB for each product: it need not touch it.
            results = results[:-1] if results[-1].dtype in ("s8", "u8") else results
        if each.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * sum(array.memory_bytes for array in results)
        if each.opcode in ("copy-start", "slice-start"):
            # A TPU fetches into its own memory ahead of a kernel, and writes back behind it. The types have the source
            # too: (result, source, state) of a copy, ((source), result, state) of a slice.
            result = results[each.opcode == "slice-start"]
            is_read = any(not array.on_chip for operand in operands for array in operand)
            return result.memory_bytes + is_read * result.bytes
        if each.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * sum(array.memory_bytes for array in operands[-1 if each.opcode == "scatter" else 1])
        written = sum(array.memory_bytes for array in results)
        reads = [sum(array.memory_bytes for array in operand) for operand in operands]
        body = each.called_computations()[0] if each.opcode == "fusion" and each.called_computations() else None
        if body is None:
            return written + sum(reads)
        inner = self.computations[body]
        for i, read in enumerate(reads):
            if (part := _slice_read(inner, i)) is not None:
                reads[i] = min(read, part)
        root = next((x for x in inner if x.is_root), inner[-1])
        names = root.operands if root.opcode == "tuple" else [root.name]
        wholes = list[tuple[int, ...]]()
        for whole, name in zip(results, names, strict=False):
            if (part := self._updated_bytes(body, name)) is not None and part < whole.memory_bytes:
                written += part - whole.memory_bytes
                wholes.append(whole.shape)
        reads = [
            0.0 if len(operand) == 1 and operand[0].shape in wholes else read
            for operand, read in zip(operands, reads, strict=True)
        ]
        return written + sum(reads)

    def _updated_bytes(self, where: str, name: str) -> float | None:
        """Bytes of the update, of a result that is an operand with a slice of it updated; else None.

        A scan keeps what its backward pass reads so: each turn writes its slice of the array of all turns.
        """
        found = self._by_name[where].get(name)
        while found is not None and found.opcode == "bitcast":
            found = self._by_name[where].get(found.operands[0])
        if found is None or found.opcode != "dynamic-update-slice":
            return None
        return sum(array.bytes for array in self._operands(where, found)[1])

    def _collective(self, total: ProgramCost, where: str, each: Instruction, kind: str, channels: set[Any]) -> None:
        channel = each.attribute("channel_id") or each.name, *((array.dtype, array.shape) for array in each.results)
        if channel in channels:
            return
        channels.add(channel)
        operand = sum(array.bytes for found in self._operands(where, each) for array in found)
        groups = each.groups(len(self.hosts))
        size = max(map(len, groups), default=1)
        if size <= 1:
            return
        if kind == "all-gather":
            for array in itertools.chain(*self._operands(where, each)):
                shape = ",".join(map(str, array.shape))
                total.gathered[f"{array.dtype}[{shape}] x {size}"] = array.bytes * size
        total.collectives[kind] += _sent(kind, operand, size)  # pyright: ignore[reportArgumentType]
        group = next(group for group in groups if len(group) == size)
        members = Counter(self.hosts[i] for i in group if i < len(self.hosts))
        if kind == "collective-permute":
            crosses = any(len({self.hosts[i] for i in pair}) > 1 for pair in groups)
            total.network_bytes += operand if crosses else 0.0
        elif len(members) > 1:
            # What the hosts of a group must exchange, however they do it; the devices of a host share the work.
            local, count = max(members.values()), len(members)
            whole = operand * local if kind == "all-gather" else operand
            total.network_bytes += _sent(kind, whole, count) / local


def _sent(kind: str, operand: float, size: int) -> float:
    """Bytes that each of `size` devices sends for a collective on an operand of so many bytes a device."""
    match kind:
        case "all-gather":
            return operand * (size - 1)
        case "all-reduce":
            return 2 * operand * (size - 1) / size
        case "collective-permute" | "collective-broadcast":
            return operand
        case _:
            return operand * (size - 1) / size


def _slice_read(inner: Sequence[Instruction], index: int) -> float | None:
    """Bytes that a fusion reads of its parameter, if it only takes slices or rows of it; else None."""
    names = {each.name for each in inner if each.opcode == "parameter" and each.argument == str(index)}
    taken, changed = 0.0, True
    while changed:  # a bitcast of it is it
        more = {each.name for each in inner if each.opcode == "bitcast" and names & set(each.operands)}
        changed = not more <= names
        names |= more
    for each in inner:
        if each.opcode == "bitcast" or not names & set(each.operands):
            continue
        if each.opcode in ("dynamic-slice", "slice", "gather") and each.operands[0] in names:
            taken += sum(array.bytes for array in each.results)
        elif each.opcode == "dynamic-update-slice" and each.operands[0] in names:
            continue
        else:
            return None
    return taken


def _kernel_flops(each: Instruction, operands: Sequence[Sequence[int]], size: int) -> float:
    """FLOPs of a custom call with so many results; 0 where it is none of the known kernels."""
    found = re.search(r'custom_call_target="([^"]*)"', each.rest)
    target = found[1] if found else ""
    if "splash_mha" in each.name and target == "tpu_custom_call":
        return splash_flops(each.name, operands)
    if target == "tpu_custom_call":  # another kernel, as those of products over groups of rows: what it says of itself
        said = re.search(r'"cost_estimate":\{"flops":"?(\d+)', each.rest)
        return float(said[1]) if said else 0.0
    if target == "__gpu$xla.gpu.triton" and re.search(GROUPED_PRODUCT + r"\)*/pallas_call", each.rest):
        return 2.0 * math.prod(operands[-2]) * each.results[0].shape[-1]
    if "fmha" in target:
        window = re.search(r'"sliding_window_length": ?(\d+)', each.rest)
        causal, width = '"CAUSAL"' in each.rest, int(window[1]) if window else 0
        return cudnn_flops(operands[0], operands[1], "Backward" in target, causal, width)
    if found := re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', each.rest):  # a product by cuBLAS
        return 2.0 * size * math.prod(operands[0][int(i)] for i in json.loads(found[1]))
    return 0.0


def _convolution_flops(each: Instruction, left: Sequence[int], right: Sequence[int]) -> float:
    """2 x the multiplications that meet no padding: batched products are convolutions with much of it on a TPU."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
    if found is None:
        return 0.0
    of_left, of_right, of_out = found.groups()
    window = re.search(r"window=\{([^}]*)\}", each.rest)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    out, total = each.results[0].shape, 1.0
    for axis, number in enumerate(sorted(n for n in of_out if n.isdigit())):
        size = right[of_right.index(number)]
        low = _of_axis(fields.get("pad", ""), axis, "0_0")
        begin = int(low.split("_")[0])
        stride, spread, step = (
            int(_of_axis(fields.get(name, ""), axis, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        length = left[of_left.index(number)]
        reach = (length - 1) * step + 1
        total *= sum(
            0 <= (at := o * stride + k * spread - begin) < reach and at % step == 0
            for o in range(out[of_out.index(number)])
            for k in range(size)
        )
    groups = int(each.attribute("batch_group_count") or 1)
    features = right[of_right.index("i")]
    return 2.0 * total * out[of_out.index("b")] * out[of_out.index("f")] * features / groups


def _of_axis(text: str, axis: int, default: str) -> str:
    parts = text.split("x") if text else []
    return parts[axis] if axis < len(parts) else default
