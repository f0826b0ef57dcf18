"""The memory tier: copies of the state in shared memory, from which a job that was killed goes on.

A generation is the state after one step. Two are kept in turn. Each rank copies its blocks into a file (`blocks.py`) in
the folder that the launcher keeps for the job on each host; what follows, in a thread, are the digests, the neighbour's
copy (`replicas.py`) and the report to rank 0. The next generation is begun when all ranks have ended that of before, so
the file that it overwrites is never one of the newest whole generation.

Rank 0 decides whether to take a generation, and into which file; `train/saves.py` makes that known to all ranks.
"""

import contextlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.blocks import BlockFile, BlockTable, DamagedFile, Header, header_room, layout, read_header
from roxxel_dist.checkpoint.generations import CopyDecision, Generation, Generations, Report, Schedule
from roxxel_dist.checkpoint.replicas import COPY, CopyServer, address_towards, block_files, read_key, send_file
from roxxel_dist.cluster.distributed import (
    barrier,
    broadcast_from_primary,
    gather_to_primary,
    is_primary,
    process_count,
    process_index,
)
from roxxel_dist.process.exit_codes import MEMORY_ENV
from roxxel_dist.process.process_stat import boot_id, free_bytes

REPORT_LIMIT_S = 600.0
"""Seconds that all ranks together may take for a generation, after the copy."""
SLACK = 1.1
"""Of the memory that is needed, so much must be free: others need some too."""
IN_USE: set[Path] = set()
"""Folders that a trainer of this process has: another one beside it has no copies."""
OWN = ".own"
"""How the name of a file of this host's blocks ends."""


