"""The folder of checkpoints on disk: `<step>/state`, arrays in Orbax's format, `<step>/meta.json`, all the rest, and
`<step>/digests.json`, the digests of both.

A checkpoint is written under a temporary name and renamed when it is complete, so what has its step as a name was
written to its end. One that does not agree with its digests is set aside, as `<step>.damaged`. Decision 18.
"""

import asyncio
import contextlib
import errno
import glob
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from roxxel_dist.checkpoint.digests import (
    DAMAGED,
    STATE,
    TABLE,
    BlockDigest,
    Bounds,
    DigestTable,
    FileDigest,
    bounds_of,
    digest,
    files_below,
    merge,
    problems_text,
    read_verified,
)
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, META, MetaFile, saved_checkpoints
from roxxel_dist.checkpoint.stored_blocks import avoid_leaks
from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, process_index
from roxxel_dist.objects.errors import StoreError, StoreTimeoutError
from roxxel_dist.process.durable import make_folder, sync_folder, write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.process.file_lock import LOCK

PARAMS, REST, AVERAGE = "params/", "rest/", "opt_state/average/"
"""The prefixes of names in a train state."""
SMALL = 1 << 19
"""Bytes up to which a file of arrays has a digest of its own too."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a folder that is no complete checkpoint; Orbax's own tools pass over it too."""
MERGED = "manifest.ocdbt"
"""In the folder of the state: the table of the arrays of all ranks, which is made last."""
SHOWN_CAUSE = 160
"""Letters of the cause of an error."""
_Value = TypeVar("_Value")
FULL = (errno.ENOSPC, errno.EDQUOT)
CAUSES = (*FULL, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Log nothing of Orbax within: it warns of much that is meant so here, and logs the traceback of a failed
    save that is reported anyway."""

    def others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def open_folder(
    folder: Path,
    *,
    read_only: bool,
    sweeps: bool,
    in_bucket: Callable[[], dict[int, float | None]] | None,
) -> dict[int, float | None]:
    """The complete checkpoints and the val_loss of each, as rank 0 sees them; called by all ranks together.

    Unless `read_only`, rank 0 holds the lock of the folder, which is made if it is missing; if it `sweeps`, what
    interrupted saves left there is removed. Those of a run in a bucket are what `in_bucket` says, and the folder is
    each host's own. Raises ValueError where it cannot be written, or a rank does not see it.
    """
    saved, problem = {}, ""
    if process_index() == 0 or in_bucket is not None:
        try:
            if not read_only:
                make_folder(folder)
                if sweeps:
                    sweep(folder)
            if process_index() == 0:
                saved = saved_checkpoints(folder) if in_bucket is None else in_bucket()
        except StoreTimeoutError:  # no fault of the folder
            raise
        except OSError as error:
            problem = error.strerror or str(error)
    # Read by the others when rank 0 has done its part.
    saved, problem = json.loads(broadcast_from_primary("checkpoints", json.dumps([list(saved.items()), problem])))
    problems = gather_to_primary("checkpoints", problem or ("" if read_only else _unusable(folder)))
    if problem := broadcast_from_primary("checkpoints", next(filter(None, problems), "")):
        raise UserError(
            f"the checkpoint folder {folder} cannot be used ({problem}): choose another run directory, or repair it"
        )
    return {int(step): val_loss for step, val_loss in saved}


def lock_folder(folder: Path) -> Path:
    """The folder whose lock a writer of checkpoints holds: the run directory that they are in, or their own folder."""
    run = folder.parent
    return run if folder.name == CHECKPOINTS and (run / LOCK).exists() else folder


def _unusable(folder: Path) -> str:
    """Why this rank cannot write in the folder, or nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except FileNotFoundError:
        return f"rank {process_index()} does not see it; every rank must see the same folder"
    except OSError as error:  # a disk that is full now may not be when something is saved
        return "" if error.errno in FULL else (error.strerror or str(error))


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing takes it for one; returns its new name. Raises OSError."""
    names = (checkpoint.with_name(f"{checkpoint.name}{DAMAGED}{count}") for count in ("", *map(str, range(2, 1000))))
    aside = next(path for path in names if not path.exists())
    checkpoint.rename(aside)
    sync_folder(checkpoint.parent)
    return aside


def sweep(folder: Path, store: str = "") -> None:
    """Delete the temporary folders of interrupted saves and deletions; of the saves of one `store` where it is named.

    The caller must hold the lock of `folder`. Raises OSError.
    """
    for path in (*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"*{TEMPORARY}-{store}*")):
        shutil.rmtree(path, ignore_errors=True)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; at no moment does a part of it look like the whole. Raises OSError where it stays."""
    doomed = checkpoint.with_name(checkpoint.name + TEMPORARY)
    try:
        checkpoint.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)  # `sweep` deletes the rest


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """The handler that writes and reads arrays.

    Copies on several devices are not cut up for each to write a part: the programs that cut are compiled at the first
    save and run at each (8 copies of 240 MB: 1.6 s, then 0.2 s, instead of 0.13 s and 0.04 s). Nothing is compressed:
    for 8 % of float32 weights that takes three times the CPU of writing, from the training beside it.
    """
    drop_late_reads()
    avoid_leaks()
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
    )
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


