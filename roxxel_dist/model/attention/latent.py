"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.mesh import FSDP, TENSOR
from roxxel_dist.cluster.step_parts import ATTENTION
from roxxel_dist.model.attention.attend import attend
from roxxel_dist.model.attention.grouped_query import Gate, Heads, out_projection
from roxxel_dist.model.attention.kv_cache import AttentionMetadata, LayerCache, update
from roxxel_dist.model.attention.mask import Mask, mask_of
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.layers import Norm, Rotary, make_norm, rotary_of, rotate
from roxxel_dist.model.lora import kernel_of
from roxxel_dist.model.lora import linear as plain_or_adapted


class LatentAttention(Heads):
    """Keys and values of all heads come from one narrow vector per token, its latent, which a cache stores.

    A rotated key cannot be computed from the cached latent by a fixed matrix. So rotary positions have extra channels,
    `rope_dim` beside the `head_size` of each head; their key comes from the token's input, is shared by all heads, and
    is cached too. Other position encodings need no extra channels.

    The score of a query q and a key W c is (W^T q) c: if queries are multiplied by W^T, attention works on latents c,
    which are a single key and value head for all query heads. This absorbed form expands no cached latents.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        n_heads, _, size = config.heads()
        self.n_heads: int = n_heads
        self.head_size: int = size
        self.window: int | None = config.window
        self.kernel: AttentionKernel = config.attention
        self.mask: Mask = mask_of(config)
        self.absorbed: bool = config.inference
        self.latent_size: int = config.down_dim_kv
        self.rotary: Rotary | None = rotary_of(config)
        self.rope_dim: int = 0 if self.rotary is None else config.rope_dim

        def linear(inputs: int, outputs: int, out_axis: str | None) -> nnx.LinearGeneral:
            init = nnx.initializers.normal(config.init_std)
            return plain_or_adapted(config, "attention", inputs, outputs, (FSDP, out_axis), init, rngs)

        heads = self.n_heads * self.head_size
        self.down_q: nnx.LinearGeneral = linear(config.dim, config.down_dim_q, None)
        self.norm_q: Norm = make_norm(config, config.down_dim_q, rngs)
        self.up_q: nnx.LinearGeneral = linear(config.down_dim_q, heads + self.n_heads * self.rope_dim, TENSOR)
        self.down_kv: nnx.LinearGeneral = linear(config.dim, self.latent_size + self.rope_dim, None)
        self.norm_kv: Norm = make_norm(config, self.latent_size, rngs)
        self.up_k: nnx.LinearGeneral = linear(self.latent_size, heads, TENSOR)
        self.up_v: nnx.LinearGeneral = linear(self.latent_size, heads, TENSOR)
        self.out: nnx.LinearGeneral = out_projection(config, heads, rngs)
        self.gate: Gate | None = Gate(config, rngs) if config.no_sink else None

    @jax.named_scope(ATTENTION)
    def __call__(
        self, x_BxLxD: jax.Array, metadata: AttentionMetadata, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """[B, L, dim] to [B, L, dim], and the new cache: latents and rotary keys."""
        q_BxLxHxQ, latent_BxSxC, turned_BxSxR = self._latents(x_BxLxD, metadata.position_L)
        absorbed = self.absorbed
        if cache is not None and metadata.slot_BxL is not None:
            seen, cache = update(cache, (latent_BxSxC, turned_BxSxR), metadata.slot_BxL, self.window)
            if metadata.mask_Bx1xLxS is not None:  # also tokens that were read before
                absorbed, (latent_BxSxC, turned_BxSxR) = True, seen
        if absorbed:
            mixed_BxLxHxK = self._among_latents(q_BxLxHxQ, latent_BxSxC, turned_BxSxR, metadata)
        else:
            k, v = self._expanded(latent_BxSxC, turned_BxSxR)
            mixed_BxLxHxK = attend(q_BxLxHxQ, k, v, metadata.mask(self.mask, self.window), self.kernel)
        return self.finish(mixed_BxLxHxK, x_BxLxD), cache

    def heads(self, x_BxLxD: jax.Array, position_L: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys [B, L, H, K + rope_dim], and values [B, L, H, K], as in training."""
        q_BxLxHxQ, latent_BxLxC, turned_BxLxR = self._latents(x_BxLxD, position_L)
        return q_BxLxHxQ, *self._expanded(latent_BxLxC, turned_BxLxR)

    def _latents(self, x_BxLxD: jax.Array, position_L: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, K + rope_dim], latents [B, L, C], and rotary keys [B, L, rope_dim]."""
        q_BxLxHxQ = self.up_q(self.norm_q(self.down_q(x_BxLxD)))
        q_BxLxHxQ = q_BxLxHxQ.reshape(*x_BxLxD.shape[:2], self.n_heads, -1)
        latent_BxSxC, turned_BxSxR = jnp.split(self.down_kv(x_BxLxD), [self.latent_size], axis=-1)
        latent_BxSxC = self.norm_kv(latent_BxSxC)
        if self.rotary is not None:
            q_BxLxHxK, turned = jnp.split(q_BxLxHxQ, [self.head_size], axis=-1)
            turned = rotate(turned, position_L, self.rotary)
            q_BxLxHxQ = jnp.concatenate([q_BxLxHxK, turned], axis=-1)
            turned_BxSxR = rotate(turned_BxSxR[:, :, None], position_L, self.rotary)[:, :, 0]
        return q_BxLxHxQ, latent_BxSxC, turned_BxSxR

    def _expanded(self, latent: jax.Array, turned: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of each head, expanded from the latents."""
        k_BxSxHxK, v_BxSxHxK = (
            up(latent).reshape(*latent.shape[:2], self.n_heads, -1) for up in (self.up_k, self.up_v)
        )
        shared = jnp.broadcast_to(turned[:, :, None], (*k_BxSxHxK.shape[:3], self.rope_dim))
        return jnp.concatenate([k_BxSxHxK, shared], axis=-1), v_BxSxHxK

    def _among_latents(
        self, q: jax.Array, latent: jax.Array, turned: jax.Array, metadata: AttentionMetadata
    ) -> jax.Array:
        """Attention in the absorbed form."""
        up_k_CxHxK, up_v_CxHxK = (
            kernel_of(up).reshape(self.latent_size, self.n_heads, self.head_size) for up in (self.up_k, self.up_v)
        )
        plain, q_turned = jnp.split(q, [self.head_size], axis=-1)
        q_BxLxHxC = jnp.einsum("blhk,chk->blhc", plain, up_k_CxHxK)
        query = jnp.concatenate([q_BxLxHxC, q_turned], axis=-1)
        key = jnp.concatenate([latent, turned], axis=-1)[:, :, None]
        mask = metadata.mask(self.mask.with_scale(self.head_size + self.rope_dim), self.window)
        mixed_BxLxHxC = attend(query, key, latent[:, :, None], mask, self.kernel)
        return jnp.einsum("blhc,chk->blhk", mixed_BxLxHxC, up_v_CxHxK)

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a token's entries in a cache."""
        return (self.latent_size,), (self.rope_dim,)

    @property
    def attention_macs_per_pair(self) -> int:
        """Multiplications for a pair of query and key: for the score, and for the weighted sum of values."""
        size = self.latent_size if self.absorbed else self.head_size
        return self.n_heads * (2 * size + self.rope_dim)
