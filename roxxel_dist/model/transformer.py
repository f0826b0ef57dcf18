"""A decoder-only Transformer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from roxxel_dist.model.attention import INIT_STD, Attention
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.feedforward import FeedForward


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream and reading a normed copy of it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.dim, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.feedforward_norm = nnx.RMSNorm(config.dim, rngs=rngs)
        self.feedforward = FeedForward(config, rngs)
        # No layer at rate 0: it would carry random state through every step for nothing.
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs) if config.dropout_rate else None

    def __call__(
        self, x_BxLxD: jax.Array, segments_BxL: jax.Array | None = None, positions_BxL: jax.Array | None = None
    ) -> jax.Array:
        """[B, L, dim] to [B, L, dim]; see `Transformer` for segments and positions."""
        x_BxLxD = x_BxLxD + self._drop(self.attention(self.attention_norm(x_BxLxD), segments_BxL, positions_BxL))
        return x_BxLxD + self._drop(self.feedforward(self.feedforward_norm(x_BxLxD)))

    def _drop(self, x_BxLxD: jax.Array) -> jax.Array:
        return x_BxLxD if self.dropout is None else self.dropout(x_BxLxD)


class Transformer(nnx.Module):
    """Tokens in, logits of the next token out.

    Args:
        config: its shape; `vocab_size` must be set.
        rngs: streams `params`, and `dropout` where the rate is above 0.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: give the number of tokens that the model shall know")
        self.config = config
        self.deterministic = False  # NNX's eval() and train() set it, as they do for dropout
        init = nnx.initializers.normal(INIT_STD)
        self.embedding = nnx.Embed(config.vocab_size, config.dim, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.norm = nnx.RMSNorm(config.dim, rngs=rngs)
        if not config.weight_tying:
            self.head = nnx.Linear(config.dim, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(
        self, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None, positions_BxL: jax.Array | None = None
    ) -> jax.Array:
        """int32[B, L] tokens to float32[B, L, vocab_size] logits of the token after each.

        Args:
            tokens_BxL: rows of tokens.
            segments_BxL: int32 [B, L]: attention stays among the tokens of a row that have the same number. None: a row
                is one text.
            positions_BxL: int32 [B, L]: what the rotary positions are computed from. None: the place in the row.

        Raises:
            ValueError: L is beyond max_context.
        """
        if tokens_BxL.shape[1] > self.config.max_context:
            raise ValueError(
                f"a sequence of {tokens_BxL.shape[1]} tokens is longer than max_context ({self.config.max_context})"
            )
        x_BxLxD = self.embedding(tokens_BxL)
        remat = self.config.gradient_checkpointing and not self.deterministic
        run = nnx.remat(Block.__call__) if remat else Block.__call__
        for block in self.blocks:
            x_BxLxD = run(block, x_BxLxD, segments_BxL, positions_BxL)
        x_BxLxD = self.norm(x_BxLxD)
        return self.embedding.attend(x_BxLxD) if self.config.weight_tying else self.head(x_BxLxD)


def next_token_loss(model: nnx.Module, batch: Any) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each token of a row but the first from those before it.

    Args:
        model: int32[B, L] tokens to [B, L, vocabulary] logits; where the batch has them, called with segments and
            positions too.
        batch: int32[B, L], or an object with `tokens`, `segments` and `positions` of that shape (`data.packed.Packed`).
            Then the mean leaves out a document's first token: nothing before it is of that document.
    """
    apply: Any = model
    if not hasattr(batch, "tokens"):
        return optax.softmax_cross_entropy_with_integer_labels(apply(batch[:, :-1]), batch[:, 1:]).mean()
    tokens, segments, positions = batch.tokens, batch.segments, batch.positions
    logits = apply(tokens[:, :-1], segments[:, :-1], positions[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counted = segments[:, 1:] == segments[:, :-1]
    return jnp.where(counted, losses, 0).sum() / jnp.maximum(counted.sum(), 1)
