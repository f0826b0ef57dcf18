"""Attention of rows whose tokens are cut over devices: the axis "tokens" of a `phase_mesh`.

Queries stay on their device, but for their order. Keys and values are gathered: of a layer once in the forward pass,
and again in the backward pass, so that nothing of the length of a row is kept between the two. Their gradients are
summed over the devices and go back to the devices of the keys.

Causality makes later queries dearer. So a row is cut into 2 t segments for t devices, and device i computes on the
segments i and 2 t - 1 - i: together they see as many keys as any other pair (as in the zigzag order of ring attention;
Liu et al., 2023). A window sees as many keys anywhere: then a device keeps its queries, and is sent the keys of its
window alone. Decision 10.

cuDNN and splash attention compute what they can: without positions, and where blocks of their sizes need little
padding.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR, TOKENS, row_axes, row_shards, token_shards
from roxxel_dist.model.attention.blocked import BLOCKED, Blocks, Form, block_of, join_rows, split_rows
from roxxel_dist.model.attention.mask import LANES, RESIDUALS, KernelName, Mask, pad_tokens
from roxxel_dist.model.attention.vendor_kernels import LARGEST_BLOCK, PAIRS, pad_widths, splash_block, splash_kernel

NOWHERE = -(1 << 31)
"""The segment of what a device without tokens before its own has in their place."""
MOST_PADDING = 17 / 16
"""Times the tokens of a row that a kernel may compute whose blocks are of 128 tokens at least."""


@dataclass(frozen=True)
class RowCut:
    """How the tokens of a row are cut into parts: of the devices along "tokens", or of virtual shards."""

    parts: int
    """Of a row."""
    blocks: int
    """Of each part."""
    size: int
    """Tokens of a block."""
    halo: int | None = None
    """Blocks before its own that a part needs for its window; None: all blocks of a row, and the part i has the blocks
    of the pieces i and 2 t - 1 - i of the 2 t pieces of the row."""

    @property
    def tokens(self) -> int:
        """Tokens of a row, with padding at its end: causality hides it."""
        return self.row_blocks * self.size

    @property
    def row_blocks(self) -> int:
        """Blocks of a row."""
        return self.parts * self.blocks

    @classmethod
    def of_length(cls, parts: int, length: int, window: int | None, *, by_place: bool = True) -> "RowCut":
        """The cut of rows of `length` tokens with as little padding as blocks of at most `block_of` tokens need.

        `by_place`: a window is one of places in the row, not of positions, so it is known which parts have its keys.
        """
        largest = block_of(window)

        def pieces(tokens: int) -> tuple[int, int]:
            blocks = -(-tokens // largest)
            return blocks, -(-tokens // blocks)

        return cls._of_pieces(parts, length, window if by_place else None, pieces)

    @classmethod
    def of_lanes(cls, parts: int, length: int, window: int | None) -> "RowCut":
        """The cut in blocks that splash attention takes: each device has a multiple of 128 tokens, or of 256."""

        def pieces(tokens: int) -> tuple[int, int]:
            padded = -(-tokens // LANES) * LANES
            return padded // splash_block(padded), splash_block(padded)

        return cls._of_pieces(parts, length, window, pieces)

    @classmethod
    def of_pairs(cls, parts: int, length: int, window: int | None, *, packed: bool) -> "RowCut":
        """The cut in blocks for cuDNN, a multiple of 128 tokens: the largest ones that a bias allows, or that need
        none."""
        largest = block_of(window, LARGEST_BLOCK)

        def pieces(tokens: int) -> tuple[int, int]:
            blocks = -(-tokens // largest) if packed or window is not None else 1
            return blocks, -(-tokens // (blocks * LANES)) * LANES

        return cls._of_pieces(parts, length, window, pieces)

    @classmethod
    def _of_pieces(
        cls, parts: int, length: int, window: int | None, pieces: Callable[[int], tuple[int, int]]
    ) -> "RowCut":
        """The cut by (tokens of a piece) -> (its blocks, their tokens): with a halo where it spares keys."""
        if window is not None:
            blocks, size = pieces(-(-length // parts))
            halo = -(-(window - 1) // size)
            if halo < (parts - 1) * blocks:
                return cls(parts, blocks, size, halo)
        blocks, size = pieces(-(-length // (2 * parts)))
        return cls(parts, 2 * blocks, size)

    def numbers(self, part: Any) -> jax.Array:
        """int32[blocks]: which blocks of its row a part has; parts may be numbered through all rows of a batch."""
        first, each = part % self.parts, jnp.arange(self.blocks // 2)
        last = 2 * self.parts - 1 - first
        return jnp.concatenate([first * each.size + each, last * each.size + each])

    @property
    def of_parts(self) -> np.ndarray:
        """int[row_blocks]: which blocks the parts have, one part after the other."""
        numbers = np.arange(self.row_blocks)
        if self.halo is not None:
            return numbers
        pieces = numbers.reshape(2 * self.parts, -1)
        return np.stack([pieces[: self.parts], pieces[: self.parts - 1 : -1]], axis=1).reshape(-1)

    @property
    def places(self) -> np.ndarray:
        """int[row_blocks]: the place of each block of a row where its parts lie one behind the other."""
        return np.argsort(self.of_parts)

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
        last = 2 * self.parts - 1
        return tuple([min(s, last - s) for s in range(first, 2 * self.parts, 2)] for first in (0, 1))  # pyright: ignore[reportReturnType]

    def gather(self, x: jax.Array, *, in_blocks: bool = False) -> jax.Array:
        """[B, tokens, ...] of a device to those of a whole row; with a halo, of it and the own ones.

        `in_blocks`: `x` is as `split` makes it, and so is the result. No copy of a whole row is then made for that.
        """
        axis, unit = (0, 1) if in_blocks else (1, self.size)
        if self.halo is None:
            return jax.lax.all_gather(x, TOKENS, axis=axis, tiled=True)
        parts, left = [x], self.halo
        for shift in range(1, -(-self.halo // self.blocks) + 1):  # from the neighbours before
            take = min(left, self.blocks) * unit
            left -= self.blocks
            pairs = [(i, i + shift) for i in range(self.parts - shift)]  # the first devices get zeros
            own = jax.lax.slice_in_dim(x, x.shape[axis] - take, None, axis=axis)
            parts.insert(0, jax.lax.ppermute(own, TOKENS, pairs))
        return jnp.concatenate(parts, axis=axis)

    def scatter(self, x: jax.Array) -> jax.Array:
        """The transpose of `gather` in blocks: of gradients of gathered keys, the sums of this device's own keys."""
        own = jax.ShapeDtypeStruct((self.blocks, *x.shape[1:]), x.dtype)
        return jax.linear_transpose(partial(self.gather, in_blocks=True), own)(x)[0]

    def device_blocks(self, mask: Mask) -> Blocks:
        """Which keys, of those that `gather` gives, each block of this device's queries attends to; `mask`: of rows."""
        device = jax.lax.axis_index(TOKENS)
        every = mask.map_labels(lambda x: split_rows(x, self.size))
        if self.halo is None:
            number = self.numbers(device)
            return Blocks.between(number, self.size, every.map_labels(lambda x: x[number]), every)
        halo, number = self.halo, self.halo + jnp.arange(self.blocks)
        start = device * self.blocks  # of the row
        of_q = every.map_labels(lambda x: jax.lax.dynamic_slice_in_dim(x, start, self.blocks))
        every = every.map_labels(lambda x: jnp.pad(x, [(halo, 0), (0, 0), (0, 0)], constant_values=NOWHERE))
        of_k = every.map_labels(lambda x: jax.lax.dynamic_slice_in_dim(x, start, halo + self.blocks))
        at = Blocks.between(number, self.size, of_q, of_k)
        return at._replace(first=jnp.maximum(at.first, halo - start))

    @property
    def queries(self) -> np.ndarray:
        """int32[tokens]: the places of the tokens that the parts, one after the other, have as `order` gives them."""
        return np.arange(self.tokens, dtype=np.int32).reshape(-1, self.size)[self.of_parts].reshape(-1)


