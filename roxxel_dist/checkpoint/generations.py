"""The generations that a job finds in the memory of its hosts when it begins: which is whole, and the state in it.

Every rank compares its share of the files of its host with their digests; all learn what is whole where, and each
computes the same choice. Decision 19.
"""

import base64
import contextlib
import json
import math
import secrets
import statistics
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.blocks import BlockTable, DamagedFile, Header, read_blocks, read_header
from roxxel_dist.checkpoint.digests import bounds_of, digest
from roxxel_dist.checkpoint.metadata import CheckpointMetadata
from roxxel_dist.checkpoint.replicas import block_files, fetch_blocks, read_key
from roxxel_dist.cluster.distributed import (
    WAIT_LIMIT_S,
    broadcast_from_primary,
    is_primary,
    keep_for_all,
    process_index,
    wait_for_key,
)
from roxxel_dist.process.exit_codes import UserError


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The generations that a rank finds in shared memory when the job begins."""

    address: tuple[str, int] | None = None
    """Where other hosts can fetch blocks of this rank's host."""
    generations: list[dict[str, Any]] = field(default_factory=list)
    """Of each file: its header without the places of the blocks, and the numbers of its whole blocks."""
    damaged: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """The text that other ranks read: numbers of blocks are far apart, and alike in all files, so a few bytes."""
        values = asdict(self)
        for entry in values["generations"]:
            entry["numbers"], entry["header"]["needs"] = map(_steps, (entry["numbers"], entry["header"]["needs"]))
        return base64.b85encode(zlib.compress(json.dumps(values).encode(), 9)).decode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` has written."""
        values = json.loads(zlib.decompress(base64.b85decode(text)))
        for entry in values["generations"]:
            steps = entry["numbers"], entry["header"]["needs"]
            entry["numbers"], entry["header"]["needs"] = (list(accumulate(each)) for each in steps)
        return cls(**values)


def _steps(numbers: Sequence[int]) -> list[int]:
    """Numbers as the first one, and by how much each is larger than the one before."""
    return [number - before for number, before in zip(numbers, (0, *numbers), strict=False)]


class Generation:
    """A whole generation that a job finds when it begins."""

    def __init__(self, generations: "Generations", header: Header, slot: int, *, fetched: bool) -> None:
        self.step: int = header.step
        self.metadata: CheckpointMetadata = CheckpointMetadata.from_dict(header.metadata)
        self.name: str = header.generation
        self.slot: int = slot
        """Which of a rank's two files it is in."""
        self._generations, self._header, self._fetched = generations, header, fetched

    @property
    def source_text(self) -> str:
        """The origin of the copy, for the log."""
        return "the copy in shared memory" + (", partly from the copy on another host" if self._fetched else "")

    def restore(self, like: Any) -> Any:
        """The state, where `like` lies. All ranks call it together.

        Raises ValueError where the state has become another one, and OSError where a host that had blocks is gone.
        """
        return self._generations.restore(self._header, like)


def run_identity(run: object, mesh: Any, settings: Sequence[Any]) -> str:
    """A hash that must be equal for a generation to be used: of the run, its data and plan, devices, and shardings."""
    devices = [(device.id, device.process_index) for device in mesh.devices.flat]
    text = json.dumps([str(run), list(mesh.shape.items()), devices, *settings])
    return digest(text.encode())


class Generations:
    """The generations that the hosts of a job have in memory when it begins. Made by all ranks together.

    `hosts` has the number of the host of each rank, `run` is a `run_identity`, and `address` where other hosts can
    fetch blocks of this one. Rank 0 logs a line about each damaged file.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[int], run: str, address: tuple[str, int] | None, log: Callable[[str], None]
    ) -> None:
        self._folder, self._hosts, self._run, self._rank = folder, hosts, run, process_index()
        mine = self._inventory(address)
        self._known = {self._rank: mine}
        self._key, texts = keep_for_all("memory", mine.to_text())
        self._known |= {rank: Inventory.from_text(text) for rank, text in enumerate(texts)}
        damaged = dict.fromkeys(line for rank in range(len(texts)) for line in self._known[rank].damaged)
        for line in damaged if is_primary() else ():
            log(f"{line}: it is skipped")

    def _of(self, rank: int) -> Inventory:
        """What a rank has found. Rank 0 knows all; the others ask for those of the ranks that they need."""
        if rank not in self._known:
            what = f"waited {WAIT_LIMIT_S:.0f} s for what rank {rank} has in memory"
            self._known[rank] = Inventory.from_text(wait_for_key(f"{self._key}/{rank}", WAIT_LIMIT_S, what))
        return self._known[rank]

    def address_of(self, rank: int) -> tuple[str, int] | None:
        """The address where a rank takes and gives copies."""
        address = self._of(rank).address
        return address and (address[0], address[1])

    def newest(self, disk_step: int) -> Generation | None:
        """The newest whole generation, if it is newer than the checkpoint on disk; the same on every rank, which call
        it together: rank 0 decides."""
        decided = json.dumps(self._choose(disk_step)) if is_primary() else ""
        choice = json.loads(broadcast_from_primary("generation", decided))
        if choice is None:
            return None
        rank, name, fetched = choice
        here = self._known[self._rank].generations  # what is said of a generation is the same in all of its files
        found = next((entry for entry in here if entry["header"]["generation"] == name), None)
        entry = found or next(one for one in self._of(rank).generations if one["header"]["generation"] == name)
        return Generation(self, Header(**entry["header"]), entry["slot"], fetched=fetched)

    def _choose(self, disk_step: int) -> tuple[int, str, bool] | None:
        """The newest whole generation: a rank that has a part, its name, and whether some fetch blocks of it."""
        parts: dict[str, list[tuple[int, Header, set[int]]]] = {}
        for rank in range(len(self._hosts)):
            for entry in self._of(rank).generations:
                header = Header(**entry["header"])
                parts.setdefault(header.generation, []).append((rank, header, set(entry["numbers"])))
        for some in sorted(parts.values(), key=lambda some: (-some[0][1].step, some[0][1].generation)):
            rank, header, _ = some[0]
            lost = any((part.pending or 0) > disk_step for _, part, _ in some)
            if header.step > disk_step and not lost and self._is_whole(some, fetching=True):
                return rank, header.generation, not self._is_whole(some, fetching=False)
        return None

    def _is_whole(self, parts: Sequence[tuple[int, Header, set[int]]], *, fetching: bool) -> bool:
        """Whether each host has, or can fetch, what its ranks need of a generation."""
        total, needs = parts[0][1].total, {header.rank: header.needs for _, header, _ in parts}
        on: dict[int, set[int]] = {host: set() for host in self._hosts}
        fetched: set[int] = set()
        for rank, _, numbers in parts:
            on[self._hosts[rank]] |= numbers
            if fetching and self._of(rank).address is not None:
                fetched |= numbers
        if len(fetched) == total:
            return True
        whole = {host for host, there in on.items() if len(there) == total or len(there | fetched) == total}
        return all(
            host in whole or (rank in needs and fetched.issuperset(set(needs[rank]) - on[host]))
            for rank, host in enumerate(self._hosts)
        )

    def _inventory(self, address: tuple[str, int] | None) -> Inventory:
        """This rank's share of the files here, each compared with its digests."""
        ranks = [rank for rank, host in enumerate(self._hosts) if host == self._hosts[self._rank]]
        inventory = Inventory(address=address)
        for path in block_files(self._folder)[ranks.index(self._rank) :: len(ranks)]:
            step = None
            try:
                header = read_header(path)
                if header is None or header.run != self._run:
                    continue
                step = header.step
                read_blocks(path, header)
            except DamagedFile as error:
                of = "a generation" if step is None else f"the generation of step {step}"
                inventory.damaged.append(f"{of} in shared memory is damaged ({path}: {error})")
            except OSError:  # another rank's, that it has taken away meanwhile
                continue
            else:
                numbers, slot = sorted(header.blocks), int(path.name[0])
                inventory.generations.append(
                    {"header": vars(replace(header, blocks={})), "numbers": numbers, "slot": slot}
                )
        return inventory

    def restore(self, header: Header, like: Any) -> Any:
        """See `Generation.restore`."""
        leaves, tree = jax.tree.flatten(files.keys_to_data(like))
        table = BlockTable(files.keys_to_data(like), self._hosts)
        if table.identity != header.table:
            raise UserError(
                f"the copy of step {header.step} in {self._folder} is of another model or optimizer than the run has "
                f"now: start the job again, and it continues from its checkpoint"
            )
        needed = {n for n, block in enumerate(table.blocks) if self._rank in block.ranks}
        blocks: dict[int, Any] = {}
        for path in block_files(self._folder):
            with contextlib.suppress(DamagedFile, OSError):
                other = read_header(path)
                if other is not None and other.generation == header.generation:
                    mine = needed & other.blocks.keys() - blocks.keys()
                    # Copied: a device may read the memory that it is given for as long as the array lives.
                    blocks |= {n: bytearray(view) for n, view in read_blocks(path, other, sorted(mine)).items()}
        for rank, host in enumerate(self._hosts):
            if host == self._hosts[self._rank] or not needed - blocks.keys():
                continue
            if (inventory := self._of(rank)).address is None:
                continue
            theirs = {
                number
                for entry in inventory.generations
                if entry["header"]["generation"] == header.generation
                for number in entry["numbers"]
            }
            if missing := theirs & needed - blocks.keys():
                blocks |= fetch_blocks(inventory.address, read_key(self._folder), header.generation, missing)
        if missing := needed - blocks.keys():
            raise OSError(f"the copy of step {header.step} in memory has no block {min(missing)} any more")

        def part(leaf: int, index: Any) -> np.ndarray:
            shape = leaves[leaf].shape
            block = bounds_of(index, shape)
            data = np.frombuffer(blocks[table.number(leaf, block)], np.uint8).view(np.dtype(leaves[leaf].dtype))
            return data.reshape([end - first for first, end in block])

        arrays = [
            jax.make_array_from_callback(leaf.shape, leaf.sharding, partial(part, number))
            for number, leaf in enumerate(leaves)
        ]
        return files.data_to_keys(jax.tree.unflatten(tree, arrays), like)


SHARE = 0.01
"""The share of the steps' time that generations may take with `auto`."""
FIRST_AFTER = 2
"""Steps before the first generation of a process; the first steps are not like others."""
COSTS = 5
"""The cost of a generation is the median of so many: a single one may have waited for a core."""
LOOK_AGAIN = 8
"""Steps until rank 0 decides again, while the cost of a generation is unknown."""


@dataclass(frozen=True, kw_only=True)
class CopyDecision:
    """The decision of rank 0 about a step, for all ranks."""

    generation: str = ""
    """The generation to take; empty for none."""
    slot: int = 0
    """Which of a rank's two files holds it."""
    off: str = ""
    """Why there are no more generations."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a rank on its part of a generation, or of the preparations."""

    problem: str = ""
    neighbour: str = ""
    """Why the neighbour does not have it, where it should."""
    seconds: float = 0.0
    """Time that the devices were idle; if they are CPUs, also the CPU time that the generation took from them."""


class Schedule:
    """The generations of one process's training, as rank 0 counts them: `every` so many steps, None for `SHARE`."""

    def __init__(self, every: int | None, log: Callable[[str], None]) -> None:
        self._every, self._log = every, log
        self._costs: deque[float] = deque(maxlen=COSTS)
        self._logged: set[str] = set()
        self.begin(0, 0)

    def begin(self, step: int, slot: int) -> None:
        """The run goes on after a step; the first generation is kept in a slot."""
        self._name = secrets.token_hex(4)  # no two processes give the same name to different generations
        self._count, self._slot, self._off = 0, slot, ""
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier step."""
        self._last, self._clock = step, None
        self.next_step: int = step + FIRST_AFTER if self._every is None else (step // self._every + 1) * self._every
        """The step that the next decision is about."""

    def start_clock(self, step: int) -> None:
        """The first step since `begin` or `go_back` is done."""
        if self._clock is None:
            self._clock: tuple[int, float] | None = (step, time.monotonic())

    def postpone(self, step: int) -> None:
        """The generation before is not done."""
        self.next_step = step + (self._every or 1)

    def decide(self, step: int, done: int, reports: Sequence[Report]) -> CopyDecision | None:
        """Whether to take a generation at `step`, when `done` steps are done; None: neither that, nor an end of it.
        `reports` are those of all ranks, on what they ended since the last decision; empty where that was nothing."""
        if reports:
            self._off = self._take_in(reports)
        if self._off:
            return CopyDecision(off=self._off)
        every = self._every or LOOK_AGAIN
        if self._every is None and self._costs:
            begun, since = self._clock or (done, time.monotonic())
            a_step = (time.monotonic() - since) / max(1, done - begun)
            every = max(1, math.ceil(statistics.median(self._costs) / max(SHARE * a_step, 1e-9)))
            if step - self._last < every and self._count:
                self.next_step = self._last + every
                return None
        self._count += 1
        self.next_step = step + every
        self._last, self._clock = step, (done, time.monotonic())
        return CopyDecision(generation=f"{self._name}.{self._count}", slot=self._slot)

    def _take_in(self, reports: Sequence[Report]) -> str:
        """Learn from the reports of all ranks; returns why there can be no generations, or nothing."""
        problem = next((report.problem for report in reports if report.problem), "")
        if not self._count:  # of the preparations
            if problem:
                self._log_once(f"no copies of the state in shared memory: {problem}")
            return problem
        if problem:
            self._log_once(
                f"the copy of step {self._last} in shared memory is dropped ({problem}); training continues, and the "
                f"next one is tried",
                about="dropped",
            )
            return ""
        self._slot = 1 - self._slot
        self._costs.append(max(report.seconds for report in reports))
        for report in reports:
            if report.neighbour:
                self._log_once(f"{report.neighbour}; training goes on", about=report.neighbour.partition(" (")[0])
        return ""

    def _log_once(self, line: str, about: str = "") -> None:
        """Log a line, unless one on the same subject (`about`, by default the line itself) was logged before."""
        if (about or line) not in self._logged:
            self._logged.add(about or line)
            self._log(line)
