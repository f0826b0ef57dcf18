"""Attention kernels: the choice of a kernel, and XLA attention in blocks of queries and keys.

The score matrix of a row of L tokens has L x L numbers for each head. Up to `LONGEST_WHOLE` tokens XLA keeps it in
memory. For longer rows it computes one block at a time, as FlashAttention does (Dao et al., 2022), and again in
the backward pass. cuDNN (NVIDIA GPUs) and splash attention (TPU) do so in kernels of their own. Decision 11.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.determinism import is_deterministic
from roxxel_dist.cluster.mesh import TENSOR, device_type, row_axes
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.devices.program_cost import MEAN_TRIPS
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.layers import soft_cap
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

Kernel = Literal["xla", "cudnn", "splash"]
LONGEST_WHOLE = 1024
"""Tokens: up to here XLA computes all scores of a row at once, which is faster for short rows."""
BLOCK = 512
"""Tokens of a block of queries, and of keys; fewer if a window is shorter."""
LANES = 128
"""Block sizes of splash attention are multiples of this number of tokens."""
LONGEST_BIAS = 2048
"""Tokens of a row of documents, up to which cuDNN has one bias of it: an array that is added to its scores."""
LARGEST_BLOCK = 1024
"""Tokens of a block of a longer one, at most."""
WIDEST_PACKED = 128
"""Channels of a key that cuDNN takes with a bias in the backward pass of every GPU that it is used on."""
HIDDEN = -1e30
"""The score of a masked pair: finite, because a block may mask all keys of a query."""
LATER = 1 << 30
"""The position of padding: after those of all tokens, which so do not attend to it."""
RESIDUALS = "attention"
"""What is kept for the backward pass, with gradient checkpointing too: the output, and the logarithms of the softmax
sums. To compute them again costs as much as the forward pass, and sends the keys of a row that is cut once more."""


class Scores(NamedTuple):
    """How the product of a query and a key becomes its score."""

    scale: float = 0.0
    """0: 1 / sqrt(K)."""
    cap: float | None = None
    """See `layers.soft_cap`; None for none."""

    def scaled(self, key_size: int) -> "Scores":
        """The same with a scale, for keys of this width."""
        return self._replace(scale=self.scale or 1 / math.sqrt(key_size))


PLAIN = Scores()


class Labels(NamedTuple):
    """What decides, of the tokens of a batch, which attend to which; each int32[B, L]."""

    segments: jax.Array | None = None
    """A token attends to those with its own number. None: a row is one segment."""
    positions: jax.Array | None = None
    """A token attends to those at its own position and before it. None: their places in the row."""


def kernel_for(
    kernel: AttentionKernel,
    *,
    key_size: int,
    bf16: bool,
    packed: bool,
    capped: bool = False,
    whole_rows: bool = True,
    begun: bool = False,
    device: Any = None,
) -> Kernel:
    """The kernel that computes attention on a device: the named one, or for auto the device's own.

    Args:
        kernel: auto: cuDNN on a GPU and splash attention on a TPU if they support it, otherwise XLA.
        key_size: width of a key.
        bf16: whether queries, keys and values are bfloat16.
        packed: whether a row may have several documents.
        capped: whether scores have a soft cap.
        whole_rows: whether each device has whole rows, not parts of rows.
        begun: whether it is the kernel that a resumed run keeps, for the message.
        device: with `platform` and `device_kind`, as `device_type` gives it; by default the devices of the mesh that
            is set, else those that jax uses here.

    Raises:
        ValueError: the named kernel does not support it; the message has the rule and the fix.
    """
    device = device_type() if device is None else device
    if kernel == "auto":
        native = native_kernel(device)
        return "xla" if broken_rule(native, device, key_size, bf16, packed, whole_rows, capped) else native
    if broken := broken_rule(kernel, device, key_size, bf16, packed, whole_rows, capped):
        rule, fix = broken
        if begun:
            raise UserError(
                f"the run began with attention {kernel}, which a resume keeps, and {rule}: resume it where that can "
                f"run, or begin a new run at its checkpoint with {argument('fork', 'RUN@STEP')} and "
                f"{argument('attention', 'xla')}"
            )
        raise UserError(f"attention is {kernel}: {rule}: {fix}")
    return kernel


def native_kernel(device: Any) -> Kernel:
    """The kernel that a kind of device has of its own, else XLA's."""
    return "splash" if device.platform == "tpu" else "cudnn" if device.platform == "gpu" else "xla"