def cut_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxV: jax.Array,
    mask: Mask,
    kernel: KernelName = "xla",
    *,
    interpret: bool = False,
) -> jax.Array:
    """`blocked_attention` on a mesh with an axis "tokens", which is set: each device for its part of each row.

    Arguments and result are the same; the result is cut along its tokens. Rows are cut where the mesh divides them, and
    heads where "tensor" divides the key heads. `kernel`: another one than XLA computes where it can: without positions,
    and where each device has enough tokens for its blocks. `interpret` runs splash attention on any device, slowly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, length, heads, _ = q_BxLxHxK.shape
    groups, together, devices = k_BxLxGxK.shape[2], mesh.shape.get(TENSOR, 1), token_shards(mesh)
    window = mask.window
    rows = row_axes(mesh) if TOKENS not in row_axes(mesh) and batch % row_shards(mesh) == 0 else None
    shared = TENSOR if together > 1 and groups % together == 0 else None
    if kernel == "cudnn":
        cut = RowCut.of_pairs(devices, length, window, packed=mask.segments is not None)
    else:
        cut = RowCut.of_lanes(devices, length, window)
    if mask.positions is not None or cut.tokens > MOST_PADDING * length:
        kernel = "xla"
    if kernel == "xla":
        cut = RowCut.of_length(devices, length, window, by_place=mask.positions is None)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, _: Any) -> jax.Array:
        if kernel == "cudnn":
            mixed: Any = _local(*pad_widths(q, k, v), mask, cut, PAIRS)
        else:
            grouped = q.reshape(*q.shape[:2], k.shape[2], heads // groups, q.shape[-1])
            mixed = _local(grouped, k, v, mask, cut, BLOCKED)
        return mixed.reshape(*q.shape[:3], -1)[..., : v.shape[-1]]

    program, local_program, of_program = None, local, None
    if kernel == "splash":
        program = splash_program(cut, heads // (together if shared else 1), mask, interpret=interpret)
        local_program = partial(_local_splash, cut=cut)
        # Its tables say which blocks each device computes; with a halo they are the same for all.
        tables = P(None, None if cut.halo is not None else TOKENS)
        of_program = program.manual_sharding_spec(NamedSharding(mesh, tables))
    q, k, v = (pad_tokens(x, cut.tokens) for x in (q_BxLxHxK, k_BxLxGxK, v_BxLxGxV))
    spec = P(rows, TOKENS, shared, None)
    out: Any = jax.shard_map(
        local_program, in_specs=(spec, spec, spec, P(rows, None), of_program), out_specs=spec, check_vma=False
    )(q, k, v, mask.pad(cut.tokens), program)
    return out[:, :length]


def splash_program(cut: RowCut, heads: int, mask: Mask, *, interpret: bool) -> Any:
    """Splash attention of each device's queries among the keys that it gathers, with a table of the blocks it needs."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    queries, halo, window = cut.blocks * cut.size, (cut.halo or 0) * cut.size, mask.window
    shape = (queries, halo + queries) if cut.halo is not None else (cut.tokens, cut.tokens)
    near = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), halo)
    if cut.halo is None:
        near.q_sequence = cut.queries
    devices = cut.parts if cut.halo is None else 1
    return splash_kernel(near, heads, cut.size, mask.cap, devices, interpret=interpret)


