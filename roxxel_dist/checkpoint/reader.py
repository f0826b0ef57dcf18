"""The checkpoints of a run, as they are read: which there are, what they say of themselves, and their arrays, compared
with their digests. All ranks read together, and find the same. Decision 16."""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import (
    BlockDigest,
    Bounds,
    DigestTable,
    bounds_of,
    containment,
    list_damaged,
    problems_text,
    read_verified,
    shares,
)
from roxxel_dist.checkpoint.metadata import CheckpointMetadata, MetaFile, best_of
from roxxel_dist.checkpoint.remote import RemoteCheckpoints, is_read
from roxxel_dist.checkpoint.stored_blocks import wrong_blocks
from roxxel_dist.cluster.distributed import (
    broadcast_from_primary,
    gather_to_primary,
    is_primary,
    process_count,
    process_index,
)
from roxxel_dist.data.files.discovery import check_local
from roxxel_dist.process.durable import FormatError
from roxxel_dist.process.exit_codes import UserError

CHECK_LIMIT_S = 3600.0
"""Seconds that ranks may differ in how long they read and hash one."""

_opened = itertools.count()
"""Numbers the readers of this process, for the keys of their messages; all ranks open them in the same order."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was saved. All ranks raise it together, with the same text."""

    def __init__(self, folder: Path, step: int, why: str, hint: str = "") -> None:
        super().__init__(f"the checkpoint of step {step} in {folder} is damaged: {why}{hint}")
        self.folder: Path = folder
        self.step: int = step
        self.why: str = why
        """What does not agree: files, arrays, and the rank that wrote them."""


