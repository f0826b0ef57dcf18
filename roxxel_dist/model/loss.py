"""The cross-entropy of the next token: its means over a batch, and into how many chunks a batch is cut. Decision 12."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import TENSOR, device_type, row_shards, token_shards
from roxxel_dist.cluster.parameter_sharding import constrain_batch, constrain_tokens
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.cross_entropy import (
    Arrays,
    Head,
    Losses,
    ModuleHead,
    ProductHead,
    cross_entropy,
    losses_of_logits,
    weighted_cross_entropy,
)
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.process.exit_codes import UserError

CHUNK_BYTES = 64_000_000
"""Of a device, for the float32 logits of a chunk where `loss_chunk` is auto."""
GPU_CHUNK_BYTES = 1 << 30
"""The same of a GPU, whose memory is larger, and whose time is in launches and bytes."""
END_NATS = "(end nats)"
"""Among the losses of a batch: those of end-of-text, which is no text, in sum."""
LOAD = "expert_load"
"""Among the losses of a batch: float32[layers, experts], the share of the tokens' choices that each expert has."""
DROPPED = "expert_dropped"
"""Among the losses of a batch: float32[], the share of the tokens' choices that experts drop."""
LEAST_TOKENS = 2048
"""Of such a chunk on an accelerator, though they take more. Each chunk of C tokens reads and writes the gradient of the
output's matrix, 8 D V bytes in float32, beside its three products, 6 C D V FLOPs: on an H200 (4.8 TB/s, 989 TFLOP/s)
the bytes take 275 / C of the time of the products, and each chunk is a dozen launches."""


