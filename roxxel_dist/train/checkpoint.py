"""Checkpoints by Orbax: saved by all ranks together while training goes on, restored exactly.

A checkpoint holds the train state (parameters, optimizer, random streams, step) and a small JSON of what else a run
needs to continue. It counts only once it is complete: Orbax renames its folder at the very end.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from roxxel_dist.cluster.process import agree


class Checkpointer:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when first needed. Every rank must see the same folder.
        max_to_keep: how many to keep, the newest ones.
        read_only: look, and change nothing; the folder may belong to a run that is still going on.
    """

    def __init__(self, folder: str | Path, max_to_keep: int | None = 3, *, read_only: bool = False) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of every option that read_only implies
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else max_to_keep,
            enable_async_checkpointing=not read_only,
            cleanup_tmp_directories=not read_only,  # a save that died leaves its temporary folder
            create=not read_only,
            read_only=read_only,
        )
        handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, item_handlers=handlers, options=options)

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, as rank 0 sees it; None where there is none."""
        step = agree("latest checkpoint", str(self._manager.latest_step()))
        return None if step == "None" else int(step)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Begin to save; returns once the state may change. A step that is saved already is left as it is."""
        if self._manager.latest_step() == step:
            return
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(_keys_to_data(state)), meta=ocp.args.JsonSave(meta))
        self._manager.save(step, args=items)

    def check(self) -> None:
        """Whether the saving in the background goes well; costs nothing.

        Raises:
            RuntimeError: it failed, on a full disk say.
        """
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise RuntimeError(f"a checkpoint could not be saved in {self.folder}: {_first_line(error)}") from error

    def meta(self, step: int) -> dict[str, Any]:
        """The small JSON of a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax has no error of its own for this
            others = [str(other) for other in sorted(self._manager.all_steps()) if other < step]
            back = f"to go on from step {others[-1]}" if others else "and begin again"
            why, where = _first_line(error), self.folder / str(step)
            raise ValueError(f"the checkpoint of step {step} is damaged ({why}): remove {where} {back}") from error

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, with the structure, shapes, dtypes and shardings of `like`.

        Raises:
            ValueError: the checkpoint is of another model or optimizer, or there is none of that step.
        """
        return _data_to_keys(self._restore(step, _keys_to_data(like), whole=True), like)

    def restore_params(self, step: int, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters alone, placed as `like`, whatever the run's optimizer was.

        Raises:
            ValueError: the checkpoint is of another model, or there is none of that step.
        """
        return self._restore(step, {"params": like}, whole=False)["params"]

    def _restore(self, step: int, like: Any, *, whole: bool) -> Any:
        if step not in self._manager.all_steps():
            known = ", ".join(map(str, sorted(self._manager.all_steps()))) or "none"
            raise ValueError(f"{self.folder} has no checkpoint of step {step}; those there are: {known}")
        with self._readable(step):
            saved = _shapes(self._manager.item_metadata(step)["state"].tree)
        if wrong := _difference(saved, _shapes(like), whole):
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is of another model or optimizer ({wrong}): "
                f"use the config that it was made with, or a new run directory"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
        args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=not whole)
        with self._readable(step):
            return self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]

    def wait(self) -> None:
        """Until every save that was begun is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being saved and let go of the threads."""
        self._manager.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:300]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Every leaf's shape by its name: a saved tree has dictionaries where the living one has tuples."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in paths}


def _difference(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], whole: bool) -> str:
    """The first thing in which a checkpoint differs from what shall be restored, or nothing."""
    for name, shape in wanted.items():
        if name not in saved:
            return f"it has no {name}"
        if saved[name] != shape:
            return f"{name} is {saved[name]} in it and {shape} here"
    extra = [name for name in saved if name not in wanted] if whole else []
    return f"it has {extra[0]}, which is not here" if extra else ""


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _keys_to_data(state: Any) -> Any:
    """Random keys as plain integers, which is what a file can hold."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)


def _data_to_keys(state: Any, like: Any) -> Any:
    def back(leaf: Any, model: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(model)) if _is_key(model) else leaf

    return jax.tree.map(back, state, like)
