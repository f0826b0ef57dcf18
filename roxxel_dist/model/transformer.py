"""A decoder-only Transformer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.parameter_sharding import MESH_AXES, constrain_batch
from roxxel_dist.cluster.step_parts import ATTENTION, EMBEDDING, HEAD_AND_LOSS, NORMS
from roxxel_dist.model.attention.attend import pad_rows
from roxxel_dist.model.attention.grouped_query import Attention
from roxxel_dist.model.attention.kv_cache import AttentionMetadata, Cache, Layer, LayerCache, empty_cache, prepare
from roxxel_dist.model.attention.latent import LatentAttention
from roxxel_dist.model.attention.mask import pad_tokens
from roxxel_dist.model.config import ModelConfig, NormPosition
from roxxel_dist.model.experts.moe import MixtureOfExperts
from roxxel_dist.model.layers import Dropout, DynamicScalar, Embedding, Norm, logits_of, make_norm, sinusoids
from roxxel_dist.model.lora import LoRAParam, linear
from roxxel_dist.model.mlp import Balance, FeedForward
from roxxel_dist.model.parametrization import rescale
from roxxel_dist.model.scan_layers import layer_of, run_stack, stack_of
from roxxel_dist.process.exit_codes import UserError


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream and reading a normed copy of it.

    With `norm_position` "after", their outputs are normed instead of their inputs; with "both", inputs and outputs.
    """

    def __init__(self, config: ModelConfig, dropout_rate: DynamicScalar | None, rngs: nnx.Rngs) -> None:
        self.norm_position: NormPosition = config.norm_position
        if config.norm_position != "after":
            self.attention_norm: Norm = make_norm(config, config.dim, rngs)
        attention = LatentAttention if config.mla else Attention
        self.attention: LatentAttention | Attention = attention(config, rngs)
        if config.norm_position != "before":
            self.post_attention_norm: Norm = make_norm(config, config.dim, rngs)
            self.post_feedforward_norm: Norm = make_norm(config, config.dim, rngs)
        if config.norm_position != "after":
            self.feedforward_norm: Norm = make_norm(config, config.dim, rngs)
        feedforward = MixtureOfExperts if config.use_moe else FeedForward
        self.feedforward: FeedForward | MixtureOfExperts = feedforward(config, rngs)
        self.dropout: Dropout | None = None if dropout_rate is None else Dropout(dropout_rate, rngs=rngs)
        self.deterministic = False  # NNX's eval() and train() set it

    def __call__(
        self, x_BxLxD: jax.Array, metadata: AttentionMetadata, cache: LayerCache | None = None
    ) -> tuple[jax.Array, Balance, LayerCache | None]:
        """[B, L, dim] to [B, L, dim], the balance of the experts, and the new cache."""
        mixed_BxLxD, cache = self.attention(self.attention_input(x_BxLxD), metadata, cache)
        return *self._feed(x_BxLxD, mixed_BxLxD, metadata.layer.length), cache

    @jax.named_scope(NORMS)
    def attention_input(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, dim]: what attention reads of a block's input."""
        return x_BxLxD if self.norm_position == "after" else self.attention_norm(x_BxLxD)

    def finish(
        self, x_BxLxD: jax.Array, mixed_BxLxHxK: jax.Array, normed_BxLxD: jax.Array | None
    ) -> tuple[jax.Array, Balance]:
        """[B, L, dim] and the balance, from the input, what the heads gathered, and with a gate the normed input."""
        with jax.named_scope(ATTENTION):
            mixed_BxLxD = self.attention.finish(mixed_BxLxHxK, normed_BxLxD)
        return self._feed(x_BxLxD, mixed_BxLxD)

    def _feed(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array, length: int | None = None) -> tuple[jax.Array, Balance]:
        after = self.norm_position != "before"
        x_BxLxD = self._added(x_BxLxD, mixed_BxLxD, self.post_attention_norm if after else None, length)
        fed_BxLxD = self._feedforward_input(x_BxLxD)
        if isinstance(self.feedforward, MixtureOfExperts):  # padding takes no part in the balance
            fed_BxLxD = fed_BxLxD[:, :length]
        y_BxLxD, balance = self.feedforward(fed_BxLxD)
        y_BxLxD = pad_tokens(y_BxLxD, x_BxLxD.shape[1])
        x_BxLxD = self._added(x_BxLxD, y_BxLxD, self.post_feedforward_norm if after else None, length)
        return constrain_batch(x_BxLxD), balance

    @jax.named_scope(NORMS)
    def _feedforward_input(self, x_BxLxD: jax.Array) -> jax.Array:
        return x_BxLxD if self.norm_position == "after" else self.feedforward_norm(x_BxLxD)

    @jax.named_scope(NORMS)
    def _added(self, x_BxLxD: jax.Array, y_BxLxD: jax.Array, norm: Norm | None, length: int | None) -> jax.Array:
        y_BxLxD = y_BxLxD if norm is None else norm(y_BxLxD)
        return x_BxLxD + (y_BxLxD if self.dropout is None else self.dropout(y_BxLxD, length))


