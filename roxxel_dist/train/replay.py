"""The validation of a checkpoint, outside of any training: the program that a `Trainer` would have run."""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from roxxel_dist.cluster.mesh import batch_sharding
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.train.base import below
from roxxel_dist.train.checkpoint import CheckpointStore
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.evaluate import Validation
from roxxel_dist.train.inflight import InFlight
from roxxel_dist.train.programs import Programs
from roxxel_dist.train.state import init_state
from roxxel_dist.train.step import LossFn, fetch, make_eval_step


class Replay:
    """The weights of a checkpoint on a mesh, and what measures their losses. All ranks make the same calls.

    Moments are not read: it takes the memory of the weights alone.

    Args:
        store: the checkpoints.
        step: which one.
        build: makes the model.
        loss_fn: see `Trainer`.
        sets: the data to validate on, by name.
        train: the training data.
        shape: of the phase that was trained.
        mesh: devices of all processes.
        options: of the run: `eval_iters`, `fsdp`, `use_bf16` and `bf16_compute`.

    Raises:
        ValueError: the checkpoint is of another model or damaged, or a data set is too small for a batch.
    """

    def __init__(
        self,
        store: CheckpointStore,
        step: int,
        build: Callable[[], nnx.Module],
        loss_fn: LossFn,
        *,
        sets: Mapping[str, Roxxel],
        train: Roxxel,
        shape: Shape,
        mesh: Mesh,
        options: LoopOptions,
    ) -> None:
        dtype = jnp.bfloat16 if options.use_bf16 else None
        parts, state, self._settings = init_state(
            build, lambda params: {}, mesh, fsdp=options.fsdp, dtype=dtype, restored=True,
            load=below(store.meta(step), options.init_from),
        )  # fmt: skip
        self._shape, self._one_in_flight = shape, InFlight(mesh).limit == 1
        self._programs = Programs(mesh)
        try:
            self._validation = Validation(
                sets,
                train,
                make_eval_step(parts, loss_fn, jnp.bfloat16 if options.bf16_compute else None),
                self._programs,
                batch_sharding(mesh),
                options.eval_iters,
            )
            self._validation.check(shape)
            self._validation.prepare(state, self._settings, shape)
            wanted = {name: leaves for name in ("params", "rest") if (leaves := getattr(state, name))}
            self._state = state._replace(**store.restore_model(step, wanted))
        except BaseException:
            self._programs.close()
            raise

    def losses(self) -> dict[str, float]:
        """What `Validation.summarize` says."""
        self._programs.wait_together()
        found = self._validation.run(self._state, self._settings, self._shape, one_in_flight=self._one_in_flight)
        return self._validation.summarize(fetch(found), self._shape)

    def reads(self) -> dict[str, tuple[int, int]]:
        """(batches, tokens) that are read of each data set, by name."""
        return self._validation.reads(self._shape)

    def close(self) -> None:
        """Let go of the thread that compiles."""
        self._programs.close()