def next_token_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each token of a row, except the first, from those before it.

    For a `Transformer` with experts or `z_loss` it adds their losses: training minimizes the sum. Its gradient is made
    in the forward pass, so it has none in forward mode (`jax.jvp`); `token_losses` has.

    Args:
        model: int32[B, L] tokens to [B, L, vocabulary] logits; for a `Packed` batch also called with segments and
            positions.
        batch: int32[B, L], or a `data.packing.Packed`: `tokens`, `segments` and `positions` of that shape.
            Then the mean excludes the first token of each document, which has no context.
    """
    losses = minimized_losses(model, batch)
    return losses["loss"] + losses["balance_loss"] if "balance_loss" in losses else losses["loss"]


def token_losses(model: nnx.Module, batch: Any, *, end: int | None = None) -> dict[str, jax.Array]:
    """{"loss": the mean cross-entropy as in `next_token_loss`, "row_loss": float32[B], the mean of each row}.

    With packed documents also "loss_weight": float32[], the number of tokens in the mean, which is its weight in
    gradient accumulation, and "row_weight": float32[B], the same of each row. With a `Transformer` with experts or
    `z_loss` also "balance_loss": float32[], which training adds to the loss: the balance of its experts, plus z_loss x
    the mean of the squared logarithms of the softmax's sums; with experts `LOAD`, and in training with a capacity
    `DROPPED`. With `end`, the id of end-of-text,
    also `END_NATS`: float32[], the sum of the losses of that token, in the mean as all others.

    For a model of your own it is a loss that is cut as the phase's rows are. Where the model has two methods more, it
    makes the logits of some tokens at a time, as many as with `loss_chunk: auto`: `states`, which is called as the
    model is and returns [B, L, width], and `logits`, which makes of any such [B, C, width] its logits, [B, C,
    vocabulary], each from its token alone. Without them the model makes all logits at once.

    Each of the numbers has a gradient, for which the logits of chunks are computed again. A trainer minimizes the sum,
    and computes them once: see `minimized_losses`.

    Raises:
        ValueError: `states` returns something else.
    """
    return _means(model, batch, end, minimized=False)


def minimized_losses(model: nnx.Module, batch: Any, *, end: int | None = None) -> dict[str, jax.Array]:
    """What `token_losses` gives, for one that minimizes "loss" + "balance_loss": only that sum has a gradient, which
    is made in the forward pass."""
    return _means(model, batch, end, minimized=True)


def _means(model: Any, batch: Any, end: int | None, *, minimized: bool) -> dict[str, jax.Array]:
    is_packed = hasattr(batch, "tokens")
    tokens = batch.tokens if is_packed else batch
    packed = (batch.segments[:, :-1], batch.positions[:, :-1]) if is_packed else ()
    # Not the row is cut, but what is computed of it: its inputs and targets have a token less, often 2^k.
    targets_BxL, *inputs = constrain_tokens(tokens[:, 1:], tokens[:, :-1], *packed)
    counted = batch.segments[:, 1:] == batch.segments[:, :-1] if is_packed else jnp.ones(targets_BxL.shape, bool)
    count_B = jnp.float32(counted.sum(1))
    weights_BxL = counted / jnp.maximum(count_B.sum(), 1)
    more: dict[str, jax.Array] = {}
    z_loss = 0.0
    if isinstance(model, Transformer):
        x_BxLxD, of_experts, _ = model.states(*inputs)  # pyright: ignore[reportArgumentType]
        if model.config.has_second_loss:
            more["balance_loss"] = of_experts.loss
        if of_experts.load is not None:
            more[LOAD] = of_experts.load
        if of_experts.dropped is not None:
            more[DROPPED] = of_experts.dropped.mean()
        z_loss, chunks = model.config.z_loss, chunks_of(model.config, *targets_BxL.shape)
        of_states = *ProductHead.of_output(model.output, model.config.logit_softcap), x_BxLxD
    else:
        of_states, chunks = _states_of_own(model, inputs, targets_BxL)
    found, total = _found(of_states, targets_BxL, weights_BxL, chunks, z_loss, minimized)
    loss = (weights_BxL * found.losses).sum() if total is None else total
    if z_loss:
        squares = z_loss * (weights_BxL * jnp.square(found.log_sums)).sum()
        more["balance_loss"] += squares
        if total is not None:
            loss = total - squares  # a constant, so that the gradient of the sum of both is that of the total
    if end is not None:
        more[END_NATS] = jnp.where(counted & (targets_BxL == end), found.losses, 0).sum()
    rows = {"row_loss": jnp.where(counted, found.losses, 0).sum(1) / jnp.maximum(count_B, 1)}
    if is_packed:
        rows |= {"loss_weight": count_B.sum(), "row_weight": count_B}
    return {"loss": loss} | rows | more


def _found(
    of_states: tuple[Head, Arrays, jax.Array] | jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunks: int,
    z_loss: float,
    minimized: bool,
) -> tuple[Losses, jax.Array | None]:
    """(the losses of tokens, of states behind a head or of logits; the sum that alone has a gradient, or None)."""
    if not isinstance(of_states, tuple):
        return losses_of_logits(of_states, targets_BxL), None
    if not minimized:
        return cross_entropy(*of_states, targets_BxL, chunks), None
    total, found = weighted_cross_entropy(*of_states, targets_BxL, weights_BxL, chunks, z_loss=z_loss)
    return found, total


def losses_of_tokens(model: nnx.Module, tokens_BxL: jax.Array) -> jax.Array:
    """float32[B, L - 1]: the cross-entropy of each token of a row, except the first, from those before it.

    Of a model of your own as in `token_losses`.
    """
    targets_BxL, inputs_BxL = constrain_tokens(tokens_BxL[:, 1:], tokens_BxL[:, :-1])
    if isinstance(model, Transformer):
        x_BxLxD, _, _ = model.states(inputs_BxL)
        return losses_of_states(model.config, model.output, x_BxLxD, targets_BxL).losses
    of_states, chunks = _states_of_own(model, [inputs_BxL], targets_BxL)
    return _found(of_states, targets_BxL, jnp.float32(0), chunks, 0.0, minimized=False)[0].losses


def losses_of_states(config: ModelConfig, output: Any, x_BxLxD: jax.Array, targets_BxL: jax.Array) -> Losses:
    """Losses of the final states of a `Transformer` and its output layer."""
    head = ProductHead.of_output(output, config.logit_softcap)
    return cross_entropy(*head, x_BxLxD, targets_BxL, chunks_of(config, *targets_BxL.shape))


def minimized_of_states(
    config: ModelConfig, output: Any, x_BxLxD: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array
) -> tuple[jax.Array, Losses]:
    """(the weighted sum of the losses, with those of `z_loss`, of the final states of a `Transformer` and its output
    layer; the losses): only the sum has a gradient."""
    head = ProductHead.of_output(output, config.logit_softcap)
    chunks = chunks_of(config, *targets_BxL.shape)
    return weighted_cross_entropy(*head, x_BxLxD, targets_BxL, weights_BxL, chunks, z_loss=config.z_loss)


def _states_of_own(
    model: Any, inputs: list[jax.Array], targets_BxL: jax.Array
) -> tuple[tuple[Head, Arrays, jax.Array] | jax.Array, int]:
    """((the head, its arrays, states) of a model of the user's own, and into how many chunks they are cut), or
    (logits, 0)."""
    if not all(callable(getattr(model, name, None)) for name in ("states", "logits")):
        return model(*inputs), 0
    x_BxLxD, (rows, length) = model.states(*inputs), targets_BxL.shape
    shape = getattr(x_BxLxD, "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != targets_BxL.shape:
        what = f"a {type(x_BxLxD).__name__}" if shape is None else f"an array of shape {shape}"
        raise UserError(
            f"the model's states returned {what} for tokens of shape {targets_BxL.shape}: it must return an array "
            f"({rows}, {length}, width), of which its logits makes ({rows}, {length}, vocabulary)"
        )
    x_BxLxD = constrain_batch(x_BxLxD)
    head, arrays = ModuleHead.of_function(model, lambda model, x_BxCxD: model.logits(x_BxCxD), x_BxLxD)
    vocabulary = jax.eval_shape(head.logits, arrays, x_BxLxD).shape[-1]
    count = auto_chunks(rows, length, vocabulary)
    return ((head, arrays, x_BxLxD), count) if count else (model.logits(x_BxLxD), 0)


def chunks_of(config: ModelConfig, rows: int, length: int) -> int:
    """Into how many chunks the logits of a batch are cut, see `ModelConfig.loss_chunk`; 0 for none."""
    if isinstance(config.loss_chunk, int):
        return -(-length // max(1, config.loss_chunk // rows)) if config.loss_chunk else 0
    return auto_chunks(rows, length, config.vocab_size or 0)


def auto_chunks(rows: int, length: int, vocabulary: int) -> int:
    """The number of chunks that keeps the float32 logits of a device within the bytes of its platform, on an
    accelerator of `LEAST_TOKENS` at least; 0 for none."""
    mesh = jax.sharding.get_abstract_mesh()
    pieces, together = (1, 1) if mesh.empty else (row_shards(mesh), mesh.shape.get(TENSOR, 1))
    here = -(-rows // pieces) * -(-length // token_shards(mesh)), -(-vocabulary // together)
    platform = device_type(mesh).platform
    chunks = -(-4 * here[0] * here[1] // (GPU_CHUNK_BYTES if platform == "gpu" else CHUNK_BYTES))
    if platform != "cpu":
        chunks = min(chunks, -(-here[0] // LEAST_TOKENS))
        # A few more, if they divide the tokens: nothing of them is padding then.
        tokens = -(-length // token_shards(mesh))
        chunks = next((count for count in range(chunks, chunks * 5 // 4 + 1) if count and tokens % count == 0), chunks)
    return 0 if chunks <= 1 else min(chunks, length)
