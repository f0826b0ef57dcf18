"""Checkpoints of an NNX model and its optimizer, for your own training loop."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.checkpoint.reader import DamagedCheckpoint
from roxxel_dist.checkpoint.store import CheckpointStore
from roxxel_dist.model.split import split_module
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.bad_steps import LossMonitorState
from roxxel_dist.train.step.state import TrainState, TrainView

log: logging.Logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a model and its optimizer while training goes on, and loads them again.

    All state of both is kept: parameters, running statistics, random streams, moments, step. Several processes make the
    same calls, on arrays that lie over all of them.

    It only reads until its first `save`: to open the folder and to restore changes no file, even while another program
    saves there. From the first `save` until `close` it holds the lock of the folder, so no other program saves there.

    Args:
        checkpoint_path: the folder of the checkpoints; the first `save` makes it where it is missing.
        model: the module to save, and to load into.
        optimizer: its optimizer, or None.
        max_to_keep: how many checkpoints to keep, the newest ones; the one with the lowest "val_loss" stays too.

    Raises:
        ValueError: the folder cannot be read, or `max_to_keep` is below 1.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any] | None = None,
        max_to_keep: int | None = 3,
    ) -> None:
        self._objects: dict[str, Any] = {"model": model} | ({} if optimizer is None else {"optimizer": optimizer})
        self.store: CheckpointStore = CheckpointStore(checkpoint_path, max_to_keep, writes_later=True)
        """The checkpoints themselves; those of the run, of a checkpointer that was given to a `Trainer`."""

    def save(self, step: int, metrics_dict: Mapping[str, Any] | None = None) -> None:
        """Begin to save; returns once the model may be trained on.

        A save before this one that failed is logged as a warning: training may go on, and the next one tries again.

        Args:
            step: steps done.
            metrics_dict: numbers to keep with the checkpoint; "val_loss" decides which checkpoint is the best.

        Raises:
            ValueError: there is a checkpoint of that step already, perhaps of an earlier training in this folder;
                another program saves there; or the folder cannot be written.
        """
        self.store.settle()
        self._check_free(step)  # before the folder is touched
        if not self.store.writes:
            self.store.begin_writing(nested=False)
            self._check_free(step)  # under the lock
        metrics = {name: float(value) for name, value in (metrics_dict or {}).items()}
        self.store.save(step, self._leaves(), {"metrics": metrics}, metrics.get("val_loss"))
        while ended := self.store.poll():
            if text := ended.problem or ended.warning:
                log.warning("%s", text)

    def _check_free(self, step: int) -> None:
        """Raises UserError where the folder is of a Trainer, or has a checkpoint of that step."""
        if (newest := self.store.latest_step()) is not None and self._is_of_trainer(newest):
            raise UserError(f"{self.store.folder} has the checkpoints of a Trainer, which alone saves there")
        if step in self.store.steps():
            raise UserError(
                f"{self.store.folder} has a checkpoint of step {step} already: call restore() first to continue from "
                f"the newest one ({self.store.latest_step()}), or use another folder"
            )

    def restore(self) -> int:
        """Load the newest complete checkpoint into model and optimizer, and return its step; 0 where none is kept.

        It may be one of a `Trainer`. One that is damaged is passed over with a warning; the next `save` renames it to
        `<step>.damaged`.

        Raises:
            ValueError: the checkpoint is of another model or optimizer, or all that are kept are damaged.
        """
        if not self.store.writes:
            self.store.refresh()
        self.store.settle()
        self.store.check_not_all_damaged()
        while (step := self.store.latest_step()) is not None:
            try:
                return self._restore(step)
            except DamagedCheckpoint as damage:
                log.warning("%s", self.store.set_aside(damage))
        return 0

    def _restore(self, step: int) -> int:
        if self._is_of_trainer(step):
            self._restore_run(step)
            return step
        leaves = self.store.restore(step, self._leaves())
        for name, thing in self._objects.items():
            tree = jax.tree.structure(nnx.state(thing))
            nnx.update(thing, jax.tree.unflatten(tree, leaves[name].values()))
        return step

    def _is_of_trainer(self, step: int) -> bool:
        return bool(self.store.metadata(step).plan)

    def _restore_run(self, step: int) -> None:
        """Load a checkpoint that a `Trainer` has saved."""
        model, optimizer = self._objects["model"], self._objects.get("optimizer")
        parts, params, rest, settings = split_module(model)
        like: dict[str, Any] = {"params": params, "rest": jax.tree.map(jnp.asarray, rest), "opt_state": {}}
        if optimizer is not None:
            like["opt_state"] = optimizer.tx.init(params)
        saved = {name: tree for name, tree in like.items() if jax.tree.leaves(tree)}
        averaged = self.store.has_average(step)
        if averaged and "opt_state" in saved:
            saved["opt_state"] = {"inner": saved["opt_state"]}
        restored = like | self.store.restore_model(step, saved)
        if averaged and "opt_state" in saved:
            restored["opt_state"] = restored["opt_state"]["inner"]
        state = TrainState(jnp.int32(step), **restored, health=LossMonitorState.initial())
        TrainView(parts, state, settings).copy_to(model, optimizer)

    def _leaves(self) -> dict[str, dict[str, jax.Array]]:
        """Every array by its path, in the order of the state's tree."""
        return {name: _named(nnx.state(thing)) for name, thing in self._objects.items()}

    def wait(self) -> None:
        """Wait until the last save is complete. Raises SaveError where it failed, on a full disk say."""
        self.store.wait()

    def close(self) -> None:
        """Finish what is being saved; release folder and thread. Raises SaveError where the last save failed."""
        self.store.close()
        self.store.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.close()
        if error is None:
            self.store.wait()


def _named(state: Any) -> dict[str, jax.Array]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    # A variable may hold a number of Python.
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): jnp.asarray(leaf)
        for path, leaf in paths
    }
