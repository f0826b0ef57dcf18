"""Causal self-attention with grouped key and value heads (Ainslie et al., "GQA", 2023)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.step_parts import ATTENTION
from roxxel_dist.model.attention.attend import attend
from roxxel_dist.model.attention.kv_cache import FIRST, AttentionMetadata, Layer, LayerCache, update
from roxxel_dist.model.attention.mask import Mask, mask_of
from roxxel_dist.model.config import AttentionKernel, ModelConfig, QKNorm
from roxxel_dist.model.layers import Norm, Rotary, make_norm, rotary_of, rotate
from roxxel_dist.model.lora import linear
from roxxel_dist.model.mlp import initializers


@dataclass(frozen=True)
class LayerKind:
    """What differs between the layers of a model: local and global ones, and those without positions."""

    window: int | None
    """How many tokens a token attends to, itself included; None for all before it."""
    rotary: Rotary | None
    """None: queries and keys do not turn."""


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kinds of the first layers; then they come again, see `ModelConfig.period`."""
    rotary, kinds = rotary_of(config), []
    for layer in range(config.period):
        is_global = config.pattern is not None and (layer + 1) % config.pattern == 0
        turned = rotary
        if rotary is not None and config.pattern is not None and not is_global and config.rope_local_theta is not None:
            turned = dataclasses.replace(rotary, theta=config.rope_local_theta, scale=1.0, trained=None)
        if config.no_rope_layer_interval is not None and (layer + 1) % config.no_rope_layer_interval == 0:
            turned = None
        kinds.append(LayerKind(None if is_global else config.window, turned))
    return tuple(kinds)


class Heads(nnx.Module):
    """Attention behind its heads: a gate, if there is one, and the output projection."""

    out: nnx.LinearGeneral
    gate: "Gate | None"

    def finish(self, mixed_BxLxHxK: jax.Array, x_BxLxD: jax.Array | None) -> jax.Array:
        """[B, L, dim] from what the heads gathered, and for the gate the layer's input."""
        if self.gate is not None and x_BxLxD is not None:
            mixed_BxLxHxK = self.gate(mixed_BxLxHxK, x_BxLxD)
        return self.out(mixed_BxLxHxK.reshape(*mixed_BxLxHxK.shape[:2], -1))


class Attention(Heads):
    """Each position attends to itself and earlier ones, within its window, and with segments within its document.

    `n_heads` queries share `kv_heads` keys and values; all three are one matrix product, whose kernel [D, G, R + 2, K]
    keeps each of G key heads together with its value head and the R = H / G queries that use it: if "tensor" divides G,
    a device has everything that its queries need. Otherwise, as with a single key head, the kernel and its product are
    replicated on every device, and only `out` is sharded. Output weights start smaller by the depth, so that the
    residual stream's variance does not grow with it (GPT-2).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        n_heads, groups, size = config.heads()
        self.n_heads: int = n_heads
        self.kv_heads: int = groups
        self.head_size: int = size
        self.kinds: tuple[LayerKind, ...] = layer_kinds(config)
        self.cache_window: int | None = config.widest_window
        self.kernel: AttentionKernel = config.attention
        self.mask: Mask = mask_of(config)
        self.qk_norm: QKNorm = config.qk_norm

        out = (groups, n_heads // groups + 2, size)

        def init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
            # Drawn in the ungrouped layout of older versions, so that a seed gives the same weights.
            return group_heads(nnx.initializers.normal(config.init_std)(key, shape, dtype), out)

        axes = (FSDP, TENSOR, None, None)
        self.qkv: nnx.LinearGeneral = linear(
            config, "attention", config.dim, out, axes, init, rngs, use_bias=config.qkv_bias
        )
        if config.qk_norm != "none":
            of_q, of_k = (1, 1) if config.qk_norm == "head" else (n_heads, groups)
            self.q_norm: Norm = make_norm(config, of_q * size, rngs)
            self.k_norm: Norm = make_norm(config, of_k * size, rngs)
        self.out: nnx.LinearGeneral = out_projection(config, n_heads * size, rngs)
        self.gate: Gate | None = Gate(config, rngs) if config.no_sink else None

    @jax.named_scope(ATTENTION)
    def __call__(
        self, x_BxLxD: jax.Array, metadata: AttentionMetadata, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """[B, L, dim] to [B, L, dim], and the new cache: keys and values [B, slots, kv_heads, K]."""
        window = self._kind(metadata.layer).window
        q, k, v = self.heads(x_BxLxD, metadata.position_L, metadata.layer)
        if cache is not None and metadata.slot_BxL is not None:
            seen, cache = update(cache, (k, v), metadata.slot_BxL, self.cache_window)
            k, v = (k, v) if metadata.mask_Bx1xLxS is None else seen
        return self.finish(attend(q, k, v, metadata.mask(self.mask, window), self.kernel), x_BxLxD), cache

    def _kind(self, layer: Layer) -> "LayerKind":
        return self.kinds[layer.number % len(self.kinds)]

    def heads(
        self, x_BxLxD: jax.Array, position_L: jax.Array, layer: Layer = FIRST
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, K], keys and values [B, L, G, K]."""
        qkv_BxLxGxSxK = self.qkv(x_BxLxD)
        q = qkv_BxLxGxSxK[..., :-2, :].reshape(*x_BxLxD.shape[:2], self.n_heads, self.head_size)
        k, v = qkv_BxLxGxSxK[..., -2, :], qkv_BxLxGxSxK[..., -1, :]
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.qk_norm == "projection":
            q, k = (
                norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if (rotary := self._kind(layer).rotary) is not None:
            q, k = (rotate(x, position_L, rotary) for x in (q, k))
        return q, k, v

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a token's entries in a cache."""
        return ((self.kv_heads, self.head_size),) * 2

    @property
    def attention_macs_per_pair(self) -> int:
        """Multiplications for a pair of query and key: for the score, and for the weighted sum of values."""
        return 2 * self.n_heads * self.head_size


def out_projection(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.LinearGeneral:
    """The projection of the concatenated head outputs, [..., H x K], to [..., D]."""
    return linear(config, "attention", width, config.dim, (TENSOR, FSDP), initializers(config)[1], rngs)


def group_heads(flat: Any, shape: Sequence[int]) -> Any:
    """[..., G R K + 2 G K], all queries, then all keys, then all values, to [..., G, R + 2, K]."""
    groups, per_group, size = shape
    whole, queries = groups * size, groups * (per_group - 2) * size
    pieces = flat[..., :queries], flat[..., queries : queries + whole], flat[..., queries + whole :]
    parts = [piece.reshape(*flat.shape[:-1], groups, -1, size) for piece in pieces]
    return (np if isinstance(flat, np.ndarray) else jnp).concatenate(parts, axis=-2)


class Gate(nnx.Module):
    """Scales each channel of attention's output by a sigmoid of the layer's input.

    Softmax weights sum to 1, so heads with nothing to add attend to the first tokens (sinks); a gate closes them
    instead. One gate per channel after the softmax is the best variant of Qiu et al., "Gated attention for large
    language models", 2025.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        n_heads, _, size = config.heads()
        init = nnx.initializers.normal(config.init_std)
        axes = (FSDP, TENSOR, None)
        self.score: nnx.LinearGeneral = linear(config, None, config.dim, (n_heads, size), axes, init, rngs)

    def __call__(self, mixed_BxLxHxK: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
        """The gated head outputs, from the head outputs and the layer's input."""
        return mixed_BxLxHxK * jax.nn.sigmoid(self.score(x_BxLxD))