@cache
def drop_late_reads() -> None:
    """Print no traceback of a read that ends after its event loop, from now on.

    Where an array cannot be read, Orbax raises and closes its loop, while tensorstore reads the other arrays. The end
    of each cannot be given to the loop, and would print a traceback, behind the message that matters.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


class LocalBlock(NamedTuple):
    """A part of an array that this process writes, on the host."""

    name: str
    bounds: Bounds
    data: np.ndarray


class PendingSave(NamedTuple):
    """A save that a process has begun: its writes, and the same blocks in memory."""

    writes: list[Any]
    """Each has `result()`, which returns when it is written."""
    blocks: list[LocalBlock]
    """The same, in memory; it is emptied when they are hashed."""


def begin(handler: ocp.PyTreeCheckpointHandler, temporary: Path, state: Any) -> PendingSave:
    """Begin to write the arrays that this process holds; returns when the state may change.

    Raises OSError where the disk has no room for them: found while writing, Orbax leaves pages of tracebacks behind.
    """
    shards = [shard for leaf in jax.tree.leaves(state) for shard in getattr(leaf, "addressable_shards", ())]
    disk = shutil.disk_usage(temporary.parent)
    if sum(shard.data.nbytes for shard in shards if shard.replica_id == 0) > disk.free and disk.total:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    writes = asyncio.run(handler.async_save(epath.Path(temporary / STATE), args=ocp.args.PyTreeSave(state))) or []
    # An array keeps the copy that Orbax has made, and which it writes: this is that one, not another.
    named = ((name, bounds, shard) for name, leaf in named_leaves(state) for bounds, shard in shards_of(leaf))
    return PendingSave(writes, [LocalBlock(name, at, np.asarray(s.data)) for name, at, s in named if s.replica_id == 0])


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf of a tree, named as in a checkpoint."""
    return [(jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in jax.tree.leaves_with_path(tree)]


def shards_of(leaf: Any) -> Iterator[tuple[Bounds, Any]]:
    """(bounds, shard) of what this process has of an array."""
    for shard in getattr(leaf, "addressable_shards", ()):
        yield bounds_of(shard.index, leaf.shape), shard


def hash_blocks(blocks: list[LocalBlock], rank: int) -> dict[str, tuple[BlockDigest, ...]]:
    """The digests of blocks by the names of their arrays; each block is let go of when it is hashed."""
    digests: dict[str, tuple[BlockDigest, ...]] = {}
    while blocks:
        name, bounds, data = blocks.pop()
        digests[name] = (*digests.get(name, ()), BlockDigest(bounds, digest(data), rank))
    return digests


def write_part(temporary: Path, step: int, blocks: Mapping[str, tuple[BlockDigest, ...]], rank: int) -> None:
    """Write the digests of this rank's files, which are final by now, where rank 0 finds them."""
    own = temporary / STATE / f"ocdbt.process_{rank}"
    files = {
        str(path.relative_to(temporary)): FileDigest.of_file(path, rank, hashed=path.stat().st_size <= SMALL)
        for path in files_below(own)
    }
    temporary.mkdir(parents=True, exist_ok=True)  # a rank that owns nothing may be here before rank 0 has made it
    (temporary / f"{TABLE}.{rank}").write_text(DigestTable(step=step, files=files, blocks=blocks).to_json())


def sync_file(path: Path) -> None:
    """Bring the contents of a file, whoever wrote it, to the disk. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_table(temporary: Path, step: int, ranks: int, meta: str) -> None:
    """Write the table of a checkpoint whose other files are there: from all ranks' parts and rank 0's own files."""
    parts = [temporary / f"{TABLE}.{rank}" for rank in range(ranks)]
    table = merge(map(DigestTable.read, parts), step=step, meta=(digest(meta.encode()),))
    for path in parts:
        path.unlink()
    added = {str(path.relative_to(temporary)): path for path in files_below(temporary)}
    added = {name: path for name, path in added.items() if name != META and name not in table.files}
    for path in added.values():  # some are Orbax's, which leaves them to the system: a power failure would empty them
        sync_file(path)
    added = {name: FileDigest.of_file(path) for name, path in added.items()}
    replace(table, files={**table.files, **added}).write(temporary / TABLE)


def commit(handler: ocp.PyTreeCheckpointHandler, temporary: Path, checkpoint: Path, meta: str, ranks: int) -> None:
    """Make a complete checkpoint from the files of all `ranks`. It is complete from the rename on, with which this
    ends; the caller brings its name to the disk (`sync_folder`)."""
    with _without_patterns(temporary / STATE) as state:  # Orbax writes one database over those of the ranks
        handler.finalize(epath.Path(state))
    if not (temporary / STATE / MERGED).exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(temporary / STATE / MERGED))
    write_file(temporary / META, meta)
    # The table has the digest of each small file, so it comes after all of them.
    write_table(temporary, int(checkpoint.name), ranks, meta)
    os.rename(temporary, checkpoint)


@contextlib.contextmanager
def _without_patterns(folder: Path) -> Iterator[Path]:
    """A path of a folder that is no pattern: Orbax finds the parts of the ranks by one that begins with the path, so of
    a run in `lr[1]` it would find none, and say nothing."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place, folder.name)
        link.symlink_to(folder.absolute())
        yield link


def replace_meta(checkpoint: Path, meta: str) -> None:
    """Give a checkpoint another `meta.json`. Cut off anywhere, the old one or the new one is there, and agrees."""
    _, table = read_verified(checkpoint, int(checkpoint.name))
    new = digest(meta.encode())
    replace(table, meta=(*table.meta, new)).write(checkpoint / TABLE)
    write_file(checkpoint / META, meta)
    replace(table, meta=(new,)).write(checkpoint / TABLE)


def stored_dtype(shape: Sequence[Any]) -> Any:
    """The type of an array on disk; of random keys, the integers that they are."""
    return jnp.dtype(jnp.uint32) if "key<" in shape[-1] else jnp.dtype(shape[-1])


def restore_state(handler: ocp.PyTreeCheckpointHandler, checkpoint: Path, like: Any, *, whole: bool) -> Any:
    """The arrays of a checkpoint, with the structure, dtypes and shardings of `like`."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, keys_to_data(like))
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=not whole)
    return data_to_keys(handler.restore(epath.Path(checkpoint / STATE), args=args), like)


def select_prefix(prefix: str, shapes: Mapping[str, _Value]) -> dict[str, _Value]:
    """The part of a train state's `shapes` below the prefix `PARAMS` or `REST`, by name."""
    return {name.removeprefix(prefix): value for name, value in shapes.items() if name.startswith(prefix)}


def evaluated_prefix(shapes: Mapping[str, Any]) -> str:
    """The prefix of the parameters that a train state is evaluated with: of their average, where it has one."""
    return AVERAGE if any(name.startswith(AVERAGE) for name in shapes) else PARAMS


def model_bytes(shapes: Mapping[str, list[Any]]) -> int:
    """Bytes of what `read_model` reads, by a train state's `shapes`; random keys, of a few bytes, are left out."""
    read = evaluated_prefix(shapes), REST
    kept = [shape for name, shape in shapes.items() if name.startswith(read) and "key<" not in shape[-1]]
    return sum(math.prod(shape) * jnp.dtype(kind).itemsize for *shape, kind in kept)


def read_model(
    checkpoint: Path, saved: MetaFile, table: DigestTable
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameters, the rest) of a train state, whole and in memory, random keys of the rest as integers.

    The parameters are those that it is evaluated with.
    One process reads them alone, and asks no device. Raises ValueError where they do not agree with their digests; what
    Orbax raises passes.
    """
    kind = evaluated_prefix(saved.shapes)
    arrays = read_named(checkpoint, {name for name in saved.shapes if name.startswith((kind, REST))})
    problems: list[str] = []
    for name, array in arrays.items():
        if array.dtype == stored_dtype(saved.shapes[name]):
            whole = tuple((0, size) for size in array.shape)
            problems += table.check_array(name, {whole: lambda array=array: array})
    if problems:
        raise UserError(problems_text(problems))
    return select_prefix(kind, arrays), select_prefix(REST, arrays)


def read_named(checkpoint: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Read some arrays of a checkpoint by their names in `shapes`, whole and in memory."""
    with quiet_orbax(), contextlib.closing(array_handler()) as handler:
        tree = handler.metadata(epath.Path(checkpoint / STATE)).tree
        named = partial(jax.tree_util.keystr, simple=True, separator="/")
        item = jax.tree.map_with_path(
            lambda path, leaf: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if named(path) in names else ocp.PLACEHOLDER
            ),
            tree,
        )
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
        arrays = named_leaves(handler.restore(epath.Path(checkpoint / STATE), args=args))
    return {name: array for name, array in arrays if name in names}


