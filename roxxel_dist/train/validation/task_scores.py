"""The scores of evaluation tasks: the losses of their rows, computed by all devices in batches of one shape."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import fit_sharding, row_shards
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.tasks import Task, length_for, pad_scored
from roxxel_dist.model.loss import losses_of_tokens
from roxxel_dist.model.split import Leaves, ModuleSplit
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import Hparams
from roxxel_dist.train.step.throughput import InflightThrottler

KEY = "tasks"


class TaskScores:
    """What some tasks, perhaps none, measure of a state. The result is the same on any number of devices, up to
    rounding.

    A batch of their rows has as many tokens as the largest of the phases of these `shapes`, or a row a device;
    `compute_dtype` is that of parameters, as in a validation.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        split: ModuleSplit,
        compiler: AotCompiler,
        sharding: NamedSharding,
        shapes: Sequence[Shape],
        compute_dtype: Any = None,
    ) -> None:
        self._tasks, self._split, self._compiler = tasks, split, compiler
        self._rows = [row for task in tasks for row in task.rows]
        if not tasks:
            return
        length = length_for(self._rows, min(task.max_context for task in tasks))
        pieces, room = row_shards(sharding.mesh), max(shape.batch_size * shape.seq_len for shape in shapes)
        most = max(1, room // (length * pieces))
        self._shape = pieces * min(most, -(-len(self._rows) // pieces)), length + 1
        self._sharding = fit_sharding(sharding, self._shape)

        def losses(params: Leaves, rest: Leaves, hparams: Hparams, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            """float32[B]: the sum of the losses of the scored tokens, where `batch` is (tokens, is scored)."""
            tokens_BxL, scored_BxL = batch
            model = split.merge(params, rest, hparams, training=False, dtype=compute_dtype)
            return jnp.where(scored_BxL[:, 1:] != 0, losses_of_tokens(model, tokens_BxL), 0).sum(1)

        self._losses = jax.jit(losses, out_shardings=NamedSharding(sharding.mesh, P()))

    def check(self, state: TrainState, hparams: Hparams) -> None:
        """Raises ValueError where the model does not make logits of tokens alone; nothing is computed."""
        if not self._tasks:
            return

        def logits_of(state: TrainState, hparams: Hparams, tokens: Any) -> Any:
            return self._split.merge(state.params, state.rest, hparams, training=False)(tokens)

        tokens = jax.ShapeDtypeStruct((self._shape[0], self._shape[1] - 1), jnp.int32)
        rule = "eval_tasks needs a model that makes [B, L, vocabulary] logits of int32[B, L] tokens alone"
        try:
            with jax.set_mesh(self._compiler.mesh):
                logits = jax.eval_shape(logits_of, state, hparams, tokens)
        except Exception as error:  # of whatever kind: the model is the user's
            raise UserError(f"{rule}, and this one says {error!r}: leave eval_tasks out") from error
        shape = getattr(logits, "shape", None)
        if shape is None or shape[:-1] != tokens.shape:
            what = f"a {type(logits).__name__}" if shape is None else f"an array of shape {shape}"
            raise UserError(f"{rule}, and this one makes {what} of tokens of shape {tokens.shape}: leave it out")

    def prepare(self, state: TrainState, hparams: Hparams) -> list[Hashable]:
        """Begin to compile the program, and return its key; nothing where there is no task."""
        if not self._tasks:
            return []
        array = jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)
        self._compiler.prepare(KEY, self._losses, state.evaluated, state.rest, hparams, (array, array))
        return [KEY]

    def run(self, state: TrainState, hparams: Hparams) -> list[jax.Array]:
        """float32[B] for each batch, on the devices. All ranks call it together."""
        found: list[jax.Array] = []
        throttler = InflightThrottler(self._compiler.mesh)
        for key in self.prepare(state, hparams):
            program = self._compiler.get(key)
            for batch in self._batches():
                throttler.wait_for_next()
                found.append(program(state.evaluated, state.rest, hparams, batch))
                throttler.add(found[-1])
        return found

    def _batches(self) -> Iterator[tuple[jax.Array, jax.Array]]:
        """The rows in order; the last batch is filled up with empty ones."""
        for begin in range(0, len(self._rows), self._shape[0]):
            arrays = pad_scored(self._rows[begin : begin + self._shape[0]], self._shape)
            tokens, scored = (
                jax.make_array_from_callback(self._shape, self._sharding, array.__getitem__) for array in arrays
            )
            yield tokens, scored

    def summarize(self, losses: Sequence[np.ndarray]) -> dict[str, float]:
        """{"task/<name>/acc": ...}, as `Task.scores` names them, of what `run` gave."""
        every = np.concatenate(losses).tolist() if losses else []
        numbers: dict[str, float] = {}
        for task in self._tasks:
            mine, every = every[: len(task.rows)], every[len(task.rows) :]
            numbers |= {f"task/{task.name}/{name}": value for name, value in task.scores(mine).items()}
        return numbers


def scores_of_task(name: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """The scores of one task, by their short names, among those of `TaskScores.summarize`."""
    begin = f"task/{name}/"
    return {key.removeprefix(begin): value for key, value in numbers.items() if key.startswith(begin)}
