"""The object-store tier: the checkpoints of a run that is kept in a bucket, by the names of a local run directory.

Each rank sends the files that it has written, rank 0 the others and, last of all, the table of digests: a checkpoint
counts when that object is there. What is read is first fetched into the local folder and compared with its digests:
files whole, of files of arrays the blocks that are read, into files with holes. What does not agree is fetched once
more before it counts as damaged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import (
    DAMAGED,
    TABLE,
    BlockDigest,
    Bounds,
    DigestTable,
    bounds_of,
    files_below,
    read_verified,
)
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META, losses_of, steps_of
from roxxel_dist.checkpoint.stored_blocks import ByteRange, Index, wrong_blocks
from roxxel_dist.objects.errors import StoreNotFoundError
from roxxel_dist.process.durable import make_folder, write_file
from roxxel_dist.process.file_lock import release_lock, wait_for_lock

if TYPE_CHECKING:
    from roxxel_dist.objects.store import ObjectInfo, ObjectStore

PROCESS = "ocdbt.process_"
"""The prefix of the folder with one rank's files; Orbax appends the rank."""
THREADS = 4
"""Files that are sent, or fetched, at a time; each of them in parts."""
FETCHES = 16
"""Requests for files, most of which are small, that are under way."""
FETCH_TIMES = 2
"""How often a file is fetched before it counts as damaged."""
RANGE_BYTES = 16 << 20
"""Of a file that are read at a time, to be compared with its digest."""
FETCH_LIMIT_S = 6 * 3600.0
IsRead = Callable[[str, BlockDigest], bool]
"""Whether a block of an array, by its name, is read."""