def cause(error: BaseException) -> str:
    """An error in one line; the system's words where the system was the cause."""
    while error.__cause__ is not None and not isinstance(error, StoreError):
        error = error.__cause__  # Orbax wraps a page of its own around what happened
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip() or repr(error)
    shown = text.splitlines()[0].partition(" [")[0]  # tensorstore names lines of its source, and its whole request
    return next((os.strerror(code) for code in CAUSES if os.strerror(code) in text), shown[:SHOWN_CAUSE])


def shapes(tree: Any) -> dict[str, list[Any]]:
    """The shape of each leaf, and its type behind that, by its name."""
    return {name: [*leaf.shape, str(leaf.dtype)] for name, leaf in named_leaves(tree)}


def difference(saved: Mapping[str, list[Any]], wanted: Mapping[str, list[Any]], *, whole: bool) -> str:
    """The first thing in which a checkpoint differs from what shall be restored, or nothing. Parameters alone, where it
    is not `whole`, may be restored in another type than they were trained in."""
    for name, shape in wanted.items():
        if name not in saved:
            return f"it has no {name}"
        there, end = saved[name], None if whole else -1
        if there[:end] != shape[:end]:
            return f"{name} is {there[-1]}{tuple(there[:-1])} in it and {shape[-1]}{tuple(shape[:-1])} here"
    extra = [name for name in saved if name not in wanted]
    return f"it has {extra[0]}, which is not here" if extra else ""


def is_key(leaf: Any) -> bool:
    """Whether a leaf is random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def keys_to_data(state: Any) -> Any:
    """Random keys as plain integers, which is what a file can hold."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, state)


def data_to_keys(state: Any, like: Any) -> Any:
    """The reverse; `like` says which leaves are keys."""

    def back(leaf: Any, model: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(model)) if is_key(model) else leaf

    return jax.tree.map(back, state, like)