def _local_splash(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, program: Any, *, cut: RowCut) -> jax.Array:
    """`_local`, for queries [B, tokens, H, K], by splash attention."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if mask.segments is None and cut.halo is not None:  # the first devices have no tokens before their own
        mask = dataclasses.replace(mask, segments=jnp.zeros((q.shape[0], cut.tokens), jnp.int32))

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        at, ids = cut.device_blocks(mask), None
        if at.of_q.segments is not None and at.of_k.segments is not None:
            of_q, of_k = map(join_rows, (at.of_q.segments, at.of_k.segments))
            ids = splash.SegmentIds(of_q, of_k)
        of_heads = (x.swapaxes(1, 2) for x in (cut.order(q * mask.scale), cut.gather(k), cut.gather(v)))
        out: Any = jax.vmap(program)(*of_heads, ids)
        return cut.restore(out.swapaxes(1, 2))

    # The keys of the whole row are gathered again in the backward pass, and not kept since the forward pass.
    keep = jax.checkpoint_policies.save_only_these_names(RESIDUALS)
    return jax.checkpoint(mixed, policy=keep)(q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _local(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, cut: RowCut, form: Form) -> jax.Array:
    """A device's part of `cut_attention`: queries as `form` has them, keys [B, tokens, G, K], the mask of rows."""
    return _forward(q, k, v, mask, cut, form)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, cut: RowCut, form: Form) -> tuple[jax.Array, Any]:
    q = form.split(cut.order(q), cut.size)
    keys, values = (cut.gather(form.split(x, cut.size), in_blocks=True) for x in (k, v))
    at = cut.device_blocks(mask)
    out, log_sums = checkpoint_name(form.forward(q, keys, values, at, cut.row_blocks), RESIDUALS)
    return cut.restore(form.join(out)), (q, k, v, mask, out, log_sums)


def _backward(cut: RowCut, form: Form, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, mask, out, log_sums = kept
    # Gathered again, not kept since the forward pass: XLA would take it for the same computation, and drops an
    # optimization barrier on some devices. So keys are those of this gradient: NaN where it is, as theirs would be.
    first = d_out.reshape(-1)[0]
    k, v = (jnp.where(jnp.isnan(first), first.astype(x.dtype), x) for x in (k, v))
    keys, values = (cut.gather(form.split(x, cut.size), in_blocks=True) for x in (k, v))
    d_out, at = form.split(cut.order(d_out), cut.size), cut.device_blocks(mask)
    d_q, d_k, d_v = form.backward(q, keys, values, at, out, log_sums, d_out, cut.row_blocks)
    own = (form.join(cut.scatter(x)).astype(like.dtype) for x, like in ((d_k, k), (d_v, v)))
    return cut.restore(form.join(d_q)), *own, None


_local.defvjp(_forward, _backward)