class MemoryTier:
    """The generations of one run. All ranks make the same calls. Made by `open_memory`."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[int],
        run: str,
        *,
        every: int | None,
        replicas: int | None,
        log: Callable[[str], None],
        rows: Sequence[Path],
    ) -> None:
        self._logs = rows
        self._folder, self._hosts, self._run, self._log = folder, hosts, run, log
        self._rank, self._host = process_index(), hosts[process_index()]
        self._locals = [rank for rank, host in enumerate(hosts) if host == self._host]
        self._server: CopyServer | None = None
        self._replicas = replicas if replicas is not None else int(len(set(hosts)) > 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._job: Future[list[Report]] | None = None
        self._off = True  # until `begin`, and when there is no room
        self._decision: CopyDecision | None = None
        self._files: list[BlockFile] = []
        self.schedule: Schedule = Schedule(every, log if is_primary() else lambda _: None)
        """Of rank 0; the others receive its decisions."""

    # At the start of a process.

    def look(self) -> None:
        """Learn, with all other ranks, which generations there are."""
        if self._replicas and len(set(self._hosts)) > 1:
            try:
                address = address_towards(os.environ["ROXXEL_COORDINATOR"])
                self._server = CopyServer(self._folder, address, read_key(self._folder), self._log)
            except (OSError, ValueError) as error:
                self._log(f"no copies of a neighbour are kept here: {error}")
        address = self._server.address if self._server else None
        self._generations = Generations(self._folder, self._hosts, self._run, address, self._log)

    def newest(self, disk_step: int) -> Generation | None:
        """The newest whole generation, if it is newer than the checkpoint on disk; the same on every rank."""
        return self._generations.newest(disk_step)

    # While it trains.

    def begin(self, state: Any, step: int, kept: Generation | None) -> None:
        """Take the memory, in the background. The generation that the state was taken from is kept for the time."""
        self.settle()
        state = files.keys_to_data(state)
        self._table = BlockTable(state, self._hosts)
        self._numbers = self._table.kept_by(self._rank)
        self._needs = [n for n, block in enumerate(self._table.blocks) if self._rank in block.ranks]
        self._pieces = self._table.pieces(state, self._numbers)
        self._on_cpu = all(each.platform == "cpu" for each in jax.tree.leaves(state)[0].sharding.device_set)
        self.schedule.begin(step, 1 - kept.slot if kept else 0)
        self._off = False
        self._submit(partial(self._prepare, kept.name if kept else None))

    @property
    def next_step(self) -> int | None:
        """The step, on rank 0, that the next decision is about; None where there is none."""
        return None if self._off else self.schedule.next_step

    def decide(self, step: int, done: int) -> CopyDecision | None:
        """Decide, on rank 0, what all ranks do after `step`, when `done` steps are done; None: nothing."""
        if self._off or step < self.schedule.next_step:
            return None
        self.schedule.start_clock(done)
        if self._job is not None and not self._job.done():
            return self.schedule.postpone(step)
        reports, self._job = self._job.result() if self._job is not None else [], None
        return self.schedule.decide(step, done, reports)

    def accept(self, decision: Mapping[str, Any] | None) -> bool:
        """Obey what rank 0 decided about a step, a `CopyDecision` as a dict; returns whether to take a generation."""
        if decision is None:
            return False
        self._decision = CopyDecision(**decision)
        if self._decision.off:
            self._off = True
            self._release()
        return self._decision.generation != ""

    def clock(self) -> float:
        """Seconds by which the loop's part of a generation is measured. If the devices are CPUs, the CPU time of this
        thread: while it waits for a core, other threads use it."""
        return time.thread_time() if self._on_cpu else time.perf_counter()

    def save(self, step: int, state: Any, metadata: Mapping[str, Any], pending: int | None, idle_since: float) -> None:
        """Take the generation that was accepted; returns when the state may change, and be donated.

        The rows of `step` steps are on disk, and their losses were looked at; `metadata` is a `CheckpointMetadata` as a
        dict. `pending` is the step whose checkpoint is on its way to the disk, if it must not be missing there. The
        devices have had nothing to do for it since `idle_since`, by `clock`.
        """
        assert self._decision is not None
        slot, name = self._decision.slot, self._decision.generation
        self.settle()
        leaves = jax.tree.leaves(files.keys_to_data(state))
        arrays = [leaves[leaf].addressable_data(piece) for leaf, piece in self._pieces]
        file = self._files[slot]
        file.invalidate()
        if not self._on_cpu:
            for array in arrays:
                array.copy_to_host_async()
        for place, array in enumerate(arrays):
            file.write(place, np.asarray(array))
        seconds = self.clock() - idle_since
        header = Header(
            generation=name, step=step, run=self._run, table=self._table.identity, total=len(self._table.blocks),
            pending=pending, metadata=metadata, rank=self._rank, needs=self._needs,
        )  # fmt: skip
        self._submit(partial(self._finish, file, slot, header, seconds))

    def settle(self) -> None:
        """Wait until this rank has ended what it began in the background."""
        if self._job is not None:
            wait([self._job])

    def discard(self) -> None:
        """Delete the copies of earlier jobs: this one starts from another state. All ranks call it together."""
        if self._rank == self._locals[0]:
            for path in block_files(self._folder):
                path.unlink(missing_ok=True)
        barrier("discarded")

    def drop(self, step: int) -> None:
        """Void all generations: the run goes back to `step`. All ranks call it together."""
        self.settle()
        barrier("generations")  # what a neighbour sends has come
        for file in self._files:
            file.invalidate()
        if self._rank == self._locals[0]:
            for path in block_files(self._folder):
                if path.name.endswith(COPY) or not self._is_mine(path):
                    path.unlink(missing_ok=True)
        barrier("generations")
        self.schedule.go_back(step)

    def close(self, limit_s: float | None = None) -> None:
        """Let go of threads and connections; the files stay, for the next attempt. Waits for so many seconds."""
        if self._job is not None:
            wait([self._job], limit_s)
        self._thread.shutdown(wait=limit_s is None, cancel_futures=True)
        if self._job is None or self._job.done():
            self._close_files()
        IN_USE.discard(self._folder)
        if self._server is not None:
            self._server.close()

    # In the thread.

    def _submit(self, job: Callable[[], Report]) -> None:
        def work() -> list[Report]:
            began = time.thread_time()
            try:
                report = job()
            except Exception as error:
                report = Report(problem=f"rank {self._rank}: {files.cause(error)}")
            if self._on_cpu:
                report = replace(report, seconds=report.seconds + time.thread_time() - began)
            try:
                texts = gather_to_primary("generations", json.dumps(asdict(report)), REPORT_LIMIT_S)
            except Exception as error:  # a rank is gone: the job ends soon, by others
                return [Report(problem=files.cause(error))]
            return [Report(**json.loads(text)) for text in texts]

        self._job = self._thread.submit(work)

    def _prepare(self, kept: str | None) -> Report:
        """Make room: take away what no generation needs, and take the memory for two."""
        if kept is not None:
            barrier("restored", REPORT_LIMIT_S)  # of all ranks, before any file goes
        self._close_files()
        if self._rank == self._locals[0]:
            for path in block_files(self._folder):
                if not self._holds(path, kept) and not (self._is_mine(path) and path.name.endswith(OWN)):
                    path.unlink(missing_ok=True)
        sizes = [self._table.blocks[number].nbytes for number in self._numbers]
        if problem := self._no_room():
            return Report(problem=problem)
        for slot in (0, 1):
            path = self._folder / f"{slot}-{self._rank}{OWN}"
            holds = self._holds(path, kept)
            self._files.append(BlockFile(path, sizes))
            if not holds:
                self._files[slot].invalidate()
        return Report()

    def _release(self) -> None:
        """Give the memory back."""
        for slot in (0, 1):
            (self._folder / f"{slot}-{self._rank}{OWN}").unlink(missing_ok=True)
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def _holds(self, path: Path, generation: str | None) -> bool:
        """Whether a file is a part of a generation."""
        with contextlib.suppress(DamagedFile, OSError):
            header = read_header(path) if generation is not None else None
            return header is not None and header.generation == generation
        return False

    def _is_mine(self, path: Path) -> bool:
        """Whether a rank of this host writes the file now."""
        return int(re.split(r"[-.]", path.name)[1]) in self._locals

    def _no_room(self) -> str:
        """Why shared memory cannot hold two generations of this host, and of its neighbour, or nothing."""

        def size(host: int) -> int:
            ranks = [rank for rank, other in enumerate(self._hosts) if other == host]
            kept = [self._table.kept_by(rank) for rank in ranks]
            return sum(
                2 * (layout([self._table.blocks[n].nbytes for n in numbers])[1] + header_room(len(numbers)))
                for numbers in kept
            )

        before = (self._host - 1) % (max(self._hosts) + 1)
        copies = size(before) if self._server is not None and self._table.only_on(before) else 0
        taken = sum(path.stat().st_blocks * 512 for path in block_files(self._folder))
        needed = max(0, size(self._host) + copies - taken)
        free = min(shutil.disk_usage(self._folder).free, free_bytes())
        if self._server is not None and needed * SLACK > free >= (needed - copies) * SLACK:
            self._server.refusal = f"its shared memory has room for {free / 1e6:.0f} MB"
        elif needed * SLACK > free:
            return (
                f"on the host of rank {self._rank} {self._folder} has room for {free / 1e6:.0f} MB, and two "
                f"generations take {needed * SLACK / 1e6:.0f} MB"
            )
        return ""

    def _finish(self, file: BlockFile, slot: int, header: Header, seconds: float) -> Report:
        """Make this rank's part valid, and give it to the neighbour."""
        if is_primary() and len(set(self._hosts)) > 1:  # another host may resume from it if this one is lost
            for log in self._logs:
                with contextlib.suppress(OSError):
                    files.sync_file(log)
        size = file.finish(header, self._numbers)
        return Report(seconds=seconds, neighbour=self._send(file, slot, size))

    def _send(self, file: BlockFile, slot: int, size: int) -> str:
        """Give the neighbour what is on this host alone; returns the problem, or nothing."""
        if not self._replicas or not self._table.only_on(self._host):
            return ""
        number = (self._host + 1) % (max(self._hosts) + 1)
        ranks = [rank for rank, host in enumerate(self._hosts) if host == number]
        neighbour = ranks[self._locals.index(self._rank) % len(ranks)]
        address = self._generations.address_of(neighbour)
        try:
            if address is None:
                raise OSError("it does not listen")
            with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                view = memoryview(data)
                whole = view[:size]
                try:
                    send_file(address, read_key(self._folder), f"{slot}-{self._rank}", whole)
                finally:
                    whole.release()
                    view.release()
        except (OSError, ValueError) as error:
            return f"rank {neighbour}, the neighbour of rank {self._rank}, does not keep its copy ({error})"
        return ""


