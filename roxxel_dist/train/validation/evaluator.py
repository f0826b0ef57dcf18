"""Validation: the same rows each time, spread over the whole set; dropout off. Decision 5."""

import json
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary
from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.verify import VerifiedBlocks
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.loss import END_NATS
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.compile import AotCompiler, batch_key
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import BALANCE, WEIGHT, Hparams
from roxxel_dist.train.step.throughput import InflightThrottler
from roxxel_dist.train.validation.text_of_sets import BYTES, TextOfSets, bits_per_byte
from roxxel_dist.train.validation.validation_rows import ValidationBatch, ValidationRows

HELD_OUT, TRAIN = "", "(training data)"
"""The names of the split held out of the training data, and of the training data; a user's set may be "train"."""
NOT_SCALARS = frozenset({"loss", BALANCE, WEIGHT, BYTES, END_NATS})
RESERVED_NAMES = re.compile(r"val_(loss|bpb|bal)(/|$)")
"""Names in the log that a scalar of a loss function of the user's does not get."""
EVAL_LIMIT_S = 3600.0
"""Seconds that the user's evaluation may take longer on rank 0 than on another rank."""


class Validation:
    """Mean losses over some data sets, of the same rows in each phase whose rows have the same length.

    Args:
        sets: data by name: `HELD_OUT`, or the validation sets; those without a token are left out. May be empty.
        train: the training data, on which the loss is measured in the same way where there are sets.
        evaluate: jitted (params, rest, hparams, batch) -> losses, as `make_eval_step` makes it.
        compiler: of it.
        sharding: of a batch.
        rows: which are read in each phase.
        blocks: the verified blocks of the files; None: nothing is verified.
        text: how the bytes of text are counted; None: they are not.
        in_nats: whether the loss is the mean cross-entropy of tokens (`gives_nats`).
    """

    def __init__(
        self,
        sets: Mapping[str, Roxxel],
        train: Roxxel,
        evaluate: Callable[..., dict[str, jax.Array]],
        compiler: AotCompiler,
        sharding: NamedSharding,
        rows: ValidationRows,
        blocks: VerifiedBlocks | None = None,
        *,
        text: TextOfSets | None = None,
        in_nats: bool = False,
    ) -> None:
        self.gives_nats: bool = in_nats
        filled = {name: data for name, data in sets.items() if data.num_tokens}
        self._sets = {**filled, TRAIN: train} if filled else {}
        self._evaluate, self._compiler = evaluate, compiler
        self._sharding, self._rows, self._blocks = sharding, rows, blocks
        self._streams: dict[tuple[str, ValidationBatch], Stream] = {}
        self._counters: dict[str, Any] = {} if text is None else text.counters()

    def check(self, *shapes: Shape) -> None:
        """Raises ValueError where a data set is too small for the batches of a phase."""
        for shape in shapes:
            for name in self._sets:
                self._stream(name, shape)

    def _stream(self, name: str, shape: Shape) -> Stream:
        key = name, self._rows.batch_of(shape)
        if key not in self._streams:
            data = self._sets[name]
            try:
                rows = EvenRows(data.ranges, key[1].shape, self._rows.eval_iters)
            except UserError as error:
                raise UserError(f"validation {name!r}: {error}" if name else str(error)) from error
            self._streams[key] = Stream(rows, {"self": data}, self._sharding)
        return self._streams[key]

    def text(self, shape: Shape) -> str:
        """The rows of a validation in a phase of this shape, in words; empty where there is no set."""
        return self._rows.text(shape) if self._sets else ""

    def batch(self, shape: Shape) -> Any:
        """A batch of a phase as `jax.ShapeDtypeStruct`s with shardings; None where there is no set."""
        return self._stream(next(iter(self._sets)), shape).abstract() if self._sets else None

    def prepare(self, state: TrainState, hparams: Hparams, shape: Shape) -> list[Hashable]:
        """Begin to compile what a phase of this shape needs, if nothing did, and return the keys of these programs."""
        keys: list[Hashable] = []
        for name in self._sets:
            batch = self._stream(name, shape).abstract()
            keys.append(("evaluate", batch_key(batch)))
            self._compiler.prepare(keys[-1], self._evaluate, state.evaluated, state.rest, hparams, batch)
        return keys + [key for name in self._sets if (key := self._prepare_counter(name, shape)) is not None]

    def _prepare_counter(self, name: str, shape: Shape) -> Hashable | None:
        """Begin to compile what counts the bytes of a set's batches; None where they are not counted."""
        if (counter := self._counters.get(name)) is None:
            return None
        batch = self._stream(name, shape).abstract()
        self._compiler.prepare(key := (BYTES, name, batch_key(batch)), counter, batch)
        return key

    def run(self, state: TrainState, hparams: Hparams, shape: Shape) -> dict[str, list[dict[str, jax.Array]]]:
        """The losses of every batch by data set, on the device."""
        losses: dict[str, list[dict[str, jax.Array]]] = {}
        throttler = InflightThrottler(self._compiler.mesh)
        for name, key in zip(self._sets, self.prepare(state, hparams, shape), strict=False):
            stream, program = self._stream(name, shape), self._compiler.get(key)
            counting = self._prepare_counter(name, shape)
            count = None if counting is None else self._compiler.get(counting)
            if self._blocks is not None:
                stream.verify(0, stream.plan.total_steps, self._blocks)
            losses[name] = []
            for step in range(stream.plan.total_steps):
                batch = stream.batch(step)
                throttler.wait_for_next()
                losses[name].append(program(state.evaluated, state.rest, hparams, batch))
                throttler.add(losses[name][-1]["loss"])
                if count is not None:
                    losses[name][-1] = losses[name][-1] | {BYTES: count(batch)}
        return losses

    def reads(self, shape: Shape) -> dict[str, tuple[int, int]]:
        """(batches, tokens) that are read of each data set, by name."""
        plans = {name: self._stream(name, shape).plan for name in self._sets}
        return {name: (plan.total_steps, plan.tokens(plan.total_steps)) for name, plan in plans.items()}

    def remarks(self, shape: Shape) -> list[str]:
        """Lines about what is not read of the sets to validate on, and about shorter rows than those of the phase."""
        lines: list[str] = []
        for name, data in self._sets.items():
            if name == TRAIN:
                continue
            what, plan = f"validation {name!r}" if name else "the held-out data", self._stream(name, shape).plan
            steps, there, (_, length) = plan.total_steps, data.num_tokens, plan.shape(0)
            if length < shape.seq_len:
                lines.append(f"{what}: its rows have {length} tokens, and not {shape.seq_len}: it has too few tokens")
            if (read := plan.tokens(steps)) < there:
                most = self._rows.eval_iters
                why = f"eval_iters is {most}" if steps == most else "the rest fills no batch"
                lines.append(f"{what}: {read:,} of {there:,} tokens are read ({why})")
        return lines


