"""A training step as flax and optax alone have it: what ours is held against. Nothing of this package is in it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Size(NamedTuple):
    """A decoder of the family of Llama, with one matrix for embedding and head."""

    dim: int = 768
    blocks: int = 12
    heads: int = 12
    hidden: int = 2048
    """Of SwiGLU."""
    vocabulary: int = 50_304
    checkpointing: bool = False


class Attention(nnx.Module):
    """Causal, with rotary positions; by cuDNN on GPUs, else as XLA makes it."""

    def __init__(self, size: Size, kernel: str, rngs: nnx.Rngs) -> None:
        self.qkv: Any = _linear(size.dim, 3 * size.dim, rngs)
        self.out: Any = _linear(size.dim, size.dim, rngs)
        self.heads, self.kernel = size.heads, kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        kernel: Any = self.kernel
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation=kernel)
        return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
    """Attention and SwiGLU, each after a norm and beside the residual."""

    def __init__(self, size: Size, kernel: str, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = (nnx.RMSNorm(size.dim, dtype=jnp.bfloat16, rngs=rngs) for _ in range(2))
        self.attention = Attention(size, kernel, rngs)
        self.up, self.down = _linear(size.dim, 2 * size.hidden, rngs), _linear(size.hidden, size.dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention(self.norm_1(x))
        gate, up = jnp.split(self.up(self.norm_2(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Decoder(nnx.Module):
    """Tokens [rows, length] -> logits [rows, length, vocabulary] in float32."""

    def __init__(self, size: Size, kernel: str, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(size.vocabulary, size.dim, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(size, kernel, rngs) for _ in range(size.blocks)])
        self.norm, self.checkpointing = nnx.RMSNorm(size.dim, dtype=jnp.bfloat16, rngs=rngs), size.checkpointing

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.checkpointing else block(x)
        head = self.embed.embedding[...].astype(jnp.bfloat16)
        return jnp.einsum("rld,vd->rlv", self.norm(x), head, preferred_element_type=jnp.float32)


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


def rotated(x: jax.Array) -> jax.Array:
    """Queries or keys [rows, length, heads, size], turned by their positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def plain_step(size: Size, mesh: Mesh, rows: int, length: int, *, fsdp: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """(the jitted step, its abstract arguments: parameters, moments of AdamW, tokens [rows, length]).

    Parameters are float32 and computed with in bfloat16. Rows are cut over the mesh's first axis, and with `fsdp`
    the largest dimension of each parameter that it divides.
    """
    (axis, *_), kernel = mesh.axis_names, "cudnn" if mesh.devices.flat[0].platform == "gpu" else "xla"
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(size, kernel, nnx.Rngs(0))))
    optimizer = optax.adamw(1e-4)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    def placed(leaf: Any) -> Any:
        cut = [n for n in leaf.shape if n % mesh.size == 0] if fsdp and leaf.ndim > 1 else []
        at = leaf.shape.index(max(cut)) if cut else -1
        spec = P(*(axis if i == at else None for i in range(leaf.ndim)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(placed, (params, jax.eval_shape(optimizer.init, params)))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*places, NamedSharding(mesh, P())))
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=NamedSharding(mesh, P(axis)))
    return jitted, (*state, tokens)
