"""Validation: the same rows each time, spread over the whole set; dropout off. Decision 5.

Which rows they are is chosen when a run begins, and kept in every phase and every branch.

Bits per byte are the losses of the text's tokens over the bytes of the text. End-of-text is no text: its losses do not
count, and it has no bytes. A token has the bytes by which a text grows with it (`TextBytes`). Where a tokenizer changes
a text, the shards have the bytes of both, and each token counts as many times more: over all documents the sum is that
of their texts.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, is_primary
from roxxel_dist.curriculum.even_rows import EvenRows
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tokenizer.text_bytes import TextBytes
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.data.verify import VerifiedBlocks
from roxxel_dist.input.stream import Stream
from roxxel_dist.model.loss import END_NATS, next_token_loss, token_losses
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.step.compile import AotCompiler, batch_key
from roxxel_dist.train.step.state import TrainState
from roxxel_dist.train.step.step import BALANCE, WEIGHT, Hparams, LossFn
from roxxel_dist.train.step.throughput import InflightThrottler

BYTES = "(bytes)"
"""Among the numbers of a batch: the bytes of text that it predicts; -1 where its ids are not all of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class TextOfSets:
    """How the bytes of text are counted that data sets to validate on predict."""

    tokenizers: Mapping[str, Tokenizer]
    """By the names of the sets whose text is known on every rank."""
    scales: Mapping[str, float]
    """Bytes of text for each that `Tokenizer.text_bytes` count, likewise."""
    end: int | None
    """The id of end-of-text, of all these sets; None where there is none."""

    @classmethod
    def of_sets(cls, sets: Mapping[str, Roxxel], train: Roxxel, *, known: bool) -> "TextOfSets":
        """Text of validation sets beside this training data; of no set unless the losses are `known` to be nats of
        tokens. All ranks call it together.

        Sets have one vocabulary, or their losses would mean nothing: the tokenizer of the training data is theirs too.
        """
        found = {
            name: (tokenizer, scale)
            for name, data in sets.items()
            if known
            and data.num_tokens
            and (tokenizer := _tokenizer(data, train))
            and (scale := data.text_scale(train.tokenizer))
        }
        if not known or not sets:
            return cls(tokenizers={}, scales={}, end=None)
        mine = {name: [tokenizer.end_id, scale] for name, (tokenizer, scale) in found.items()}
        every = [json.loads(one) for one in gather_to_primary("tokenizers", json.dumps(mine))]
        ends = [end for of_rank in every for end, _ in of_rank.values()]
        agreed = sorted(
            name
            for name in every[0]
            if all(one.get(name) == every[0][name] for one in every) and every[0][name][0] == ends[0]
        ) if every else []  # fmt: skip
        names, end = json.loads(broadcast_from_primary("tokenizers", json.dumps([agreed, ends[0] if ends else -1])))
        return cls(
            tokenizers={name: found[name][0] for name in names},
            scales={name: found[name][1] for name in names},
            end=None if end < 0 else end,
        )

    def counters(self) -> dict[str, Any]:
        """What counts the bytes of the batches of each set."""
        return {name: byte_counter(one.text_bytes, self.scales[name]) for name, one in self.tokenizers.items()}


def unknown_bits_notes(sets: Mapping[str, Roxxel], train: Roxxel, loss_fn: LossFn) -> Iterator[str]:
    """A line for each set to validate on whose bits per byte are not known although it has a tokenizer."""
    for name, data in sets.items() if loss_fn in (token_losses, next_token_loss) else ():
        if data.num_tokens and _tokenizer(data, train) is not None and data.text_scale(train.tokenizer) is None:
            yield (
                f"{f'val_bpb/{name}' if name else 'val_bpb'} is not known: the tokenizer of {data.filepath} may change "
                "a text, and the shards do not say how many bytes theirs had. Build them from the text: `roxxel-dist "
                "data build` writes it down"
            )


def _tokenizer(data: Roxxel, train: Roxxel) -> Tokenizer | None:
    return data.tokenizer or train.tokenizer


def byte_counter(counts: TextBytes, scale: float = 1.0) -> Callable[[Any], jax.Array]:
    """A jitted batch -> the bytes of the text that it predicts, int32[], or float32[] with a `scale` other than 1; -1
    where an id is not in the table.

    The batch is int32[B, L] or a `data.packing.Packed`, and predicts the tokens that `token_losses` counts.
    """
    inside, first, size = jnp.asarray(counts.inside), jnp.asarray(counts.first), len(counts.inside)

    def count(batch: Any) -> jax.Array:
        tokens = getattr(batch, "tokens", batch)
        before, predicted = tokens[:, :-1], tokens[:, 1:]
        here = jnp.minimum(predicted, size - 1)
        found = jnp.where(before == counts.end, first[here], inside[here])
        if hasattr(batch, "tokens"):
            found = jnp.where(batch.segments[:, 1:] == batch.segments[:, :-1], found, 0)
        whole = found.sum() if scale == 1.0 else jnp.float32(scale) * found.sum()
        return jnp.where((predicted < size).all(), whole, -1)

    return jax.jit(count)


def gives_nats(loss_fn: LossFn, model: Any) -> bool:
    """Whether a loss is the mean cross-entropy of the tokens, so that bits per byte follow from it.

    A loss of the user's own may be anything, and `next_token_loss` of a model with experts has their loss in it.
    """
    has_second = getattr(getattr(model, "config", None), "has_second_loss", False)
    return loss_fn is token_losses or (loss_fn is next_token_loss and not has_second)