def summarize(losses: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """{"val_loss", "val_loss/<name>", "train_eval_loss", "val_bal", "val_bpb", "val_bpb/<name>"} of `Validation.run`,
    and {"val_<scalar>", "val_<scalar>/<name>"} of each scalar that the loss function returns.

    Losses are means over predicted tokens: with the loss l and the weight w of a batch (the tokens that it predicts),
    sum(w l) / sum(w). "val_loss", "val_bal", the balance loss and 0 without one, and scalars are of all sets. Where
    nothing is predicted, the mean is NaN. Bits per byte, of all sets and of each, are the losses of the text's tokens,
    in bits, over the bytes of text that they predict, where these are counted.
    """
    result, bits, scalars = {}, {}, dict[str, float]()
    for name, batches in losses.items():
        if name != HELD_OUT:
            result["train_eval_loss" if name == TRAIN else f"val_loss/{name}"] = _mean(batches, "loss")
            bits[f"val_bpb/{name}"] = bits_per_byte(batches)
        if name not in (HELD_OUT, TRAIN):
            scalars |= {f"{scalar}/{name}": value for scalar, value in _scalars(batches).items()}
    every = [batch for name, batches in losses.items() if name != TRAIN for batch in batches]
    if not every:
        return {}
    bits = {name: value for name, value in {"val_bpb": bits_per_byte(every), **bits}.items() if value is not None}
    scalars = {name: value for name, value in (_scalars(every) | scalars).items() if not RESERVED_NAMES.match(name)}
    return {"val_loss": _mean(every, "loss"), "val_bal": _mean(every, BALANCE), **result, **bits, **scalars}


def _scalars(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{"val_<scalar>"}: the mean of each scalar that the loss function returns beside the loss."""
    names = dict.fromkeys(name for batch in batches for name in batch if name not in NOT_SCALARS)
    return {f"val_{name}": _mean(batches, name) for name in names}


def _mean(batches: Sequence[Mapping[str, float]], name: str) -> float:
    """The mean of a number of the batches by their weights. A batch without weight counts nothing, whatever it has."""
    counted = [batch for batch in batches if batch[WEIGHT] != 0]
    weight = math.fsum(batch[WEIGHT] for batch in counted)
    return math.fsum(batch.get(name, 0.0) * batch[WEIGHT] for batch in counted) / weight if counted else math.nan


def run_eval_fn(eval_fn: Callable[[Any], Any] | None, state: Any, log: Callable[[str], None]) -> dict[str, float]:
    """Call the user's function with the state: the numbers that it gives on rank 0 are returned, a text is logged.

    A "val_loss" decides what is saved and when the run ends, so all ranks must have the same.
    """
    if eval_fn is None:
        return {}
    result, numbers = eval_fn(state), {}
    if isinstance(result, Mapping):
        numbers = {str(name): float(value) for name, value in result.items()}
    elif result is not None and is_primary():
        log(str(result))
    return json.loads(broadcast_from_primary("evaluation", json.dumps(numbers), EVAL_LIMIT_S))
