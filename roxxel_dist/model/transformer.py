"""A decoder-only Transformer."""

import jax
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

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, dim] to [B, L, dim]."""
        x_BxLxD = x_BxLxD + self._drop(self.attention(self.attention_norm(x_BxLxD)))
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

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """int32[B, L] tokens to float32[B, L, vocab_size] logits of the token after each.

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
            x_BxLxD = run(block, x_BxLxD)
        x_BxLxD = self.norm(x_BxLxD)
        return self.embedding.attend(x_BxLxD) if self.config.weight_tying else self.head(x_BxLxD)


def next_token_loss(model: nnx.Module, batch_BxL: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats, of predicting each token of int32[B, L] but the first from those before it."""
    logits = model(batch_BxL[:, :-1])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch_BxL[:, 1:]).mean()