def broken_rule(
    kernel: Kernel, device: Any, key_size: int, bf16: bool, packed: bool, whole_rows: bool, capped: bool = False
) -> tuple[str, str] | None:
    """(why a kernel does not support it, the fix); None if it does."""
    if kernel == "xla":
        return None
    name, home = ("cuDNN", "gpu") if kernel == "cudnn" else ("splash attention", "tpu")
    batch = "use a batch_size that is a multiple of devices x grad_accum, or xla"
    capability = compute_capability(device)
    widest = 256 if capability >= (9, 0) else 128
    rules = [
        (
            device.platform == home,
            f"{name} is for {home.upper()}s, and the devices here are {device.platform}",
            "use auto",
        ),
        (whole_rows, f"{name} needs whole rows on each device", batch),
    ]
    if kernel == "cudnn":
        rules += [
            (
                capability >= (8, 0),
                f"cuDNN needs compute capability 8.0, and this is a {device.device_kind}",
                "use xla",
            ),
            (bf16, "cuDNN computes in bfloat16", "set bf16_compute or use_bf16, or use xla"),
            (key_size % 8 == 0, f"cuDNN needs keys of a multiple of 8 channels, and they have {key_size}", "use xla"),
            (key_size <= widest, f"cuDNN takes keys of {widest} channels here, and they have {key_size}", "use xla"),
            (
                not capped,
                "cuDNN has no soft cap of scores (attn_softcap)",
                "use auto or xla, or leave attn_softcap out",
            ),
            (
                not packed or key_size <= WIDEST_PACKED,
                f"cuDNN takes keys of {WIDEST_PACKED} channels for documents within a row, and they have {key_size}",
                "use packing contiguous, or xla",
            ),
            # Decision 11.
            (
                not is_deterministic(),
                "deterministic is true, and XLA does not run cuDNN's deterministic backward pass",
                "use auto or xla, or set deterministic to false",
            ),
        ]
    return next(((rule, fix) for holds, rule, fix in rules if not holds), None)