class HasModelConfig(Protocol):
    """A config with more than the shape of a model, such as `roxxel_dist.Config`."""

    def part(self, component: type[ModelConfig]) -> ModelConfig:
        """The fields of a component."""
        ...


class Transformer(nnx.Module):
    """Tokens in, logits of the next token out.

    Args:
        config: its shape: a `ModelConfig`, or a whole `roxxel_dist.Config`, whose model part is used. `vocab_size` must
            be set.
        rngs: streams `params`, and `dropout` if the rate is above 0.
    """

    def __init__(self, config: "ModelConfig | HasModelConfig", rngs: nnx.Rngs) -> None:
        if type(config) is not ModelConfig:
            whole: Any = config  # a whole Config is a ModelConfig too: the model keeps only the frozen part
            part: ModelConfig = whole.part(ModelConfig)
            config = part
        if config.vocab_size is None:
            raise UserError("vocab_size is not set: give the number of tokens of the model's vocabulary")
        self.config: ModelConfig = config
        self.deterministic = False  # NNX's eval() and train() set it, as they do for dropout
        init = nnx.initializers.normal(config.init_std)

        def embedding(rows: int, *axes: str | None) -> Embedding:
            return Embedding(rows, config.dim, embedding_init=init, rngs=rngs, embedding_metadata={MESH_AXES: axes})

        self.embedding: Embedding = embedding(config.vocab_size, TENSOR, FSDP)
        if config.pos_encoding == "learned":
            self.position: Embedding = embedding(config.max_context, None, FSDP)
        # No layer at rate 0: it would carry unused random state through every step.
        rate = DynamicScalar(config.dropout_rate) if config.dropout_rate else None
        self.blocks: Any = stack_of(lambda rngs: Block(config, rate, rngs), config.num_blocks, rngs)
        self.norm: Norm = make_norm(config, config.dim, rngs)
        if config.use_moe:
            self.alpha_balance: DynamicScalar = DynamicScalar(config.alpha_balance)
        if not config.weight_tying:
            self.head: nnx.LinearGeneral = linear(
                config, None, config.dim, config.vocab_size, (FSDP, TENSOR), init, rngs
            )
        self.output_scale: float = 1.0
        if config.parametrization == "mup":
            base = config.at_base_width()
            rescale(self, nnx.eval_shape(lambda: Transformer(base, nnx.Rngs(0))))
            # An output matrix starts smaller instead; a tied embedding cannot, because it is also the input.
            self.output_scale = base.dim / config.dim if config.weight_tying else 1.0

    @overload
    def __call__(
        self, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None, positions_BxL: jax.Array | None = None
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        tokens_BxL: jax.Array,
        segments_BxL: jax.Array | None = None,
        positions_BxL: jax.Array | None = None,
        *,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]: ...

    def __call__(
        self,
        tokens_BxL: jax.Array,
        segments_BxL: jax.Array | None = None,
        positions_BxL: jax.Array | None = None,
        *,
        cache: Cache | None = None,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """int32[B, L] tokens to [B, L, vocab_size] logits of the token after each, float32 at least.

        Args:
            tokens_BxL: rows of tokens.
            segments_BxL: int32 [B, L]: attention stays among the tokens of a row that have the same number. None: a row
                is one text.
            positions_BxL: int32 [B, L]: the positions. None: the place in the row.
            cache: of the tokens before these, from `empty_cache` or an earlier call. The logits are those of the whole
                row, and the new cache includes these tokens.

        Returns:
            [B, L, vocab_size] logits; with a cache, these and the cache.

        Raises:
            ValueError: L is beyond max_context.
        """
        x_BxLxD, _, cache = self.states(tokens_BxL, segments_BxL, positions_BxL, cache)
        logits = self.logits(x_BxLxD)
        return logits if cache is None else (logits, cache)

    def states(
        self,
        tokens_BxL: jax.Array,
        segments_BxL: jax.Array | None = None,
        positions_BxL: jax.Array | None = None,
        cache: Cache | None = None,
        *,
        is_empty: bool = False,
    ) -> tuple[jax.Array, Balance, Cache | None]:
        """The final states, which `logits` turns into logits. Arguments and errors as of a call.

        Of a cache that `is_empty` nothing is read: then a long text needs no mask of all its tokens.

        Training adds the loss of the balance to the loss. It is alpha_balance x the sum over the blocks:
        alpha_balance x num_blocks if all experts get equally many tokens, and 0 without experts.

        Returns:
            [B, L, dim]; the balance of the experts; the cache, or None if none was given.
        """
        length = tokens_BxL.shape[1]
        if length > self.config.max_context:
            raise UserError(f"a sequence of {length} tokens is longer than max_context ({self.config.max_context})")
        if cache is None:
            position = jnp.arange(length) if positions_BxL is None else positions_BxL
            metadata = AttentionMetadata(position, segments_BxL=segments_BxL)
        else:
            local = self.config.window if self.config.pattern else None
            args = cache, length, segments_BxL, positions_BxL, self.config.widest_window
            metadata, cache = prepare(*args, local_window=local, is_empty=is_empty)
        x_BxLxD = self.embed(tokens_BxL, metadata.position_L)
        if cache is None:
            x_BxLxD, metadata = pad_rows(self.config, x_BxLxD, metadata)
        x_BxLxD = constrain_batch(x_BxLxD)
        remat = not self.deterministic and cache is None and self.config.gradient_checkpointing
        options: Any = {"scan": self.config.scan_layers, "remat": remat, "period": self.config.period}
        caches = None if cache is None else cache.layers
        x_BxLxD, balance, layers = run_stack(self.blocks, x_BxLxD, metadata, caches, **options)
        if self.config.use_moe:
            balance = balance._replace(loss=balance.loss * self.alpha_balance[...])
        return self.final(x_BxLxD)[:, :length], balance, None if cache is None else cache._replace(layers=layers)

    def residual_stream(self, tokens_BxL: jax.Array) -> Iterator[jax.Array]:
        """[B, L, dim] after the embedding, after each block, and the input of `logits`. Tokens as in a call."""
        metadata = AttentionMetadata(jnp.arange(tokens_BxL.shape[1]))
        yield (x_BxLxD := self.embed(tokens_BxL, metadata.position_L))
        for index in range(self.config.num_blocks):
            layer = layer_of(self.blocks, index)
            x_BxLxD, _, _ = run_stack(
                layer, x_BxLxD, metadata._replace(layer=Layer(index)), None, scan=False, remat=False
            )
            yield x_BxLxD
        yield self.final(x_BxLxD)

    @property
    def output(self) -> Embedding | nnx.LinearGeneral:
        """The output layer: the embedding if it is tied, otherwise a separate matrix."""
        return self.embedding if self.config.weight_tying else self.head

    @jax.named_scope(HEAD_AND_LOSS)
    def logits(self, x_BxLxD: jax.Array) -> jax.Array:
        """[B, L, vocab_size] logits, float32 at least, of the [B, L, dim] that `states` gives."""
        return logits_of(self.output, x_BxLxD, self.config.logit_softcap)

    def empty_cache(self, batch: int = 1) -> Cache:
        """An empty cache of `batch` rows: for each block an entry [batch, slots, ...], of `max_context` slots, or of
        `context_window` if all layers have a window."""
        slots = min(self.config.widest_window or self.config.max_context, self.config.max_context)
        shapes = [self.blocks.attention.cache_shapes] * self.config.num_blocks
        return empty_cache(batch, slots, shapes, self.embedding.embedding[...].dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, best: bool = True) -> "Transformer":
        """The trained model of a run, with dropout off; `model.train()` turns it on.

        Args:
            path: a run directory, or RUN@STEP; an exported folder; or a Hugging Face folder with a model of a
                family in docs/model.md.
            best: for a run, the checkpoint with the lowest val_loss, or the newest if none was validated. False: the
                newest; if a run has only its best weights left, these are used, with a message.

        Returns:
            The model on the first device, with parameters in their stored dtype.

        Raises:
            ValueError: there is no such model, or it is user-defined.
        """
        from roxxel_dist.weights.load import load_transformer

        return load_transformer(path, best=best)

    @jax.named_scope(NORMS)
    def final(self, x_BxLxD: jax.Array) -> jax.Array:
        """The input of `logits`, of the output of the last block: normalized, and scaled for the width."""
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD if self.output_scale == 1 else x_BxLxD * self.output_scale

    @jax.named_scope(EMBEDDING)
    def embed(self, tokens_BxL: jax.Array, position_L: jax.Array) -> jax.Array:
        """[B, L, dim]: the input of the first block."""
        x_BxLxD = self.embedding(tokens_BxL)
        if self.config.scale_embeddings:
            factor = (self.config.base_dim or self.config.dim) ** 0.5
            x_BxLxD = x_BxLxD * jnp.asarray(factor, x_BxLxD.dtype)
        if self.config.pos_encoding == "learned":
            return x_BxLxD + self.position(position_L)
        if self.config.pos_encoding == "absolute":
            # The factor of Vaswani et al.: sinusoids have size 1 and would dominate the embeddings.
            dim = self.config.dim
            factor = (self.config.base_dim or dim) ** 0.5
            return x_BxLxD * factor + sinusoids(position_L, dim).astype(x_BxLxD.dtype)
        return x_BxLxD

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations that a training step does for a token.

        6 for each parameter in a matrix product (4 if it is frozen: it has no gradient), and 6 for each product of a
        query and a key or value in attention (Chowdhery et al., "PaLM", 2022, appendix B): over the window of a layer,
        or without one over the whole row. Of the experts, only parameters that a token uses count.

        Args:
            length: inputs of its row: one less than `seq_len`.
        """
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        parameters -= self.blocks.feedforward.inactive_params  # of all layers
        # Not `[...]`: in an abstract model the value is a shape, which cannot be indexed.
        looked_up = 0 if self.config.weight_tying else self.embedding.embedding.get_value().size
        if self.config.pos_encoding == "learned":
            looked_up += self.position.embedding.get_value().size
        config = self.config
        whole = 0 if config.pattern is None else config.num_blocks // config.pattern
        seen = whole * length + (config.num_blocks - whole) * min(length, config.window or length)
        pairs = self.blocks.attention.attention_macs_per_pair * seen  # of a token with all that it attends to
        adapters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, LoRAParam)))
        of_weights = 4.0 * (parameters - looked_up) + 2.0 * adapters if adapters else 6.0 * (parameters - looked_up)
        return of_weights + 6.0 * pairs

    def modules(self) -> Iterator[nnx.Module]:
        """The model and every module in it, such as each `LoRALinear`."""
        return (module for _, module in nnx.iter_modules(self))


@dataclass(frozen=True)
class TransformerBuilder:
    """Makes a `Transformer`, with the same weights each time. Its fields determine the model."""

    config: ModelConfig
    params: int
    """The seed of the weights."""
    dropout: int
    """The seed of dropout."""

    def __call__(self) -> Transformer:
        """A new model; to be called under jit."""
        return Transformer(self.config, nnx.Rngs(params=self.params, dropout=self.dropout))
