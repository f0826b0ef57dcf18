"""The cross-entropy of the next token: of all tokens at once, or of some at a time. Decision 12."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.mesh import TENSOR, device_type, row_shards, token_shards
from roxxel_dist.cluster.parameter_sharding import constrain_batch, constrain_tokens
from roxxel_dist.cluster.step_parts import HEAD_AND_LOSS
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import logits_of
from roxxel_dist.model.transformer import Transformer

CHUNK_BYTES = 64_000_000
"""Of a device, for the float32 logits of a chunk where `loss_chunk` is auto."""
END_NATS = "(end nats)"
"""Among the losses of a batch: those of end-of-text, which is no text, in sum."""
LEAST_TOKENS = 2048
"""Of such a chunk on an accelerator, though they take more. Each chunk of C tokens reads and writes the gradient of the
output's weights, 8 D V bytes in float32, beside its four products, 8 C D V FLOPs: on an H200 (4.8 TB/s, 989 TFLOP/s)
the bytes take 206 / C of the time of the products."""


def next_token_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each token of a row, except the first, from those before it.

    For a `Transformer` with experts or `z_loss` it adds their losses: training minimizes the sum.

    Args:
        model: int32[B, L] tokens to [B, L, vocabulary] logits; for a `Packed` batch also called with segments and
            positions.
        batch: int32[B, L], or a `data.packing.Packed`: `tokens`, `segments` and `positions` of that shape.
            Then the mean excludes the first token of each document, which has no context.
    """
    losses = token_losses(model, batch)
    return losses["loss"] + losses["balance_loss"] if "balance_loss" in losses else losses["loss"]


def token_losses(model: nnx.Module, batch: Any, *, end: int | None = None) -> dict[str, jax.Array]:
    """{"loss": the mean cross-entropy as in `next_token_loss`, "row_loss": float32[B], the mean of each row}.

    With packed documents also "loss_weight": float32[], the number of tokens in the mean, which is its weight in
    gradient accumulation, and "row_weight": float32[B], the same of each row. With a `Transformer` with experts or
    `z_loss` also "balance_loss": float32[], which training adds to the loss: the balance of its experts, plus z_loss x
    the mean of the squared logarithms of the softmax's sums. With `end`, the id of end-of-text, also `END_NATS`:
    float32[], the sum of the losses of that token, in the mean as all others.

    For a model of your own it is a loss that is cut as the phase's rows are. Where the model has two methods more, it
    makes the logits of some tokens at a time, as many as with `loss_chunk: auto`, and again in the backward pass:
    `states`, which is called as the model is and returns [B, L, width], and `logits`, which makes of any such [B, C,
    width] its logits, [B, C, vocabulary], each from its token alone. Without them the model makes all logits at once.

    Raises:
        ValueError: `states` returns something else.
    """
    more: dict[str, jax.Array] = {}
    squares: list[jax.Array] = []

    def losses_of(targets_BxL: jax.Array, tokens_BxL: jax.Array, *packed: jax.Array) -> jax.Array:
        # Not the row is cut, but what is computed of it: its inputs and targets have a token less, often 2^k.
        targets_BxL, *inputs = constrain_tokens(targets_BxL, tokens_BxL, *packed)
        if not isinstance(model, Transformer):
            return _losses_of_own(model, inputs, targets_BxL)
        x_BxLxD, of_experts, _ = model.states(*inputs)  # pyright: ignore[reportArgumentType]
        if model.config.has_second_loss:
            more["balance_loss"] = of_experts
        losses_BxL, squares_BxL = losses_of_states(model.config, model.output, x_BxLxD, targets_BxL)
        if squares_BxL is not None:
            squares.append(model.config.z_loss * squares_BxL)
        return losses_BxL

    if not hasattr(batch, "tokens"):
        losses = losses_of(batch[:, 1:], batch[:, :-1])
        for of_tokens in squares:
            more["balance_loss"] += of_tokens.mean()
        if end is not None:
            more[END_NATS] = jnp.where(batch[:, 1:] == end, losses, 0).sum()
        return {"loss": losses.mean(), "row_loss": losses.mean(1)} | more
    tokens, segments, positions = batch.tokens, batch.segments, batch.positions
    losses = losses_of(tokens[:, 1:], tokens[:, :-1], segments[:, :-1], positions[:, :-1])
    counted = segments[:, 1:] == segments[:, :-1]
    sums, counts = jnp.where(counted, losses, 0).sum(1), counted.sum(1)
    for of_tokens in squares:
        more["balance_loss"] += jnp.where(counted, of_tokens, 0).sum() / jnp.maximum(counts.sum(), 1)
    if end is not None:
        more[END_NATS] = jnp.where(counted & (tokens[:, 1:] == end), losses, 0).sum()
    mean, rows = sums.sum() / jnp.maximum(counts.sum(), 1), sums / jnp.maximum(counts, 1)
    weights = {"loss_weight": jnp.float32(counts.sum()), "row_weight": jnp.float32(counts)}
    return {"loss": mean, "row_loss": rows} | weights | more