class CheckpointReader:
    """The checkpoints of one run, which may still go on. All ranks make the same calls. Nothing on the disk is changed.

    Args:
        folder: where they are. Every rank must see the same folder, if not for `remote`.
        remote: the same checkpoints in a bucket, which alone count; the folder has what this host needs of them.
    """

    def __init__(self, folder: str | Path, *, remote: RemoteCheckpoints | None = None) -> None:
        check_local("the folder of checkpoints", folder)
        self.folder: Path = Path(folder).absolute()
        self._name = f"checkpoint {next(_opened)}"
        self._remote = remote
        self._saved: dict[int, float | None] = {}
        self._read_last: tuple[int, MetaFile, DigestTable] | None = None
        self._look()
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(files.quiet_orbax())
        self._handler = files.array_handler()

    def _look(self) -> None:
        """Find which checkpoints there are, for the first time."""
        self.refresh()

    def refresh(self) -> None:
        """Look again which checkpoints there are; all ranks together. It changes nothing on the disk."""
        self.settle()
        self._read_last = None
        self._saved = self._open_folder()

    def _open_folder(self, *, writes: bool = False, sweeps: bool = False) -> dict[int, float | None]:
        in_bucket = None if self._remote is None else partial(self._remote.list_saved, read_only=not writes)
        return files.open_folder(self.folder, read_only=not writes, sweeps=sweeps, in_bucket=in_bucket)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until nothing is being saved; a reader saves nothing."""
        del limit_s

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, as far as `poll`, `settle` or `save` has heard of them."""
        return sorted(self._saved)

    def latest_step(self) -> int | None:
        """The newest of `steps`, or None."""
        return max(self._saved, default=None)

    def latest_of_all(self) -> int | None:
        """The newest checkpoint as rank 0 knows it, on every rank; all ask together. A rank that could not hear how a
        save ended, as its agreement timed out, knows an older list."""
        self.settle()
        known = json.loads(broadcast_from_primary(self._name, json.dumps(list(self._saved.items()))))
        self._saved = {int(step): val_loss for step, val_loss in known}
        return self.latest_step()

    def best_step(self) -> int | None:
        """The one of `steps` with the lowest val_loss; None where none was saved with one."""
        return best_of(self._saved)

    def val_loss(self, step: int) -> float | None:
        """The val_loss that a checkpoint was saved with; None without one, or where it is no number."""
        return self._saved.get(step)

    def close(self, limit_s: float | None = None) -> None:
        """Let go of what reading holds."""
        del limit_s
        self._handler.close()
        self._quiet.close()

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that a checkpoint was saved with. Raises ValueError where there is none of that step, and
        DamagedCheckpoint where it is damaged."""
        return dict(self._read(step)[0].meta)

    def metadata(self, step: int) -> CheckpointMetadata:
        """`meta`, of a checkpoint that a `Trainer` has saved; empty of others."""
        return CheckpointMetadata.from_dict(self.meta(step))

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, with the structure, shapes, dtypes and shardings of `like`.

        Files are compared before Orbax reads them, and every block of an array after that: where it lies on a device,
        or, where no device has all of it, from the file by one of the ranks.
        Raises ValueError where the checkpoint is of another model or optimizer, or there is none of that step, and
        DamagedCheckpoint where it is damaged.
        """
        return self._restore(step, like, whole=True)

    def restore_model(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Restore some of a `TrainState`'s fields by name, such as "params" and "rest", placed as `like`; no moments.
        Raises what `restore` does."""
        return self._restore(step, like, whole=False)

    def restore_evaluated(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """`restore_model`, where "params" are those that the state is evaluated with: their average, if it has one."""
        if not self.has_average(step):
            return self.restore_model(step, like)
        others = {name: leaves for name, leaves in like.items() if name != "params"}
        found = self.restore_model(step, {**others, "opt_state": {"average": like["params"]}})
        return {**{name: found[name] for name in others}, "params": found["opt_state"]["average"]}

    def has_average(self, step: int) -> bool:
        """Whether a checkpoint has an average of the parameters."""
        return files.evaluated_prefix(self._read(step)[0].shapes) == files.AVERAGE

    def restore_params(self, step: int, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters alone, whatever the run's optimizer was; see `restore_model`."""
        return self.restore_model(step, {"params": like})["params"]

    def fetch_meta(self, step: int) -> None:
        """Bring `meta.json` and the digests of a checkpoint in a bucket into the folder. Raises StoreError."""
        if self._remote is not None:
            self._remote.fetch_meta(step)

    def fetch_model(self, step: int) -> None:
        """Bring what `files.read_model` reads of a checkpoint in a bucket into the folder, for one process alone.
        Raises ValueError where it is damaged, and StoreError."""
        if self._remote is not None and (problems := self._remote.fetch_model(step)):
            raise UserError(problems_text(problems))

    def check_params(self, step: int, like: dict[str, Any]) -> None:
        """Raises ValueError where `restore_params` would find another model; `like` may be shapes alone."""
        self._check(step, {"params": like}, whole=False)

    def param_shapes(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a checkpoint's parameters by name. It raises what `meta` does."""
        saved = files.select_prefix(files.PARAMS, self._read(step)[0].shapes)
        return {name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind)) for name, (*shape, kind) in saved.items()}

    def rest_shapes(self, step: int) -> dict[str, list[Any]]:
        """The same of what a checkpoint has beside parameters and moments, as `files.shapes` gives them."""
        return files.select_prefix(files.REST, self._read(step)[0].shapes)

    def fingerprint(self, step: int) -> str:
        """A digest of the parameters of a checkpoint, as its table has them."""
        return self._read(step)[1].fingerprint(files.PARAMS)

    def check(self, step: int) -> None:
        """Compare `meta.json`, the files and all arrays of a checkpoint with their digests, and keep none of them.
        Raises DamagedCheckpoint where one does not agree."""
        table = self._read(step)[1]
        mine = _share_of(table.all_blocks())
        if self._remote is not None:
            wanted = set(mine)
            problems = self._remote.fetch(step, table, lambda name, block: (name, block) in wanted)
        else:
            problems = table.check_files(self.folder / str(step), process_index(), process_count())
            problems += wrong_blocks(self.folder / str(step), mine).values()
        self._agree(step, problems)

    def check_not_all_damaged(self) -> None:
        """Raises ValueError where there are no checkpoints but damaged ones: a run never begins again beside them."""
        names = [] if not is_primary() else self._remote.list_damaged() if self._remote else list_damaged(self.folder)
        names = json.loads(broadcast_from_primary(self._name, json.dumps(names)))
        if names and not self._saved:
            raise UserError(self._nothing_whole(names))

    def _nothing_whole(self, damages: list[str]) -> str:
        return (
            f"every checkpoint in {self.folder} is damaged ({'; '.join(damages)}): put one back from a copy, or begin "
            f"a new run in another folder"
        )

    def _check(self, step: int, like: Any, *, whole: bool) -> None:
        """Raises UserError where a checkpoint is of another model than `like`, or if `whole` of another optimizer."""
        saved, wanted = self._read(step)[0].shapes, files.shapes(like)
        if not whole:  # of a part that is read, each parameter is wanted
            kinds = files.PARAMS if any(name.startswith(files.PARAMS) for name in wanted) else ()
            saved = {name: shape for name, shape in saved.items() if name in wanted or name.startswith(kinds)}
        if wrong := files.difference(saved, wanted, whole=whole):
            what, cure = ("model or optimizer", "config") if whole else ("model", "model fields")
            raise UserError(
                f"the checkpoint of step {step} in {self.folder} is of another {what} ({wrong}): use the {cure} that "
                f"it was made with" + (", or a new run directory" if whole else "")
            )

    def _restore(self, step: int, like: Any, *, whole: bool) -> Any:
        self._check(step, like, whole=whole)
        saved, table = self._read(step)
        checkpoint = self.folder / str(step)
        if self._remote is not None:
            wrong = self._remote.fetch(step, table, is_read(like))
        else:
            wrong = table.check_files(checkpoint, process_index(), process_count())
        self._agree(step, wrong)  # Orbax is given no file that is missing, cut, or of another checkpoint
        state = None
        try:
            state = files.restore_state(self._handler, checkpoint, like, whole=whole)
            problems = _check_arrays(state, table, saved.shapes)
            if self._remote is None:  # else they were compared when they were fetched
                split = _blocks_off_devices(like, table, saved.shapes)
                problems += wrong_blocks(checkpoint, _share_of(split)).values()
        except Exception as error:  # Orbax raises various types for a file it cannot read
            problems = [files.cause(error)]
        self._agree(step, problems)
        return state

    def _agree(self, step: int, problems: list[str]) -> None:
        """Raises DamagedCheckpoint, on all ranks, where one of them has found something wrong."""
        heard = [text for text in gather_to_primary(self._name, problems_text(problems), CHECK_LIMIT_S) if text]
        exists = (self.folder / str(step)).exists if self._remote is None else partial(self._remote.exists, step)
        why, deleted = problems_text(list(dict.fromkeys(heard))), bool(heard) and not exists()
        why, deleted = json.loads(broadcast_from_primary(self._name, json.dumps([why, deleted]), CHECK_LIMIT_S))
        if not why:
            return
        self._read_last = None
        if deleted:  # its run goes on, and keeps the newest ones
            raise UserError(f"the checkpoint of step {step} in {self.folder} was deleted while it was read")
        raise DamagedCheckpoint(self.folder, step, why, self._hint(step))

    def _hint(self, step: int) -> str:
        """What to name instead of a damaged checkpoint: for a reader of another run's, an older one."""
        older = [other for other in self.steps() if other < step]
        if not older:
            return "; there is no older one"
        try:
            self.check(older[-1])
        except DamagedCheckpoint as another:  # whose own hint is of the next older complete one
            return str(another).removeprefix(f"the checkpoint of step {another.step} in {self.folder} is damaged: ")
        return f"; the next older complete one is of step {older[-1]}: name that"

    def _read(self, step: int) -> tuple[MetaFile, DigestTable]:
        """The metadata and digests of a checkpoint, once all ranks have read the same."""
        if step not in self._saved:
            known = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; those there are: {known}")
        if self._read_last is not None and self._read_last[0] == step:
            return self._read_last[1:]
        saved, problems = None, list[str]()
        try:
            if self._remote is not None:
                self._remote.fetch_meta(step)
            saved = read_verified(self.folder / str(step), step)
        except FormatError:  # the same on all ranks
            raise
        except ValueError as error:
            problems = [str(error)]
        self._agree(step, problems)
        assert saved is not None
        self._read_last = step, *saved
        return saved