class RemoteCheckpoints:
    """The checkpoints below the prefix of a run, beside the local folder that has what this process needs of them.

    `before_table` is called on rank 0 before a checkpoint counts: the rows of its steps are in the bucket then;
    `check_run` at every step: it raises what keeps the run from its bucket.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        *,
        before_table: Callable[[], None],
        check_run: Callable[[], None],
    ) -> None:
        self._store, self._folder, self._before_table = store, folder, before_table
        self.check_run: Callable[[], None] = check_run
        self._hollow: list[str] = []
        """Files of other hosts that rank 0 has without the arrays in them, while it joins the parts of a save."""

    def list_saved(self, *, read_only: bool) -> dict[int, float | None]:
        """The step and val_loss of each checkpoint that counts, whose `meta.json` and tables are here then. Unless
        `read_only`, what a save that was cut off has left in the bucket is deleted. For one process alone."""
        objects = self._by_step()
        whole = sorted(step for step, names in objects.items() if TABLE in names)
        if not read_only:
            rest = [step for step, names in objects.items() if not {TABLE, TABLE + DAMAGED} & names.keys()]
            self._store.delete([info.key for step in rest for info in objects[step].values()])
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self.fetch_meta, whole))
        return losses_of(self._folder, whole)

    def exists(self, step: int) -> bool:
        """Whether a checkpoint counts now."""
        try:
            self._store.head(_key(step, TABLE))
        except StoreNotFoundError:
            return False
        return True

    def list_damaged(self) -> list[str]:
        """The names of the checkpoints that were set aside."""
        return [f"{step}{DAMAGED}" for step, names in self._by_step().items() if TABLE + DAMAGED in names]

    def _by_step(self) -> dict[int, dict[str, ObjectInfo]]:
        objects: dict[int, dict[str, ObjectInfo]] = {}
        for info in self._store.list(f"{CHECKPOINTS}/"):
            _, step, name = (*info.key.split("/", 2), "")[:3]
            if step.isdecimal():
                objects.setdefault(int(step), {})[name] = info
        return objects

    def send_part(self, temporary: Path, step: int, rank: int) -> None:
        """Send what this rank has written of a checkpoint. Its files are final by now."""
        own = temporary / files.STATE / f"{PROCESS}{rank}"
        self._send(temporary, step, files_below(own))
        if rank:  # rank 0 takes it from there: last, so that it stands for the others
            self._store.upload(temporary / f"{TABLE}.{rank}", _key(step, f"{TABLE}.{rank}"))

    def gather_parts(self, temporary: Path, step: int, ranks: int) -> None:
        """Fetch, on rank 0, what it needs of the other ranks' parts to join them: tables and indices, no arrays."""
        with ThreadPoolExecutor(FETCHES) as threads:
            hollow = threads.map(partial(self._gather_part, temporary, step), range(1, ranks))
            self._hollow = [name for names in hollow for name in names]

    def _gather_part(self, temporary: Path, step: int, rank: int) -> list[str]:
        """Fetch what rank 0 needs of one rank's part; its files of arrays, which stay without them."""
        path = temporary / f"{TABLE}.{rank}"
        if not path.exists():  # a rank of another host
            self._store.download(_key(step, path.name), path)
        part = DigestTable.read(path)
        away = [name for name in part.files if not (temporary / name).exists()]
        for name in away:
            self._fetch_file(temporary, step, part, name)
        if away:
            place = f"{files.STATE}/{PROCESS}{rank}"
            Index(temporary / place, partial(self._fetch_node, temporary, step, part, place))
        return [name for name in away if not part.files[name].digest]

    def commit(self, step: int, ranks: int) -> None:
        """Send, on rank 0, what is left of a checkpoint that is complete in the local folder; its table last."""
        checkpoint = self._folder / str(step)
        for name in self._hollow:
            (checkpoint / name).unlink()
        theirs = tuple(f"{files.STATE}/{PROCESS}{rank}/" for rank in range(ranks))
        paths = {str(path.relative_to(checkpoint)): path for path in files_below(checkpoint)}
        self._send(checkpoint, step, [p for name, p in paths.items() if name != TABLE and not name.startswith(theirs)])
        self._store.delete([_key(step, f"{TABLE}.{rank}") for rank in range(1, ranks)])
        self._before_table()
        self._store.upload(checkpoint / TABLE, _key(step, TABLE))

    def keep_part(self, temporary: Path, step: int, rank: int, kept: Collection[int] | None) -> None:
        """Let the part of another rank than 0 take its place in the local folder after a save, or take it away where
        the save has failed (`kept` is None); and delete what is no longer kept."""
        own = temporary / files.STATE / f"{PROCESS}{rank}"
        with contextlib.suppress(OSError):
            if kept is None:
                shutil.rmtree(own, ignore_errors=True)
            elif own.exists():  # else rank 0 has renamed all of it, on the same disk
                place = self._folder / str(step) / files.STATE / own.name
                shutil.rmtree(place, ignore_errors=True)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.rename(own, place)
        (temporary / f"{TABLE}.{rank}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank's part is still in it
            for folder in (temporary / files.STATE, temporary):
                folder.rmdir()
        if kept is not None:
            self.keep_local(kept)

    def keep_local(self, kept: Collection[int]) -> None:
        """Delete what this host has of other checkpoints than those that are kept."""
        for step in set(steps_of(self._folder)) - {*kept}:
            with contextlib.suppress(OSError):  # a copy, which the next call deletes
                files.delete(self._folder / str(step))

    def delete(self, step: int) -> None:
        """Take a checkpoint away; it does not count from the first moment on."""
        self._store.delete([_key(step, TABLE)])
        self._store.delete([info.key for info in self._store.list(f"{CHECKPOINTS}/{step}/")])

    def delete_file(self, name: str) -> None:
        """Delete a file of the run that is void; beside this nothing but checkpoints is deleted in the bucket."""
        self._store.delete([name])

    def set_aside(self, step: int) -> None:
        """Let a damaged checkpoint no longer count; its files stay until a later save of the step."""
        self._store.write(_key(step, TABLE + DAMAGED), self._store.read(_key(step, TABLE)))
        self._store.delete([_key(step, TABLE)])

    def send_meta(self, step: int) -> None:
        """Send the `meta.json` of the local folder, which is another one than before. Cut off anywhere, the old one or
        the new one is there, and agrees."""
        checkpoint = self._folder / str(step)
        _, table = read_verified(checkpoint, step)
        path = checkpoint / f".{TABLE}.before"
        self._store.download(_key(step, TABLE), path)
        before = DigestTable.read(path)
        path.unlink()
        both = replace(table, meta=tuple(dict.fromkeys((*before.meta, *table.meta))))
        self._store.write(_key(step, TABLE), both.to_json().encode())
        self._store.upload(checkpoint / META, _key(step, META))
        self._store.upload(checkpoint / TABLE, _key(step, TABLE))

    def fetch_meta(self, step: int) -> None:
        """Bring `meta.json` and the table of a checkpoint here; neither, where it does not count any more."""
        checkpoint = self._folder / str(step)
        make_folder(checkpoint)
        try:
            for name in (TABLE, META):
                write_file(checkpoint / name, self._store.read(_key(step, name)))
        except StoreNotFoundError:
            for name in (TABLE, META):
                (checkpoint / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it has other files
                checkpoint.rmdir()

    def fetch(self, step: int, table: DigestTable, is_read: IsRead = lambda name, block: True) -> list[str]:
        """Bring here what is read of a checkpoint, once for all processes that share the folder, and compare it.

        Returns what is wrong with what does not agree when it is fetched once more either.
        """
        checkpoint = self._folder / str(step)
        blocks = [(name, block) for name, block in table.all_blocks() if is_read(name, block)]

        def compare() -> tuple[dict[str, str], dict[tuple[str, BlockDigest], str]]:
            if wrong := table.wrong_files(checkpoint, table.files):
                return wrong, dict.fromkeys(blocks, "")  # without these files no block can be read
            return {}, wrong_blocks(checkpoint, blocks)

        wrong, missing = compare()
        if not wrong and not missing:
            return []
        lock = wait_for_lock(
            self._folder / ".fetch.lock",
            lambda owner: f"{owner} fetches a checkpoint into {self._folder}: waiting for it",
            lambda owner: f"{owner} fetches a checkpoint into {self._folder} for hours",
            limit_s=FETCH_LIMIT_S,
            silent_s=FETCH_LIMIT_S,
        )
        try:
            wrong, missing = compare()  # another process may have fetched them meanwhile
            for _ in range(FETCH_TIMES):
                if wrong:
                    self._fetch_files(checkpoint, step, table, wrong)
                    wrong, missing = compare()
                if missing and not wrong:
                    self._fetch_blocks(checkpoint, step, table, missing)
                    missing = wrong_blocks(checkpoint, missing)
        finally:
            release_lock(lock)
        return [problem for problem in (*wrong.values(), *missing.values()) if problem]

    def _fetch_files(self, folder: Path, step: int, table: DigestTable, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(FETCHES) as threads:
            list(threads.map(partial(self._fetch_file, folder, step, table), names))

    def _fetch_file(self, folder: Path, step: int, table: DigestTable, name: str) -> None:
        """Fetch a file; of one of arrays only the size. One that is gone is left to be missed."""
        path, key = folder / name, _key(step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(StoreNotFoundError):
            if table.files[name].digest:
                self._store.download(key, path)
            else:  # in place: another process of this host may have fetched blocks of it
                with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                    file.truncate(self._store.head(key).size)

    def _fetch_blocks(
        self, checkpoint: Path, step: int, table: DigestTable, blocks: Iterable[tuple[str, BlockDigest]]
    ) -> None:
        """Fetch blocks into the files of arrays, which have their sizes."""
        try:
            index = Index(checkpoint / files.STATE, partial(self._fetch_node, checkpoint, step, table, files.STATE))
            places = dict.fromkeys(place for name, block in blocks for place in index.places(name, block.bounds))
        except (ValueError, KeyError):  # a damaged node: the blocks say that they cannot be read
            return
        with ThreadPoolExecutor(FETCHES) as threads:
            list(threads.map(partial(self._fetch_place, checkpoint, step, files.STATE), places))

    def _fetch_node(self, folder: Path, step: int, table: DigestTable, below: str, place: ByteRange) -> None:
        """Fetch a node of the index, where it lies in a file of arrays."""
        if not table.files[f"{below}/{place.file}"].digest:
            self._fetch_place(folder, step, below, place)

    def _fetch_place(self, folder: Path, step: int, below: str, place: ByteRange) -> None:
        name = f"{below}/{place.file}"
        with (folder / name).open("r+b") as file:
            for begin in range(place.start, place.stop, RANGE_BYTES):
                data = self._store.read_range(_key(step, name), begin, min(begin + RANGE_BYTES, place.stop))
                file.seek(begin)
                file.write(data)

    def fetch_model(self, step: int) -> list[str]:
        """Bring what `files.read_model` reads of a checkpoint here, for one process that reads it alone; what is wrong
        with it. Its `meta.json` and table are here."""
        saved, table = read_verified(self._folder / str(step), step)
        read = files.evaluated_prefix(saved.shapes), files.REST
        return self.fetch(step, table, lambda name, _: name.startswith(read))

    def fetch_all(self, step: int) -> list[str]:
        """The same of all of a checkpoint."""
        self.fetch_meta(step)
        try:
            _, table = read_verified(self._folder / str(step), step)
        except ValueError as error:
            return [str(error)]
        return self.fetch(step, table)

    def _send(self, folder: Path, step: int, paths: Iterable[Path]) -> None:
        def send(path: Path) -> None:
            self._store.upload(path, _key(step, str(path.relative_to(folder))))

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(send, paths))


def is_read(like: Any) -> IsRead:
    """Whether this process reads a block of a checkpoint for a state that lies as `like`."""
    there: dict[str, list[Bounds] | None] = {}
    for path, leaf in jax.tree.leaves_with_path(like):
        name, sharding = jax.tree_util.keystr(path, simple=True, separator="/"), getattr(leaf, "sharding", None)
        if sharding is None or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            there[name] = None  # all of it
        else:
            indices = sharding.addressable_devices_indices_map(leaf.shape).values()
            there[name] = list(dict.fromkeys(bounds_of(index, leaf.shape) for index in indices))

    def reads(name: str, block: BlockDigest) -> bool:
        parts = there.get(name, [])
        pairs = (zip(block.bounds, part, strict=True) for part in parts or ())
        return parts is None or any(all(a < d and c < b for (a, b), (c, d) in pair) for pair in pairs)

    return reads


def _key(step: int, name: str) -> str:
    return f"{CHECKPOINTS}/{step}/{name}"
