"""Attention of rows whose tokens are cut over devices: the axis "tokens" of a `phase_mesh`.

Queries stay on their device, but for their order. Keys and values are gathered: of a layer once in the forward pass,
and again in the backward pass, so that nothing of the length of a row is kept between the two. Their gradients are
summed over the devices and go back to the devices of the keys.

Causality makes later queries dearer. So a row is cut into 2 t segments for t devices, and device i computes on the
segments i and 2 t - 1 - i: together they see as many keys as any other pair (as in the zigzag order of ring attention;
Liu et al., 2023). A window sees as many keys anywhere: then a device keeps its queries, and is sent the keys of its
window alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR, TOKENS, row_axes, row_shards, token_shards
from roxxel_dist.model.attention_kernels import Blocks, block_of, blocked_backward, blocked_forward, first_blocks


@dataclass(frozen=True)
class Cut:
    """How the tokens of a row lie on the devices along "tokens"."""

    devices: int
    blocks: int
    """Of each device."""
    size: int
    """Tokens of a block."""
    halo: int | None
    """Blocks before its own that a device needs for its window; None: all blocks of a row."""

    @property
    def tokens(self) -> int:
        """Of a row, with padding at its end: causality hides it."""
        return self.devices * self.blocks * self.size

    @classmethod
    def of(cls, devices: int, length: int, window: int | None) -> "Cut":
        """For rows of `length` tokens: as little padding as blocks of at most `block_of` tokens need."""
        largest = block_of(window)
        if window is not None:
            each = -(-length // devices)
            blocks = -(-each // largest)
            size = -(-each // blocks)
            halo = -(-(window - 1) // size)
            if halo < (devices - 1) * blocks:
                return cls(devices, blocks, size, halo)
        each = -(-length // (2 * devices))
        half = -(-each // largest)
        return cls(devices, 2 * half, -(-each // half), None)

    def order(self, x: jax.Array) -> jax.Array:
        """This device's part of a row, [B, tokens, ...], as the queries that it computes on; see `restore`.

        The segments 2 d and 2 d + 1 of device d go to the devices that have them in pairs (e, 2 t - 1 - e).
        """
        if self.halo is not None:
            return x
        even, odd = (
            jax.lax.ppermute(half, TOKENS, list(enumerate(to)))
            for half, to in zip(jnp.split(x, 2, axis=1), self._places, strict=True)
        )
        is_even = jax.lax.axis_index(TOKENS) % 2 == 0
        return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse of `order`."""
        if self.halo is not None:
            return x
        low, high = jnp.split(x, 2, axis=1)
        is_even = jax.lax.axis_index(TOKENS) % 2 == 0
        halves = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        back = (
            jax.lax.ppermute(half, TOKENS, [(there, here) for here, there in enumerate(to)])
            for half, to in zip(halves, self._places, strict=True)
        )
        return jnp.concatenate(list(back), axis=1)

    @property
    def _places(self) -> tuple[list[int], list[int]]:
        """The device that computes on the segments 2 d, and on the segments 2 d + 1, for each device d."""
        last = 2 * self.devices - 1
        return tuple([min(s, last - s) for s in range(first, 2 * self.devices, 2)] for first in (0, 1))  # pyright: ignore[reportReturnType]

    def gather(self, x: jax.Array) -> jax.Array:
        """[B, tokens, ...] of a device to those of a whole row; with a halo, of it and the own ones."""
        if self.halo is None:
            return jax.lax.all_gather(x, TOKENS, axis=1, tiled=True)
        parts, left = [x], self.halo
        for shift in range(1, -(-self.halo // self.blocks) + 1):  # from the neighbours before
            take = min(left, self.blocks) * self.size
            left -= self.blocks
            pairs = [(i, i + shift) for i in range(self.devices - shift)]  # the first devices get zeros
            parts.insert(0, jax.lax.ppermute(x[:, x.shape[1] - take :], TOKENS, pairs))
        return jnp.concatenate(parts, axis=1)

    def scatter(self, x: jax.Array) -> jax.Array:
        """The transpose of `gather`: of gradients of gathered keys, the sums of this device's own keys."""
        own = jax.ShapeDtypeStruct((x.shape[0], self.blocks * self.size, *x.shape[2:]), x.dtype)
        return jax.linear_transpose(self.gather, own)(x)[0]

    def split(self, x: jax.Array) -> jax.Array:
        """[B, tokens, G, ...] to blocks [blocks, B, G, ..., size, last]."""
        x = x.reshape(x.shape[0], -1, self.size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, -2)

    def join(self, x: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        x = jnp.moveaxis(jnp.moveaxis(x, -2, 2), 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def blocks_here(self, segments_BxL: jax.Array | None, window: int | None) -> Blocks:
        """Which keys, of those that `gather` gives, each block of this device's queries attends to."""
        device = jax.lax.axis_index(TOKENS)
        every = None if segments_BxL is None else self.split(segments_BxL[..., None])[..., 0]
        if self.halo is None:
            half = jnp.arange(self.blocks // 2)
            last = 2 * self.devices - 1 - device
            number = jnp.concatenate([device * half.size + half, last * half.size + half])
            of_q = None if every is None else every[number]
            return Blocks(number, first_blocks(number, self.size, window, of_q, every), of_q, every)
        number = self.halo + jnp.arange(self.blocks)
        first = device * self.blocks  # of the row
        of_q = of_k = None
        if every is not None:
            of_q = jax.lax.dynamic_slice_in_dim(every, first, self.blocks)
            every = jnp.pad(every, [(self.halo, 0), (0, 0), (0, 0)])
            of_k = jax.lax.dynamic_slice_in_dim(every, first, self.halo + self.blocks)
        begins = first_blocks(number, self.size, window, of_q, of_k)
        return Blocks(number, jnp.maximum(begins, self.halo - first), of_q, of_k)


def cut_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxV: jax.Array,
    segments_BxL: jax.Array | None,
    window: int | None,
    scale: float,
) -> jax.Array:
    """`blocked_attention` on a mesh with an axis "tokens", which is set: each device for its part of each row.

    Arguments and result are the same; the result is cut along its tokens. Rows are cut where the mesh divides them, and
    heads where "tensor" divides the key heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, length, heads, _ = q_BxLxHxK.shape
    groups, cut = k_BxLxGxK.shape[2], Cut.of(token_shards(mesh), length, window)
    rows = row_axes(mesh) if batch % row_shards(mesh) == 0 else None
    shared = TENSOR if mesh.shape[TENSOR] > 1 and groups % mesh.shape[TENSOR] == 0 else None

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        grouped = q.reshape(*q.shape[:2], k.shape[2], heads // groups, q.shape[-1])
        mixed: Any = _local(grouped, k, v, segments, cut, window, scale)
        return mixed.reshape(*q.shape[:3], v.shape[-1])

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, cut.tokens - length), *[(0, 0)] * (x.ndim - 2)])

    q, k, v = (padded(x) for x in (q_BxLxHxK, k_BxLxGxK, v_BxLxGxV))
    segments = None if segments_BxL is None else padded(segments_BxL)
    spec = P(rows, TOKENS, shared, None)
    out: Any = jax.shard_map(
        local, in_specs=(spec, spec, spec, None if segments is None else P(rows, None)), out_specs=spec,
        check_vma=False,
    )(q, k, v, segments)  # fmt: skip
    return out[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _local(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, cut: Cut, window: int | None, scale: float
) -> jax.Array:
    """A device's part of `cut_attention`: queries [B, tokens, G, H / G, K], keys [B, tokens, G, K], all segments."""
    return _forward(q, k, v, segments, cut, window, scale)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, cut: Cut, window: int | None, scale: float
) -> tuple[jax.Array, Any]:
    q = cut.split(cut.order(q))
    keys, values = (cut.split(cut.gather(x)) for x in (k, v))
    out, log_sums = blocked_forward(q, keys, values, cut.blocks_here(segments, window), window, scale)
    return cut.restore(cut.join(out)), (q, k, v, segments, out, log_sums)


def _backward(cut: Cut, window: int | None, scale: float, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, segments, out, log_sums = kept
    # Gathered again, not kept since the forward pass, which XLA would do: the barrier makes it another computation.
    k, v, d_out = jax.lax.optimization_barrier((k, v, d_out))
    keys, values = (cut.split(cut.gather(x)) for x in (k, v))
    d_out, at = cut.split(cut.order(d_out)), cut.blocks_here(segments, window)
    d_q, d_k, d_v = blocked_backward(q, keys, values, at, out, log_sums, d_out, window, scale)
    own = (cut.scatter(cut.join(x)).astype(like.dtype) for x, like in ((d_k, k), (d_v, v)))
    return cut.restore(cut.join(d_q)), *own, None


_local.defvjp(_forward, _backward)