def losses_of_tokens(model: nnx.Module, tokens_BxL: jax.Array) -> jax.Array:
    """float32[B, L - 1]: the cross-entropy of each token of a row, except the first, from those before it.

    Of a model of your own as in `token_losses`.
    """
    targets_BxL, inputs_BxL = constrain_tokens(tokens_BxL[:, 1:], tokens_BxL[:, :-1])
    if not isinstance(model, Transformer):
        return _losses_of_own(model, [inputs_BxL], targets_BxL)
    x_BxLxD, _, _ = model.states(inputs_BxL)
    return losses_of_states(model.config, model.output, x_BxLxD, targets_BxL)[0]


@jax.named_scope(HEAD_AND_LOSS)
def losses_of_states(
    config: ModelConfig, output: Any, x_BxLxD: jax.Array, targets_BxL: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """float32[B, L] the cross-entropy of the targets, of the final states of a `Transformer` and its output layer; and
    with `z_loss` float32[B, L] the squared logarithms of the softmax's sums."""
    logits, losses_of = partial(logits_of, cap=config.logit_softcap), _with_squares if config.z_loss else _cross_entropy
    if count := chunks_of(config, *targets_BxL.shape):
        found: Any = _by_chunks(output, logits, x_BxLxD, targets_BxL, count, losses_of)
    else:
        found = losses_of(logits(output, x_BxLxD), targets_BxL)
    return found if config.z_loss else (found, None)


def _losses_of_own(model: Any, inputs: list[jax.Array], targets_BxL: jax.Array) -> jax.Array:
    """float32[B, L] for a model of the user's own: in chunks where it has `states` and `logits`."""
    if not all(callable(getattr(model, name, None)) for name in ("states", "logits")):
        return _cross_entropy(model(*inputs), targets_BxL)
    x_BxLxD, (rows, length) = model.states(*inputs), targets_BxL.shape
    shape = getattr(x_BxLxD, "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != targets_BxL.shape:
        what = f"a {type(x_BxLxD).__name__}" if shape is None else f"an array of shape {shape}"
        raise UserError(
            f"the model's states returned {what} for tokens of shape {targets_BxL.shape}: it must return an array "
            f"({rows}, {length}, width), of which its logits makes ({rows}, {length}, vocabulary)"
        )
    x_BxLxD = constrain_batch(x_BxLxD)

    def logits(model: Any, x_BxCxD: jax.Array) -> jax.Array:
        return model.logits(x_BxCxD)

    head, leaves = _Head.of(model, logits)
    vocabulary = jax.eval_shape(head, leaves, x_BxLxD).shape[-1]
    count = auto_chunks(rows, length, vocabulary)
    if not count:
        return _cross_entropy(model.logits(x_BxLxD), targets_BxL)
    return _by_chunks(model, logits, x_BxLxD, targets_BxL, count)


@jax.named_scope(HEAD_AND_LOSS)
def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """float32[B, L] for logits of any dtype: in bfloat16 the sum over a vocabulary loses its small terms."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def _with_squares(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_cross_entropy`, and float32[B, L] the squared logarithms of the softmax's sums."""
    sums = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    return _cross_entropy(logits, targets), jnp.square(sums)


def chunks_of(config: ModelConfig, rows: int, length: int) -> int:
    """Into how many chunks the logits of a batch are cut, see `ModelConfig.loss_chunk`; 0 for none."""
    if isinstance(config.loss_chunk, int):
        return -(-length // max(1, config.loss_chunk // rows)) if config.loss_chunk else 0
    return auto_chunks(rows, length, config.vocab_size or 0)


def auto_chunks(rows: int, length: int, vocabulary: int) -> int:
    """As many chunks as keep the float32 logits of a device within `CHUNK_BYTES`, on an accelerator of `LEAST_TOKENS`
    at least; 0 for none."""
    mesh = jax.sharding.get_abstract_mesh()
    pieces, together = (1, 1) if mesh.empty else (row_shards(mesh), mesh.shape.get(TENSOR, 1))
    here = -(-rows // pieces) * -(-length // token_shards(mesh)), -(-vocabulary // together)
    chunks = -(-4 * here[0] * here[1] // CHUNK_BYTES)
    if device_type(mesh).platform != "cpu":
        chunks = min(chunks, -(-here[0] // LEAST_TOKENS))
    return 0 if chunks <= 1 else min(chunks, length)


class _Head:
    """A function of a module and of states, as one of the module's arrays: NNX objects do not cross jax's traces."""

    def __init__(self, function: Callable[[Any, jax.Array], jax.Array], graphdef: Any, tree: Any) -> None:
        self._function, self._graphdef, self._tree = function, graphdef, tree

    @classmethod
    def of(cls, module: nnx.Module, function: Callable[[Any, jax.Array], jax.Array]) -> "tuple[_Head, list[Any]]":
        """(the function, the arrays of the module)."""
        graphdef, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        return cls(function, graphdef, tree), leaves

    def __call__(self, leaves: list[Any], x_BxCxD: jax.Array) -> jax.Array:
        """Of a copy of the module: what the function changes of it is lost."""
        module = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves), copy=True)
        return self._function(module, x_BxCxD)

    def used(self, leaves: list[Any], x_BxCxD: jax.Array) -> list[bool]:
        """Which of the arrays the result depends on."""
        jaxpr = jax.make_jaxpr(self)(leaves, x_BxCxD).jaxpr
        used = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))
        return [id(atom) in used for atom in jaxpr.invars[: len(leaves)]]


@jax.named_scope(HEAD_AND_LOSS)
def _by_chunks(
    module: nnx.Module,
    logits: Callable[[Any, jax.Array], jax.Array],
    x_BxLxD: jax.Array,
    targets_BxL: jax.Array,
    count: int,
    per_token: Callable[[jax.Array, jax.Array], Any] = _cross_entropy,
) -> Any:
    """What `per_token` gives, each float32[B, L], with the `logits` of one of `count` chunks of tokens at a time; the
    backward pass computes them again.

    A chunk is a part of what each device has of every row, so rows and tokens stay on their devices.
    """
    batch, length = targets_BxL.shape
    shards = token_shards(jax.sharding.get_abstract_mesh())
    size = -(-length // (shards * count))  # parts of equal size need little padding,
    count = -(-length // (shards * size))  # and as few as hold them all: of one or two tokens each, many would be empty
    short = shards * count * size - length
    x_BxLxD = jnp.pad(x_BxLxD, [(0, 0), (0, short), (0, 0)])
    targets_BxL = jnp.pad(targets_BxL, [(0, 0), (0, short)])
    head, leaves = _Head.of(module, logits)
    # The gradient is summed over the chunks in the dtype of the loop's inputs; bfloat16 would lose small terms. Arrays
    # that the logits do not depend on stay out of the loop, which would sum zeros for them.
    wide = [
        leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        if used and jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf, used in zip(leaves, head.used(leaves, x_BxLxD[:, :1]), strict=True)
    ]

    def losses_of(piece: tuple[jax.Array, jax.Array]) -> Any:
        own = [leaf if leaf is like else leaf.astype(like.dtype) for leaf, like in zip(wide, leaves, strict=True)]
        x_BxCxD, targets_BxC = piece
        return per_token(head(own, x_BxCxD), targets_BxC)

    def chunks(a: jax.Array) -> jax.Array:
        """[B, L, ...] to [chunks, B, devices x tokens of a chunk, ...]."""
        parts = jnp.moveaxis(a.reshape(batch, shards, count, size, *a.shape[2:]), 2, 0)
        return parts.reshape(count, batch, shards * size, *a.shape[2:])

    def joined(losses_NxBxC: jax.Array) -> jax.Array:
        losses = jnp.moveaxis(losses_NxBxC.reshape(count, batch, shards, size), 0, 2)
        return losses.reshape(batch, -1)[:, :length]

    found = jax.lax.map(jax.checkpoint(losses_of), (chunks(x_BxLxD), chunks(targets_BxL)))
    return jax.tree.map(joined, found)
