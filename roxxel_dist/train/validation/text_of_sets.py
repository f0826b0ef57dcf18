"""Bits per byte of a validation: the losses of the text's tokens over the bytes of the text.

End-of-text is no text: its losses do not count, and it has no bytes. A token has the bytes by which a text grows with
it (`TextBytes`). Where a tokenizer changes a text, the shards have the bytes of both, and each token counts as many
times more: over all documents the sum is that of their texts.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tokenizer.text_bytes import TextBytes
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.model.loss import END_NATS, next_token_loss, token_losses
from roxxel_dist.train.step.step import WEIGHT, LossFn

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
        """For validation sets beside this training data; with no set unless the losses are `known` to be nats of
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


def why_unknown(sets: Mapping[str, Roxxel], train: Roxxel, loss_fn: LossFn) -> Iterator[str]:
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
