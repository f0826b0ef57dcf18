"""The cross-entropy of the next token: of all tokens at once, or of some at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from roxxel_dist.cluster.mesh import TENSOR, row_shards, token_shards
from roxxel_dist.cluster.parameter_sharding import constrain_tokens
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import Embedding, logits_of
from roxxel_dist.model.transformer import Transformer

CHUNK_BYTES = 64_000_000
"""Of a device, for the float32 logits of a chunk where `loss_chunk` is auto."""


def next_token_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each token of a row, except the first, from those before it.

    For a `Transformer` with experts it adds their balance loss: training minimizes the sum.

    Args:
        model: int32[B, L] tokens to [B, L, vocabulary] logits; for a `Packed` batch also called with segments and
            positions.
        batch: int32[B, L], or a `data.packing.Packed`: `tokens`, `segments` and `positions` of that shape.
            Then the mean excludes the first token of each document, which has no context.
    """
    losses = token_losses(model, batch)
    return losses["loss"] + losses["balance_loss"] if "balance_loss" in losses else losses["loss"]


def token_losses(model: nnx.Module, batch: Any) -> dict[str, jax.Array]:
    """{"loss": the mean cross-entropy as in `next_token_loss`, "row_loss": float32[B], the mean of each row}.

    With packed documents also "loss_weight": float32[], the number of tokens in the mean, which is its weight in
    gradient accumulation, and "row_weight": float32[B], the same of each row. With a `Transformer` with experts also
    "balance_loss": float32[], which training adds to the loss.
    """
    balance: dict[str, jax.Array] = {}

    def losses_of(targets_BxL: jax.Array, tokens_BxL: jax.Array, *packed: jax.Array) -> jax.Array:
        # Not the row is cut, but what is computed of it: its inputs and targets have a token less, often 2^k.
        targets_BxL, *inputs = constrain_tokens(targets_BxL, tokens_BxL, *packed)
        if not isinstance(model, Transformer):
            return _cross_entropy(model(*inputs), targets_BxL)  # pyright: ignore[reportCallIssue]
        x_BxLxD, of_experts, _ = model.states(*inputs)  # pyright: ignore[reportArgumentType]
        if model.config.use_moe:
            balance["balance_loss"] = of_experts
        if count := chunks_of(model.config, *targets_BxL.shape):
            return _by_chunks(model, x_BxLxD, targets_BxL, count)
        return _cross_entropy(model.logits(x_BxLxD), targets_BxL)

    if not hasattr(batch, "tokens"):
        losses = losses_of(batch[:, 1:], batch[:, :-1])
        return {"loss": losses.mean(), "row_loss": losses.mean(1)} | balance
    tokens, segments, positions = batch.tokens, batch.segments, batch.positions
    losses = losses_of(tokens[:, 1:], tokens[:, :-1], segments[:, :-1], positions[:, :-1])
    counted = segments[:, 1:] == segments[:, :-1]
    sums, counts = jnp.where(counted, losses, 0).sum(1), counted.sum(1)
    mean, rows = sums.sum() / jnp.maximum(counts.sum(), 1), sums / jnp.maximum(counts, 1)
    weights = {"loss_weight": jnp.float32(counts.sum()), "row_weight": jnp.float32(counts)}
    return {"loss": mean, "row_loss": rows} | weights | balance


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """float32[B, L] for logits of any dtype: in bfloat16 the sum over a vocabulary loses its small terms."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def chunks_of(config: ModelConfig, rows: int, length: int) -> int:
    """Into how many chunks the logits of a batch are cut, see `ModelConfig.loss_chunk`; 0 for none."""
    if isinstance(config.loss_chunk, int):
        return -(-length // max(1, config.loss_chunk // rows)) if config.loss_chunk else 0
    mesh, vocabulary = jax.sharding.get_abstract_mesh(), config.vocab_size or 0
    pieces, together = (1, 1) if mesh.empty else (row_shards(mesh), mesh.shape.get(TENSOR, 1))
    here = -(-rows // pieces) * -(-length // token_shards(mesh)), -(-vocabulary // together)
    chunks = -(-4 * here[0] * here[1] // CHUNK_BYTES)
    return 0 if chunks <= 1 else min(chunks, length)


def _by_chunks(model: Transformer, x_BxLxD: jax.Array, targets_BxL: jax.Array, count: int) -> jax.Array:
    """The same float32[B, L], with the logits of one of `count` chunks of tokens at a time; the backward pass computes
    them again.

    A chunk is a part of what each device has of every row, so rows and tokens stay on their devices.
    """
    batch, length = targets_BxL.shape
    shards = token_shards(jax.sharding.get_abstract_mesh())
    size = -(-length // (shards * count))  # parts of equal size need little padding
    short = shards * count * size - length
    x_BxLxD = jnp.pad(x_BxLxD, [(0, 0), (0, short), (0, 0)])
    targets_BxL = jnp.pad(targets_BxL, [(0, 0), (0, short)])
    graphdef, state = nnx.split(model.output)
    # The gradient is summed over the chunks in the dtype of the loop's inputs; bfloat16 would lose small terms.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), state)

    def losses_of(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), wide, state)
        # A copy: NNX objects do not cross jax's trace levels.
        output: Embedding | nnx.LinearGeneral = nnx.merge(graphdef, own, copy=True)
        x_BxCxD, targets_BxC = piece
        return _cross_entropy(logits_of(output, x_BxCxD), targets_BxC)

    def chunks(a: jax.Array) -> jax.Array:
        """[B, L, ...] to [chunks, B, devices x tokens of a chunk, ...]."""
        parts = jnp.moveaxis(a.reshape(batch, shards, count, size, *a.shape[2:]), 2, 0)
        return parts.reshape(count, batch, shards * size, *a.shape[2:])

    losses_NxBxC = jax.lax.map(jax.checkpoint(losses_of), (chunks(x_BxLxD), chunks(targets_BxL)))
    losses = jnp.moveaxis(losses_NxBxC.reshape(count, batch, shards, size), 0, 2)
    return losses.reshape(batch, -1)[:, :length]
