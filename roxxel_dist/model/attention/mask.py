"""Which keys a token attends to, and how a pair is scored: one value that every kernel takes."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import TENSOR, row_axes
from roxxel_dist.model.config import ModelConfig

KernelName = Literal["xla", "cudnn", "splash"]
LANES = 128
"""Block sizes of splash attention are multiples of this number of tokens."""
HIDDEN = -1e30
"""The score of a masked pair: finite, because a block may mask all keys of a query."""
LATER = 1 << 30
"""The position of padding: after those of all tokens, which so do not attend to it."""
RESIDUALS = "attention"
"""What is kept for the backward pass, with gradient checkpointing too: the output, and the logarithms of the softmax
sums. To compute them again costs as much as the forward pass, and sends the keys of a row that is cut once more."""


STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys the tokens of a batch attend to, and how the product of a query and a key becomes a score.

    Its arrays are leaves; all else is known while a program is traced.
    """

    window: int | None = field(default=None, metadata=STATIC)
    """How many tokens a token attends to, itself included; None for all before it."""
    scale: float = field(default=0.0, metadata=STATIC)
    """Of scores; 0: 1 / sqrt(K)."""
    cap: float | None = field(default=None, metadata=STATIC)
    """See `layers.soft_cap`; None for none."""
    causal: bool = field(default=True, metadata=STATIC)
    """Whether a token attends to no later one. Without it, `pairs` say all, the window included."""
    segments: jax.Array | None = None
    """int32[B, L]: a token attends to those with its own number. None: a row is one segment."""
    positions: jax.Array | None = None
    """int32[B, L]: a token attends to those at its own position and before it. None: their places in the row."""
    pairs: jax.Array | None = None
    """bool[B, 1, L, S]: which of S keys each token may attend to, in place of segments and positions."""

    def with_scale(self, key_size: int) -> "Mask":
        """The mask with a scale, for keys of this width."""
        return dataclasses.replace(self, scale=self.scale or 1 / math.sqrt(key_size))

    def map_labels(self, change: Callable[[jax.Array], jax.Array]) -> "Mask":
        """The mask with other arrays."""
        return jax.tree.map(change, self)

    def pad(self, length: int) -> "Mask":
        """The mask for rows of `length` tokens, of which no token attends to the further ones."""
        segments, positions = self.segments, self.positions
        if positions is not None:
            positions = jnp.pad(positions, [(0, 0), (0, length - positions.shape[1])], constant_values=LATER)
        segments = None if segments is None else pad_tokens(segments, length)
        return dataclasses.replace(self, segments=segments, positions=positions)

    @property
    def by_place(self) -> bool:
        """Whether places in the row decide causality and the window."""
        return self.causal and self.positions is None

    def dense(self) -> jax.Array | None:
        """bool[B, 1, L, S]: which keys each token may attend to by its arrays; None where there are none.

        With positions it is the complete mask, else causality and the window come on top where they are `by_place`.
        """
        if self.pairs is not None:
            return self.pairs
        seen, segments_BxL, positions_BxL = None, self.segments, self.positions
        if positions_BxL is not None:
            back_BxLxL = positions_BxL[:, :, None] - positions_BxL[:, None]
            seen = back_BxLxL >= 0 if self.window is None else (back_BxLxL >= 0) & (back_BxLxL < self.window)
        if segments_BxL is not None:
            same = segments_BxL[:, :, None] == segments_BxL[:, None]
            seen = same if seen is None else seen & same
        return None if seen is None else seen[:, None]


def key_size(config: ModelConfig) -> int:
    """Width of the keys in attention of a training step."""
    head_size = config.heads()[2]
    if not config.mla:
        return head_size
    turned = config.rope_dim if config.pos_encoding == "rotary" else 0
    return (config.down_dim_kv if config.inference else head_size) + turned


def score_scale(config: ModelConfig) -> float | None:
    """The scale of scores: None for 1 / sqrt(K), or with mup sqrt(K at the base width) / K.

    Training correlates queries and keys, so their product grows with K, not with its root.
    """
    if config.query_pre_attn_scalar is not None:
        return config.query_pre_attn_scalar**-0.5
    if config.parametrization == "standard":
        return None
    base, size = (key_size(dataclasses.replace(each, inference=False)) for each in (config.at_base_width(), config))
    return math.sqrt(base) / size


def mask_of(config: ModelConfig) -> Mask:
    """What all layers of a model have in common: how it scores queries and keys."""
    return Mask(scale=score_scale(config) or 0.0, cap=config.attn_softcap)


def pad_tokens(x: jax.Array, length: int) -> jax.Array:
    """[B, L, ...] to [B, length, ...], with zeros at the end."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def map_own_rows(
    local: Callable[[jax.Array, jax.Array, jax.Array, Mask], Any], q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask
) -> jax.Array:
    """A kernel, [B, L, H, V], that each device computes for its own rows, and heads where "tensor" divides them.

    XLA cannot partition it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return local(q, k, v, mask)
    rows, shared = row_axes(mesh), mesh.shape.get(TENSOR, 1)
    heads = TENSOR if shared > 1 and k.shape[2] % shared == 0 else None
    spec = P(rows, None, heads, None)
    return jax.shard_map(local, in_specs=(spec, spec, spec, P(rows, None)), out_specs=spec, check_vma=False)(
        q, k, v, mask
    )
