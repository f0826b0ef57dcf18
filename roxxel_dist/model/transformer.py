"""A decoder-only Transformer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.parameter_sharding import MESH_AXES, constrain_rows
from roxxel_dist.model.attention import Attention
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.kv_cache import AttentionMetadata, Cache, LayerCache, empty_cache, prepare
from roxxel_dist.model.layers import Dropout, DynamicScalar, Embedding, Norm, logits_of, make_norm, sinusoids
from roxxel_dist.model.lora import LoRAParam, linear
from roxxel_dist.model.mla import LatentAttention
from roxxel_dist.model.mlp import FeedForward
from roxxel_dist.model.moe import MixtureOfExperts
from roxxel_dist.model.parametrization import rescale
from roxxel_dist.model.scan_layers import layer_of, run_stack, stack_of


class Block(nnx.Module):
    """Attention and feed-forward, each added to the residual stream and reading a normed copy of it."""

    def __init__(self, config: ModelConfig, dropout_rate: DynamicScalar | None, rngs: nnx.Rngs) -> None:
        self.attention_norm: Norm = make_norm(config, config.dim, rngs)
        attention = LatentAttention if config.mla else Attention
        self.attention: LatentAttention | Attention = attention(config, rngs)
        self.feedforward_norm: Norm = make_norm(config, config.dim, rngs)
        feedforward = MixtureOfExperts if config.use_moe else FeedForward
        self.feedforward: FeedForward | MixtureOfExperts = feedforward(config, rngs)
        self.dropout: Dropout | None = None if dropout_rate is None else Dropout(dropout_rate, rngs=rngs)
        self.deterministic = False  # NNX's eval() and train() set it

    def __call__(
        self, x_BxLxD: jax.Array, metadata: AttentionMetadata, cache: LayerCache | None = None
    ) -> tuple[jax.Array, jax.Array, LayerCache | None]:
        """[B, L, dim] to [B, L, dim], float32[] how unevenly experts are used (0 without), and what a cache holds."""
        mixed_BxLxD, cache = self.attention(self.attention_norm(x_BxLxD), metadata, cache)
        x_BxLxD = x_BxLxD + self._drop(mixed_BxLxD)
        y_BxLxD, balance = self.feedforward(self.feedforward_norm(x_BxLxD))
        return constrain_rows(x_BxLxD + self._drop(y_BxLxD)), balance, cache

    def _drop(self, x_BxLxD: jax.Array) -> jax.Array:
        return x_BxLxD if self.dropout is None else self.dropout(x_BxLxD)


class HasModelConfig(Protocol):
    """A config with more than the shape of a model, such as `roxxel_dist.Config`."""

    def part(self, component: type[ModelConfig]) -> ModelConfig:
        """The fields of a component."""
        ...


class Transformer(nnx.Module):
    """Tokens in, logits of the next token out.

    Args:
        config: its shape: a `ModelConfig`, or a whole `roxxel_dist.Config`, of which that part is taken. `vocab_size`
            must be set.
        rngs: streams `params`, and `dropout` where the rate is above 0.
    """

    def __init__(self, config: "ModelConfig | HasModelConfig", rngs: nnx.Rngs) -> None:
        if type(config) is not ModelConfig:
            whole: Any = config  # a whole Config is a ModelConfig too: the model keeps the part that is frozen
            part: ModelConfig = whole.part(ModelConfig)
            config = part
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: give the number of tokens that the model shall know")
        self.config: ModelConfig = config
        self.deterministic = False  # NNX's eval() and train() set it, as they do for dropout
        init = nnx.initializers.normal(config.init_std)

        def embedding(rows: int, *axes: str | None) -> Embedding:
            return Embedding(rows, config.dim, embedding_init=init, rngs=rngs, embedding_metadata={MESH_AXES: axes})

        self.embedding: Embedding = embedding(config.vocab_size, TENSOR, FSDP)
        if config.pos_encoding == "learned":
            self.position: Embedding = embedding(config.max_context, None, FSDP)
        # No layer at rate 0: it would carry random state through every step for nothing.
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
            # A matrix of its own has smaller numbers instead; those of an embedding are also its output.
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
            positions_BxL: int32 [B, L]: what positions are computed from. None: the place in the row.
            cache: what was read before these tokens, from `empty_cache` or an earlier call. The logits are those of the
                whole row, and the cache with these tokens comes with them.

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
    ) -> tuple[jax.Array, jax.Array, Cache | None]:
        """What `logits` makes logits of. Arguments and errors as of a call.

        The balance loss, float32[], is to be added to that of the logits. It is alpha_balance x the sum of what the
        blocks tell: alpha_balance x num_blocks where all experts are equally busy, and 0 without experts.

        Returns:
            [B, L, dim]; the balance loss; the cache, None where none was given.
        """
        length = tokens_BxL.shape[1]
        if length > self.config.max_context:
            raise ValueError(f"a sequence of {length} tokens is longer than max_context ({self.config.max_context})")
        if cache is None:
            position = jnp.arange(length) if positions_BxL is None else positions_BxL
            metadata = AttentionMetadata(position, segments_BxL=segments_BxL)
        else:
            metadata, cache = prepare(cache, length, segments_BxL, positions_BxL, self.config.window)
        x_BxLxD = constrain_rows(self._embed(tokens_BxL, metadata.position_L))
        remat = self.config.gradient_checkpointing and not self.deterministic and cache is None
        x_BxLxD, balance, layers = run_stack(
            self.blocks, x_BxLxD, metadata, None if cache is None else cache.layers,
            scan=self.config.scan_layers, remat=remat,
        )  # fmt: skip
        if self.config.use_moe:
            balance *= self.alpha_balance[...]
        return self._final(x_BxLxD), balance, None if cache is None else cache._replace(layers=layers)

    def residual_stream(self, tokens_BxL: jax.Array) -> Iterator[jax.Array]:
        """[B, L, dim] after the embedding, after each block, and what `logits` makes logits of. Tokens as in a call."""
        metadata = AttentionMetadata(jnp.arange(tokens_BxL.shape[1]))
        yield (x_BxLxD := self._embed(tokens_BxL, metadata.position_L))
        for index in range(self.config.num_blocks):
            layer = layer_of(self.blocks, index)
            x_BxLxD, _, _ = run_stack(layer, x_BxLxD, metadata, None, scan=False, remat=False)
            yield x_BxLxD
        yield self._final(x_BxLxD)

    @property
    def output(self) -> Embedding | nnx.LinearGeneral:
        """What makes logits: the embedding where it is tied, else a matrix of its own."""
        return self.embedding if self.config.weight_tying else self.head

    def logits(self, x_BxLxD: jax.Array) -> jax.Array:
        """Logits of states.

        Args:
            x_BxLxD: [B, L, dim], from `states`.

        Returns:
            [B, L, vocab_size], float32 at least.
        """
        return logits_of(self.output, x_BxLxD)

    def empty_cache(self, batch: int = 1) -> Cache:
        """A cache in which nothing was read yet.

        Args:
            batch: rows of tokens that it is for.

        Returns:
            An entry a block, [batch, slots, ...]: `max_context` slots, or `context_window` with a window.
        """
        slots = min(self.config.window or self.config.max_context, self.config.max_context)
        shapes = [self.blocks.attention.cache_shapes] * self.config.num_blocks
        return empty_cache(batch, slots, shapes, self.embedding.embedding[...].dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, best: bool = True) -> "Transformer":
        """The trained model of a run, with dropout off; `model.train()` turns it on.

        Args:
            path: a run directory, or RUN@STEP; what `export` has made of one; or a folder of Hugging Face that holds a
                LLaMA, Mistral or Mixtral.
            best: of a run, the checkpoint with the lowest val_loss, or the newest where none was validated. False: the
                newest; where the best weights are all that is left of a run, they are taken, and a line says so.

        Returns:
            The model on the first device, its parameters of the type that they are stored in.

        Raises:
            ValueError: there is no such model, or it is one of the user's own.
        """
        from roxxel_dist.weights import load_transformer

        return load_transformer(path, best=best)

    def _final(self, x_BxLxD: jax.Array) -> jax.Array:
        """Normed, and scaled for the width."""
        x_BxLxD = self.norm(x_BxLxD)
        return x_BxLxD if self.output_scale == 1 else x_BxLxD * self.output_scale

    def _embed(self, tokens_BxL: jax.Array, position_L: jax.Array) -> jax.Array:
        x_BxLxD = self.embedding(tokens_BxL)
        if self.config.pos_encoding == "learned":
            return x_BxLxD + self.position(position_L)
        if self.config.pos_encoding == "absolute":
            # The factor is that of Vaswani et al.: sinusoids are of size 1, and embeddings would drown in them.
            dim = self.config.dim
            factor = (self.config.base_dim or dim) ** 0.5
            return x_BxLxD * factor + sinusoids(position_L, dim).astype(x_BxLxD.dtype)
        return x_BxLxD

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations that a training step does for a token.

        6 a parameter that multiplies it (4 of one that is frozen: it has no gradient), and 6 for each product of a
        query and a key or value of attention (Chowdhery et al., "PaLM", 2022, appendix B): with a window those that it
        reaches, without one all of the row. Of experts those parameters count that a token goes through.

        Args:
            length: tokens of its row.
        """
        parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        parameters -= self.blocks.feedforward.inactive_params  # of all layers
        # Not `[...]`: of an abstract model that is a shape, which cannot be indexed.
        looked_up = 0 if self.config.weight_tying else self.embedding.embedding.get_value().size
        if self.config.pos_encoding == "learned":
            looked_up += self.position.embedding.get_value().size
        pairs = self.config.num_blocks * self.blocks.attention.attention_macs_per_pair
        adapters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, LoRAParam)))
        of_weights = 4.0 * (parameters - looked_up) + 2.0 * adapters if adapters else 6.0 * (parameters - looked_up)
        return of_weights + 6.0 * pairs * min(length, self.config.window or length)

    def modules(self) -> Iterator[nnx.Module]:
        """The model and every module in it, such as each `LoRALinear`."""
        return (module for _, module in nnx.iter_modules(self))


@dataclass(frozen=True)
class TransformerBuilder:
    """Makes a `Transformer`, with the same weights each time. It says of itself all that the model follows from."""

    config: ModelConfig
    params: int
    """The seed of the weights."""
    dropout: int
    """The seed of dropout."""

    def __call__(self) -> Transformer:
        """A new model; to be called under jit."""
        return Transformer(self.config, nnx.Rngs(params=self.params, dropout=self.dropout))
