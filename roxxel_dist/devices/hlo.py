"""The text of an optimized program (HLO) as instructions."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ON_CHIP = re.compile(r"S\([1-9]\)")
"""A layout in the chip's own fast memory."""
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")


class Array(NamedTuple):
    """An array in an HLO type."""

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        """Bytes of all of it."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (1 if self.dtype == "pred" else int(bits[0]) / 8 if bits else 0)

    @property
    def memory_bytes(self) -> float:
        """What of it is in the device's memory."""
        return 0.0 if self.on_chip else self.bytes


def arrays(text: str) -> list[Array]:
    """The arrays of an HLO type, a tuple's in order."""
    found = ARRAY.findall(text)
    return [
        Array(dtype, tuple(int(n.lstrip("<=")) for n in shape.split(",") if n), bool(ON_CHIP.search(layout)))
        for dtype, shape, layout in found
        if dtype != "token"
    ]


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    rest: str
    """Attributes, metadata and the backend's configuration."""
    is_root: bool = False
    argument: str = ""
    """What stands in the parentheses."""

    @cached_property
    def results(self) -> list[Array]:
        """The arrays that it makes."""
        return arrays(self.type)

    def attribute(self, name: str) -> str | None:
        """The value of `name=`: a word, or all between braces."""
        found = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|[%\w.-]+)", self.rest)
        return found[1] if found else None

    def numbers(self, name: str) -> list[int]:
        """The numbers of an attribute in braces."""
        return [int(n) for n in re.findall(r"\d+", self.attribute(name) or "")]

    @cached_property
    def path(self) -> str:
        """The `op_name`, where it was traced; "" if the compiler added it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    def called_computations(self) -> list[str]:
        """The computations of a fusion, a call, a loop or a conditional."""
        names = ("calls", "body", "to_apply", "true_computation", "false_computation", "branch_computations")
        found = [self.attribute(name) or "" for name in names]
        return [name for text in found for name in re.findall(r"[\w.-]+", text)]

    def groups(self, count: int) -> list[list[int]]:
        """The groups of `count` devices of a collective; all of them where it names none."""
        text = self.rest
        if found := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{[\d,{}]*\})\}", text):
            return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found[1])]
        flat, size = list(range(count)), count
        if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
            shape = [int(n) for n in found[3].split(",")]
            order = [int(n) for n in found[4].split(",")] if found[4] else list(range(len(shape)))
            flat, size = _transposed(shape, order), int(found[2])
        elif found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
            axes, chosen = re.findall(r"'([^']*)'=(\d+)", found[1]), set(re.findall(r"'([^']*)'", found[2]))
            shape = [int(size) for _, size in axes]
            own = [i for i, (name, _) in enumerate(axes) if name in chosen]
            flat = _transposed(shape, [i for i in range(len(shape)) if i not in own] + own)
            size = math.prod(shape[i] for i in own)
        return [flat[i : i + size] for i in range(0, len(flat), size)]


def _transposed(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... in an array of this shape, read with its dimensions in another order."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = [range(shape[i]) for i in order]
    return [sum(n * strides[i] for n, i in zip(index, order, strict=True)) for index in itertools.product(*ranges)]


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(the computations by name, the name of the entry)."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", list[str]()
    for line in text.splitlines():
        if not line.startswith((" ", "}")) and (found := COMPUTATION.match(line)):
            lines = []
            computations[found[2]] = lines  # pyright: ignore[reportArgumentType]
            entry = found[2] if found[1] else entry
        elif line == "}":
            lines = []
        elif INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line  # a kernel's metadata may have line breaks
    return {name: [_instruction(line) for line in body] for name, body in computations.items()}, entry  # pyright: ignore[reportArgumentType]


def _instruction(line: str) -> Instruction:
    head = INSTRUCTION.match(line)
    assert head is not None
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opens = line.index("(", end)
    closes = _closing(line, opens)
    argument = line[opens + 1 : closes]
    return Instruction(
        name=head[1],
        opcode=line[end:opens].strip(),
        type=line[start:end],
        operands=tuple(re.findall(r"%([\w.-]+)", argument)),
        rest=line[closes + 1 :],
        is_root=line.lstrip().startswith("ROOT "),
        argument=argument,
    )


def _closing(line: str, start: int) -> int:
    depth = 0
    for i in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    return len(line)
