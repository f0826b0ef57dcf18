"""What a phase needs compiled: its step and its validation, made ahead of the phase's first step."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verified import VerifiedBlocks
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.stream import Stream
from roxxel_dist.train.compile import Programs, abstract, batch_key
from roxxel_dist.train.config import LoopOptions
from roxxel_dist.train.evaluator import Validation
from roxxel_dist.train.optimizer import Optimizer
from roxxel_dist.train.train_state import ModelParts, TrainState
from roxxel_dist.train.train_step import LossFn, Settings, make_eval_step, make_step, micro_batches


class PhasePrograms:
    """The programs of a run's phases; each is compiled once for each shape of batch.

    Args:
        programs: what compiles them.
        parts: the model.
        like: the state before the first step, or its shapes and shardings.
        settings: what else a step takes.
        loss_fn: see `Trainer`.
        optimizer: see `optimizer.py`.
        train: the training data.
        sets: the data to validate on, by name.
        sharding: of a (rows, tokens) batch.
        grad_accum: micro-batches a step.
        options: of the run.
        blocks: what is known of the files; None: what is validated on is not verified.
    """

    def __init__(
        self,
        programs: Programs,
        parts: ModelParts,
        like: TrainState,
        settings: Settings,
        *,
        loss_fn: LossFn,
        optimizer: Optimizer,
        train: Roxxel,
        sets: Mapping[str, Roxxel],
        sharding: NamedSharding,
        grad_accum: int,
        options: LoopOptions,
        blocks: VerifiedBlocks | None = None,
    ) -> None:
        dtype = jnp.bfloat16 if options.bf16_compute else None
        self._parts, self._loss_fn = parts, loss_fn
        # Not the arrays: a resumed run would hold those that it began with beside those of its checkpoint.
        self._programs, self._like, self._settings = programs, abstract(like), settings
        self._step = make_step(
            parts, loss_fn, optimizer, like, sharding,
            grad_accum=grad_accum, compute_dtype=dtype, skip_bad=options.on_bad_step == "skip",
        )  # fmt: skip
        self._evaluate = make_eval_step(parts, loss_fn, dtype)
        self._validation = Validation(sets, train, self._evaluate, programs, sharding, options.eval_iters, blocks)

    def check(self, shapes: Sequence[Shape]) -> None:
        """Raises ValueError where a data set is too small for the validation batches of a phase."""
        for shape in shapes:
            self._validation.check(shape)

    def check_vocabulary(self, shape: Shape, datasets: Mapping[str, Roxxel]) -> None:
        """Compare the logits of the model with the vocabulary of the data; nothing is computed.

        A model that is not called with tokens alone, or gives something else than an array for each of them, is left
        to its loss.

        Raises:
            ValueError: the data has tokens that the model has no logits for.
        """
        name, size = max(((name, data.vocab_size or 0) for name, data in datasets.items()), key=lambda one: one[1])

        def logits_of(state: TrainState, settings: Settings, tokens: Any) -> Any:
            return self._parts.merge(state.params, state.rest, settings, training=False)(tokens)

        tokens = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len - 1), jnp.int32)
        try:
            with jax.set_mesh(self._programs.mesh):
                logits = jax.eval_shape(logits_of, self._like, dict(self._settings), tokens)
        except Exception:  # of whatever kind: the loss may know how to call this model
            return
        if getattr(logits, "shape", ())[:-1] != tokens.shape or logits.shape[-1] >= size:
            return
        # What an own loss makes of its model may be no logits yet: then the weights of those are a parameter.
        weights = (axis for leaf in jax.tree.leaves(self._like.params) for axis in leaf.shape)
        if self._loss_fn not in (token_losses, next_token_loss) and any(size <= n <= 1.1 * size + 64 for n in weights):
            return
        raise ValueError(
            f"the model gives {logits.shape[-1]} logits a token, and the data {name!r} has {size} tokens: make it with "
            f"vocab_size={size}, or train on data that was made with the model's tokenizer"
        )

    def try_loss(self, stream: Stream) -> None:
        """Trace the loss of the stream's next batch; what the loss function raises passes."""
        with jax.set_mesh(self._programs.mesh):
            jax.eval_shape(self._evaluate, self._like.params, self._like.rest, dict(self._settings), stream.abstract())

    def prepare(self, stream: Stream) -> Any:
        """Begin to compile what the phase of the stream's next step needs, and return the key of its step."""
        key = self.prepare_step(stream)
        self._validation.prepare(self._like, self._settings, stream.plan.segment(stream.step).shape)
        return key

    def prepare_step(self, stream: Stream) -> Any:
        """Begin to compile the stream's next step alone, and return its key."""
        batch = stream.abstract()
        key = batch_key(batch)
        self._programs.prepare(key, self._step, self._like, self._settings, batch)
        return key

    def prepare_validation(self, plan: Plan, step: int) -> list[Hashable]:
        """Begin to compile what a validation in the phase of `step` (from 0) needs; the keys of these programs."""
        return self._validation.prepare(self._like, self._settings, plan.segment(step).shape)

    def validate(
        self, state: TrainState, plan: Plan, step: int, fetch: Callable[[Any], Any], *, one_in_flight: bool
    ) -> dict[str, float]:
        """The mean losses of `state` over the validation batches, in the shape of the phase of `step`.

        They are as `Validation.summarize` says; empty where there is nothing to validate on.

        Args:
            state: on the mesh.
            plan: what the run follows.
            step: the one just done, from 0.
            fetch: gets numbers from the devices.
            one_in_flight: wait for each batch before the next.
        """
        shape = plan.segment(step).shape
        losses = self._validation.run(state, self._settings, shape, one_in_flight=one_in_flight)
        return self._validation.summarize(fetch(losses), shape) if losses else {}


def check_batches(shapes: Sequence[Shape], grad_accum_steps: int) -> None:
    """Raises ValueError for a phase whose batch gradient accumulation does not divide.

    A batch of fewer rows than micro-batches has one row in each: a curriculum may end in one long row.
    """
    for i, shape in enumerate(shapes):
        if shape.batch_size % micro_batches(grad_accum_steps, shape.batch_size):
            raise ValueError(
                f"phase {i + 1}: batch_size is {shape.batch_size}, which does not divide by grad_accum "
                f"({grad_accum_steps}): use a multiple of {grad_accum_steps}"
            )