def open_memory(
    run: str,
    *,
    every: int | str,
    replicas: int | None,
    log: Callable[[str], None],
    rows: Sequence[Path] = (),
) -> MemoryTier | None:
    """The memory tier of a job, if its launcher keeps a folder for it on every host. All ranks call it together.

    `run` is a `run_identity`; `every` and `replicas` are `memory_checkpoint_every` and `memory_replicas` of
    `LoopOptions`. No copy may be ahead of the run's `rows`, which are files.
    """
    folder, place = Path(os.environ.get(MEMORY_ENV) or "."), ""
    if every == 0 or folder in IN_USE or (process_count() > 1 and "ROXXEL_COORDINATOR" not in os.environ):
        return None
    if os.environ.get(MEMORY_ENV):
        with contextlib.suppress(OSError):
            status, boot = folder.stat(), boot_id()
            place = f"{boot} {status.st_dev} {status.st_ino}" if boot else ""
    hosts = list[list[int]]()  # the number of a host, and how many ranks in a row are there
    if all(places := gather_to_primary("memory folder", place)):
        numbers: dict[str, int] = {}
        for each in places:
            numbers.setdefault(each, len(numbers))
        hosts = [[numbers[each], len(list(ranks))] for each, ranks in groupby(places)]
    hosts = json.loads(broadcast_from_primary("memory folder", json.dumps(hosts)))
    if not hosts:
        if every != "auto" and is_primary():
            log(
                f"memory_checkpoint_every is {every}, and this job has no folder in shared memory on every host: "
                f"`roxxel-dist launch` makes it, where restarts are allowed"
            )
        return None
    of_rank = [number for number, ranks in hosts for _ in range(ranks)]
    number = None if isinstance(every, str) else every
    tier = MemoryTier(folder, of_rank, run, every=number, replicas=replicas, log=log, rows=rows)
    tier.look()
    IN_USE.add(folder)
    return tier