def _share_of(blocks: list[tuple[str, BlockDigest]]) -> list[tuple[str, BlockDigest]]:
    """The blocks that this rank compares for all."""
    work = {named: math.prod(high - low for low, high in named[1].bounds) for named in blocks}
    return shares(work, process_count())[process_index()]


def _blocks_off_devices(like: Any, table: DigestTable, saved: Mapping[str, list[Any]]) -> list[tuple[str, BlockDigest]]:
    """The blocks, of arrays read for `like`, that `_check_arrays` compares on no rank: they do not lie on one device as
    they did, or are converted to another type. The same on all ranks."""
    blocks: list[tuple[str, BlockDigest]] = []
    for name, leaf in files.named_leaves(like):
        there: set[Bounds] = set()
        if (
            saved.get(name) == [*leaf.shape, str(leaf.dtype)]
            and not files.is_key(leaf)
            and getattr(leaf, "sharding", None)
        ):
            there = {bounds_of(index, leaf.shape) for index in leaf.sharding.devices_indices_map(leaf.shape).values()}
        is_there = containment(there)
        blocks += [(name, block) for block in table.blocks.get(name, ()) if not is_there(block.bounds)]
    return blocks


def _check_arrays(state: Any, table: DigestTable, saved: Mapping[str, list[Any]]) -> list[str]:
    """What is wrong with the arrays that this process has read: blocks that lie on one device as they did are compared.
    `saved` are the shapes and types that they were saved with: one that was converted cannot be compared."""
    problems: list[str] = []
    for name, leaf in files.named_leaves(files.keys_to_data(state)):
        if name not in saved or leaf.dtype != files.stored_dtype(saved[name]):
            continue
        shards = dict(files.shards_of(leaf))  # a copy is read once
        problems += table.check_array(name, {at: partial(np.asarray, shard.data) for at, shard in shards.items()})
    return problems