def compute_capability(device: Any) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU, such as (9, 0); (0, 0) for other GPUs.

    The devices of an abstract mesh do not say it: it is that of a device here of the same kind, or of the table.
    """
    if not hasattr(device, "compute_capability"):
        same = (each for each in jax.local_devices() if each.device_kind == device.device_kind)
        device = next(same, accelerator(device.device_kind))
    try:
        major, minor = str(getattr(device, "compute_capability", "")).split(".")
        return int(major), int(minor)
    except ValueError:
        return 0, 0


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


def scores_of(config: ModelConfig) -> Scores:
    """How a model scores queries and keys."""
    return Scores(score_scale(config) or 0.0, config.attn_softcap)


def score_traffic(heads: int, length: int, window: int | None) -> int:
    """Bytes that one layer's scores of a row are read and written with by XLA, forward and backward.

    For each score of a short row 64, of a row in blocks 128: by the compiler for an H200, of which those for q, k and v
    are a small part. cuDNN and splash attention keep scores in registers.
    """
    if length <= LONGEST_WHOLE:
        return 64 * heads * length**2
    seen = min(length, window or length)
    return 128 * heads * (length * seen - seen**2 // 2)


def score_bytes(kernel: Kernel, rows: int, heads: int, length: int, window: int | None, *, packed: bool = False) -> int:
    """Bytes of a device for one layer's scores during their computation, and for the backward pass.

    XLA keeps the whole matrix of a short row, in float32, for the backward pass; otherwise one block at a time, and the
    logarithm of each query's sum. cuDNN and splash attention keep blocks in registers. With documents in a row cuDNN
    has a bias of two bytes for each score: those of a row, or of a block of a long one.
    """
    sums = rows * heads * length * 4
    if kernel == "xla":
        if length <= LONGEST_WHOLE:
            return sums * length
        return sums + rows * heads * block_of(window) ** 2 * 4
    biased = length if length <= LONGEST_BIAS else LARGEST_BLOCK
    return sums + (rows * biased**2 * 2 if kernel == "cudnn" and packed else 0)


def block_of(window: int | None, largest: int = BLOCK) -> int:
    """Tokens of a block: the most, or fewer for a shorter window."""
    return largest if window is None else min(largest, max(LANES, 1 << (window - 1).bit_length()))


def jax_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    scale: float | None,
    causal: bool = True,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Attention by jax's own function: all scores at once."""
    size, values = k.shape[-1], v.shape[-1]
    if size != values:  # it needs values as wide as keys; zeros add nothing to a score
        scale, widest = scale or 1 / math.sqrt(size), max(size, values)
        q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, widest - x.shape[-1])]) for x in (q, k, v))
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
    )
    return mixed[..., :values]


def capped_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    scores: Scores,
    causal: bool = True,
    mask: jax.Array | None = None,
) -> jax.Array:
    """`jax_attention` with a soft cap, which that has not: all scores at once, in float32 at least."""
    (batch, length, heads, size), (_, keys, groups, _) = q.shape, k.shape
    scores = scores.scaled(size)
    q_BxLxGxRxK = q.reshape(batch, length, groups, heads // groups, size)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("blgrk,bsgk->bgrls", q_BxLxGxRxK, k, preferred_element_type=wide)
    score_BxGxRxLxS = soft_cap(products * scores.scale, scores.cap)
    back = jnp.arange(length)[:, None] - jnp.arange(keys)
    seen = jnp.ones((length, keys), bool) if not causal else back >= 0
    if window is not None:
        seen &= back < window
    seen = seen if mask is None else (seen & mask)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, score_BxGxRxLxS, HIDDEN), axis=-1).astype(v.dtype)
    return jnp.einsum("bgrls,bsgv->blgrv", weights, v).reshape(batch, length, heads, -1)


def whole_mask(labels: Labels, window: int | None) -> jax.Array | None:
    """bool[B, 1, L, L]: which keys each token may attend to by its labels; None where these say nothing.

    With positions it is the complete mask, else causality and the window by places come on top.
    """
    seen, (segments_BxL, positions_BxL) = None, labels
    if positions_BxL is not None:
        back_BxLxL = positions_BxL[:, :, None] - positions_BxL[:, None]
        seen = back_BxLxL >= 0 if window is None else (back_BxLxL >= 0) & (back_BxLxL < window)
    if segments_BxL is not None:
        same = segments_BxL[:, :, None] == segments_BxL[:, None]
        seen = same if seen is None else seen & same
    return None if seen is None else seen[:, None]