def bits_per_byte(batches: Sequence[Mapping[str, float]]) -> float | None:
    """The bits of some batches, but those of end-of-text, over the bytes of text that they predict; None where bytes
    are not known of all."""
    if any(batch.get(BYTES, -1) < 0 for batch in batches):
        return None
    of_text = [batch["loss"] * batch[WEIGHT] - batch.get(END_NATS, 0.0) for batch in batches if batch[WEIGHT] != 0]
    size = sum(batch[BYTES] for batch in batches)
    return math.fsum(of_text) / (math.log(2) * size) if size else math.nan


Packing = Literal["contiguous", "documents"]


@dataclass(frozen=True, kw_only=True)
class ValidationBatch:
    """The shape of the batches that a validation reads."""

    batch_size: int
    seq_len: int
    """The most tokens of a row, the target included; a small set is read in shorter rows."""
    packing: Packing = "contiguous"

    @classmethod
    def of_shape(cls, shape: Shape) -> Self:
        """Batches of the shape of a phase."""
        return cls(batch_size=shape.batch_size, seq_len=shape.seq_len, packing=shape.packing)

    @property
    def shape(self) -> Shape:
        """The shape as a stream takes it."""
        return Shape(steps=0, batch_size=self.batch_size, seq_len=self.seq_len, packing=self.packing)

    def __str__(self) -> str:
        """Words such as "4 x 17 tokens"."""
        packed = ", documents apart" if self.packing == "documents" else ""
        return f"{self.batch_size:,} x {self.seq_len:,} tokens{packed}"


@dataclass(frozen=True, kw_only=True)
class ValidationRows:
    """What decides the rows of the validations of a run, beside the data.

    Phases whose rows are alike, but for their number in a batch, are validated on the same rows: those of the smallest
    of their batches, so that a validation costs no more in the first steps of a ramp. Rows of another length are other
    rows: a model is validated at the length that it is trained at.
    """

    batches: tuple[ValidationBatch, ...]
    """One for each seq_len and packing of a phase."""
    eval_iters: int
    """The most batches of each set."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each validation set by its name."""

    @classmethod
    def of_phases(cls, shapes: Sequence[Shape], eval_iters: int, tokens: Mapping[str, int]) -> Self:
        """The rows of a new run."""
        return cls(batches=(), eval_iters=eval_iters, tokens=tokens).with_phases(shapes)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """The rows that `to_dict` wrote."""
        return cls(**{**saved, "batches": tuple(ValidationBatch(**batch) for batch in saved["batches"])})

    def to_dict(self) -> dict[str, Any]:
        """The rows for JSON."""
        return {**asdict(self), "batches": [asdict(batch) for batch in self.batches]}

    def with_phases(self, shapes: Sequence[Shape], fits: Callable[[Shape], bool] = lambda shape: True) -> Self:
        """These rows as far as they fit, and rows for phases that have none."""
        batches = [batch for batch in self.batches if fits(batch.shape)]
        known = {(batch.seq_len, batch.packing) for batch in batches}
        for shape in sorted(shapes, key=lambda shape: shape.batch_size):
            if (shape.seq_len, shape.packing) not in known:
                known.add((shape.seq_len, shape.packing))
                batches.append(ValidationBatch.of_shape(shape))
        return replace(self, batches=tuple(batches))

    def batch_of(self, shape: Shape) -> ValidationBatch:
        """The batch on which a phase of this shape is validated: that of the phase where no other is known."""
        alike = (batch for batch in self.batches if (batch.seq_len, batch.packing) == (shape.seq_len, shape.packing))
        return next(alike, ValidationBatch.of_shape(shape))

    def text(self, shape: Shape) -> str:
        """The rows of a validation in a phase of this shape: "10 batches of 4 x 17 tokens, of held out (3,400)"."""
        count = "1 batch" if self.eval_iters == 1 else f"{self.eval_iters:,} batches"
        sets = (f"{name or 'held out'} ({size:,})" for name, size in self.tokens.items())
        return f"{count} of {self.batch_of(shape)}, of {', '.join(sets)}"

    def by_phase(self, shapes: Sequence[Shape]) -> str:
        """The batches of each phase, such as "4 x 17 tokens (phases 1, 2), 8 x 33 tokens (phase 3)"."""
        phases: dict[ValidationBatch, list[str]] = {}
        for number, shape in enumerate(shapes, 1):
            phases.setdefault(self.batch_of(shape), []).append(str(number))
        if len(phases) == 1:
            return f"{next(iter(phases))} in every phase, the same rows"
        named = (f"{batch} (phase{'s' * (len(of) > 1)} {', '.join(of)})" for batch, of in phases.items())
        return f"{', '.join(named)}; val_loss of other lengths is of other rows"


def validation_note(saved: Mapping[str, Any], shapes: Sequence[Shape]) -> str:
    """Which rows the validations of a run with several shapes read, in a line; empty where that needs no word."""
    if not saved or len({(shape.batch_size, shape.seq_len, shape.packing) for shape in shapes}) == 1:
        return ""
    rows = ValidationRows.from_dict(saved)
    return f"validation: at most {rows.eval_iters:,} batches of {rows.by_phase(shapes)}"


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

    @classmethod
    def of_steps(
        cls,
        sets: Mapping[str, Roxxel],
        train: Roxxel,
        steps: Any,
        model: Any,
        compiler: AotCompiler,
        rows: ValidationRows,
        blocks: VerifiedBlocks | None = None,
    ) -> Self:
        """The validation by the `train.steps.Steps` of a model, which counts bytes of text where the loss is in nats.

        All ranks call it together.
        """
        in_nats = gives_nats(steps.loss, model)
        text = TextOfSets.of_sets(sets, train, known=in_nats)
        by = steps.evaluate(text.end), compiler, steps.sharding
        return cls(sets, train, *by, rows, blocks, text=text, in_nats=in_nats)

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