def blocked_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxV: jax.Array,
    labels: Labels,
    window: int | None,
    scores: Scores,
) -> jax.Array:
    """Causal attention by XLA, [B, L, H, V], a block of queries and a block of keys at a time.

    For each block of queries it computes only the blocks of keys that are not masked: none after it, and none before
    its window. No array has more than a block's scores, in the backward pass too.

    Args:
        q_BxLxHxK: queries; groups of H / G share a key.
        k_BxLxGxK: keys.
        v_BxLxGxV: values.
        labels: of the tokens.
        window: how many tokens a token attends to, itself included; None for all before it.
        scores: of queries and keys, with a scale.
    """
    batch, length, heads, _ = q_BxLxHxK.shape
    groups, size = k_BxLxGxK.shape[2], block_of(window)
    count = -(-length // size)

    def blocks(x: jax.Array) -> jax.Array:
        """[B, L, G, ...] to [blocks, B, G, ..., size, last]; padding of the last block is masked as later tokens."""
        x = pad_tokens(x, count * size)
        return jnp.moveaxis(jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0), 2, -2)

    each = jax.tree.map(lambda x: blocks(x[..., None])[..., 0], pad_labels(labels, count * size))
    at = Blocks.between(jnp.arange(count), size, window, each, each)
    grouped = q_BxLxHxK.reshape(batch, length, groups, heads // groups, -1)
    out: Any = _blocked(blocks(grouped), blocks(k_BxLxGxK), blocks(v_BxLxGxV), at, window, scores)
    out = jnp.moveaxis(jnp.moveaxis(out, -2, 2), 0, 1)  # [B, blocks, size, G, H / G, V]
    return out.reshape(batch, count * size, heads, -1)[:, :length]


# Below, shapes are of N blocks of C queries, [N, B, G, R, C, K] (R of them share a key), and of M blocks of C keys,
# [M, B, G, C, K].


class Blocks(NamedTuple):
    """Which blocks of keys each block of queries attends to: those from `first` to `last`."""

    number: jax.Array
    """int32[N]: which block of keys has the tokens of a block of queries."""
    first: jax.Array
    """int32[N]."""
    last: jax.Array
    """int32[N]: `number`, but where positions say otherwise."""
    q_labels: Labels
    """Each int32[N, B, C]."""
    k_labels: Labels
    """Each int32[M, B, C]."""

    @classmethod
    def between(cls, number: jax.Array, size: int, window: int | None, q_labels: Labels, k_labels: Labels) -> "Blocks":
        """From the first to the last block of keys that may have one that a block of queries attends to."""
        first, last = jnp.zeros(number.shape, jnp.int32), number
        may_meet: Any = True  # [N, M, B]
        if q_labels.segments is not None and k_labels.segments is not None:
            (least_q, most_q), (least_k, most_k) = _range(q_labels.segments)[:, :, None], _range(k_labels.segments)
            may_meet = (least_q <= most_k) & (least_k <= most_q)
        if q_labels.positions is not None and k_labels.positions is not None:
            (least_q, most_q), (least_k, most_k) = _range(q_labels.positions)[:, :, None], _range(k_labels.positions)
            may_meet &= least_k <= most_q
            if window is not None:
                may_meet &= least_q - most_k < window
            last = may_meet.shape[1] - 1 - may_meet.any(-1)[:, ::-1].argmax(-1)
        elif window is not None:
            first = jnp.maximum(0, (number * size - window + 1) // size)
        if may_meet is not True:
            first = jnp.maximum(first, may_meet.any(-1).argmax(-1))
        return cls(number, first, last, q_labels, k_labels)


def _range(labels: jax.Array) -> jax.Array:
    """[2, N, B]: the least and the largest of each block."""
    return jnp.stack([labels.min(-1), labels.max(-1)])


def pad_tokens(x: jax.Array, length: int) -> jax.Array:
    """[B, L, ...] to [B, length, ...], with zeros at the end."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def pad_labels(labels: Labels, length: int) -> Labels:
    """Those of rows of `length` tokens, of which no token attends to the further ones."""
    segments, positions = labels
    if positions is not None:
        positions = jnp.pad(positions, [(0, 0), (0, length - positions.shape[1])], constant_values=LATER)
    return Labels(None if segments is None else pad_tokens(segments, length), positions)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks, window: int | None, scores: Scores) -> jax.Array:
    return _blocked_forward(q, k, v, at, window, scores)[0]


def over_keys(
    i: jax.Array,
    at: Blocks,
    size: int,
    of_row: int,
    window: int | None,
    body: Any,
    start: Any,
    *,
    but_own: bool = False,
) -> Any:
    """`jax.lax.fori_loop` over the blocks of keys that block `i` of queries attends to; `but_own`: without its own.

    Their number differs between blocks and devices, and the program has it as data. So a scope says how many they are
    on average over the `of_row` blocks of a row, for who counts FLOPs; where labels decide, it is the most.
    """
    number = np.arange(of_row)
    first: Any = 0
    if window is not None and at.q_labels.positions is None:
        first = np.maximum(0, (number * size - window + 1) // size)
    with jax.named_scope(f"{MEAN_TRIPS}{(number - first + 1 - but_own).mean():g}"):
        return jax.lax.fori_loop(at.first[i], at.last[i] + 1 - but_own, body, start)


def blocked_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks, of_row: int, window: int | None, scores: Scores
) -> tuple[jax.Array, jax.Array]:
    """The output [N, B, G, R, C, V], and the logarithms of the softmax sums, float32 [N, B, G, R, C].

    A row has `of_row` blocks, on all devices together.
    """

    def queries(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        def keys(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            """One step of the online softmax. What blocks that are masked for a query leave, the next one that is not
            wipes out: it shrinks by exp(HIDDEN - score) = 0. At the least its own block has a key for it."""
            top, total, mixed = carry
            score = _scores(q, k, at, window, scores, i, j)
            higher = jnp.maximum(top, score.max(-1))
            weights, shrink = jnp.exp(score - higher[..., None]), jnp.exp(top - higher)
            new = jnp.einsum("bgrqs,bgsv->bgrqv", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
            return higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + new

        each = q.shape[1:-1]
        empty = jnp.full(each, HIDDEN), jnp.zeros(each), jnp.zeros((*each, v.shape[-1]))
        top, total, mixed = over_keys(i, at, q.shape[-2], of_row, window, keys, empty)
        return None, ((mixed / total[..., None]).astype(v.dtype), top + jnp.log(total))

    return jax.lax.scan(queries, None, jnp.arange(q.shape[0]))[1]


def blocked_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    at: Blocks,
    out: jax.Array,
    log_sums: jax.Array,
    d_out: jax.Array,
    of_row: int,
    window: int | None,
    scores: Scores,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, in their type, and of keys and values, in the float32 that they are summed in."""

    def queries(d_keys: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        d_mixed = d_out[i]
        shared = (d_mixed.astype(jnp.float32) * out[i]).sum(-1, keepdims=True)

        def keys(j: jax.Array, carry: Any) -> Any:
            d_q, d_k, d_v = carry
            score = _scores(q, k, at, window, scores, i, j)
            weights = jnp.exp(score - log_sums[i][..., None])
            d_weights = jnp.einsum("bgrqv,bgsv->bgrqs", d_mixed, v[j], preferred_element_type=jnp.float32)
            d_score = weights * (d_weights - shared) * scores.scale
            if scores.cap is not None:  # of tanh; where a pair is masked its weight is 0
                d_score *= jnp.where(score > HIDDEN, 1 - jnp.square(score / scores.cap), 0)
            d_scores = d_score.astype(q.dtype)
            d_q += jnp.einsum("bgrqs,bgsk->bgrqk", d_scores, k[j], preferred_element_type=jnp.float32)
            of_k = jnp.einsum("bgrqs,bgrqk->bgsk", d_scores, q[i], preferred_element_type=jnp.float32)
            of_v = jnp.einsum("bgrqs,bgrqv->bgsv", weights.astype(v.dtype), d_mixed, preferred_element_type=jnp.float32)
            return d_q, d_k.at[j].add(of_k), d_v.at[j].add(of_v)

        start = (jnp.zeros(q.shape[1:]), *d_keys)
        d_q, *d_keys = over_keys(i, at, q.shape[-2], of_row, window, keys, start)
        return tuple(d_keys), d_q.astype(q.dtype)

    (d_k, d_v), d_q = jax.lax.scan(queries, (jnp.zeros(k.shape), jnp.zeros(v.shape)), jnp.arange(q.shape[0]))
    return d_q, d_k, d_v


def _blocked_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, at: Blocks, window: int | None, scores: Scores
) -> tuple[jax.Array, Any]:
    out, log_sums = checkpoint_name(blocked_forward(q, k, v, at, k.shape[0], window, scores), RESIDUALS)
    return out, (q, k, v, at, out, log_sums)


def _blocked_backward(window: int | None, scores: Scores, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, at, out, log_sums = kept
    d_q, d_k, d_v = blocked_backward(q, k, v, at, out, log_sums, d_out, k.shape[0], window, scores)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _scores(q: jax.Array, k: jax.Array, at: Blocks, window: int | None, scores: Scores, i: Any, j: Any) -> jax.Array:
    """float32 [B, G, R, C, C]: of queries of block i and keys of block j, `HIDDEN` if masked."""
    size = q.shape[-2]
    score = jnp.einsum("bgrqk,bgsk->bgrqs", q[i], k[j], preferred_element_type=jnp.float32) * scores.scale
    score = soft_cap(score, scores.cap)
    (q_segments, q_positions), (k_segments, k_positions) = at.q_labels, at.k_labels
    if q_positions is None or k_positions is None:
        back = (at.number[i] - j) * size + jnp.arange(size)[:, None] - jnp.arange(size)
    else:
        back = q_positions[i][:, None, None, :, None] - k_positions[j][:, None, None, None, :]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    if q_segments is not None and k_segments is not None:
        seen = seen & (q_segments[i][:, None, None, :, None] == k_segments[j][:, None, None, None, :])
    return jnp.where(seen, score, HIDDEN)


def splash_block(length: int) -> int:
    """The largest block of splash attention, at most `BLOCK`, for a multiple of `LANES` tokens."""
    return next(size for size in (BLOCK, BLOCK // 2, LANES) if length % size == 0)


def splash_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxV: jax.Array,
    segments_BxL: jax.Array | None,
    window: int | None,
    scores: Scores,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`blocked_attention` by splash attention: jax's kernel for TPUs, each device on its own rows and heads.

    `interpret` runs the kernel's program on any device, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length = q_BxLxHxK.shape[1]
    short = -length % LANES
    size = splash_block(length + short)
    whole = (length + short, length + short)
    mask = splash.CausalMask(whole) if window is None else splash.LocalMask(whole, (window - 1, 0), 0)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        """Attention for this device's rows and heads. Padding comes after the real tokens, so causality masks it."""
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=scores.cap,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )

        def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
            q, k, v = (jnp.pad(x, [(0, short), (0, 0), (0, 0)]).swapaxes(0, 1) for x in (q * scores.scale, k, v))
            ids = None if segments is None else jnp.pad(segments, (0, short))
            mixed: Any = kernel(q, k, v, None if ids is None else splash.SegmentIds(ids, ids))
            return mixed.swapaxes(0, 1)[:length]

        return jax.vmap(row, in_axes=(0, 0, 0, None if segments is None else 0))(q, k, v, segments)

    return on_own_rows(local, q_BxLxHxK, k_BxLxGxK, v_BxLxGxV, segments_BxL)


def on_own_rows(
    local: Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
) -> jax.Array:
    """A kernel, [B, L, H, V], that each device computes for its own rows, and heads where "tensor" divides them.

    XLA cannot partition it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return local(q, k, v, segments)
    rows, shared = row_axes(mesh), mesh.shape.get(TENSOR, 1)
    heads = TENSOR if shared > 1 and k.shape[2] % shared == 0 else None
    spec, of_tokens = P(rows, None, heads, None), None if segments is None else P(rows, None)
    return jax.shard_map(local, in_specs=(spec, spec, spec, of_tokens), out_specs=spec, check_vma=False)(
        q, k, v, segments
    )
