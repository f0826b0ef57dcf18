"""The kernels of attention: one table of what computes, where it can, and why not where it cannot.

Up to `LONGEST_WHOLE` tokens XLA keeps all scores of a row in memory. For longer rows it computes one block at a time,
and again in the backward pass. cuDNN (NVIDIA GPUs) and splash attention (TPU) do so in kernels of their own. Decision
11.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from roxxel_dist.cluster.determinism import is_deterministic
from roxxel_dist.devices.accelerators import accelerator
from roxxel_dist.model.attention.blocked import block_of, blocked_attention
from roxxel_dist.model.attention.mask import HIDDEN, LANES, KernelName, Mask
from roxxel_dist.model.attention.vendor_kernels import (
    LARGEST_BLOCK,
    LONGEST_BIAS,
    blocks_of,
    cudnn_attention,
    splash_attention,
)
from roxxel_dist.model.config import AttentionKernel
from roxxel_dist.model.layers import soft_cap
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.voice import argument

LONGEST_WHOLE = 1024
"""Tokens: up to here XLA computes all scores of a row at once, which is faster for short rows."""
WIDEST_PACKED = 128
"""Channels of a key that cuDNN takes with a bias in the backward pass of every GPU that it is used on."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a kernel is asked to compute, and where."""

    device: Any
    """With `platform` and `device_kind`, as `device_type` gives it."""
    key_size: int
    """Width of a key."""
    bf16: bool
    """Whether queries, keys and values are bfloat16."""
    packed: bool
    """Whether a row may have several documents."""
    capped: bool = False
    """Whether scores have a soft cap."""
    whole_rows: bool = True
    """Whether each device has whole rows, not parts of rows."""

    @property
    def widest(self) -> int:
        """The widest key that cuDNN takes on the device."""
        return 256 if compute_capability(self.device) >= (9, 0) else 128


class Rule(NamedTuple):
    """What a kernel asks for."""

    topic: str
    """Its line in the table of the page of the model; "": in none."""
    words: str
    """What stands there."""
    holds: Callable[[Situation], bool]
    reason: str
    """What a person reads where it does not hold; `{s}` is the situation."""
    fix: str


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute attention."""

    rules: tuple[Rule, ...]
    """The first that does not hold is told."""
    compute: Callable[[jax.Array, jax.Array, jax.Array, Mask], jax.Array]
    """Queries [B, L, H, K], keys [B, L, G, K], values [B, L, G, V] and a mask, by places unless it is XLA, to
    [B, L, H, V]."""
    row_tokens: Callable[[int, bool], int]
    """(tokens of a whole row, whether it may have several documents) -> tokens that are computed of it."""


def _on(name: str, platform: str, devices: str) -> tuple[Rule, Rule]:
    """The rules of a kernel that is for one kind of devices."""
    return (
        Rule(
            "Devices", devices, lambda s: s.device.platform == platform,
            f"{name} is for {platform.upper()}s, and the devices here are {{s.device.platform}}", "use auto",
        ),
        Rule(
            "", "", lambda s: s.whole_rows, f"{name} needs whole rows on each device",
            "use a batch_size that is a multiple of devices x grad_accum, or xla",
        ),
    )  # fmt: skip


CUDNN = (
    *_on("cuDNN", "gpu", "NVIDIA GPUs"),
    Rule(
        "Devices", "of compute capability 8.0 and above", lambda s: compute_capability(s.device) >= (8, 0),
        "cuDNN needs compute capability 8.0, and this is a {s.device.device_kind}", "use xla",
    ),
    Rule(
        "Number types", "bfloat16", lambda s: s.bf16,
        "cuDNN computes in bfloat16", "set bf16_compute or use_bf16, or use xla",
    ),
    Rule(
        "Width of keys", "a multiple of 8", lambda s: s.key_size % 8 == 0,
        "cuDNN needs keys of a multiple of 8 channels, and they have {s.key_size}", "use xla",
    ),
    Rule(
        "Width of keys", "up to 128 (up to 256 with compute capability 9.0 or above)", lambda s: s.key_size <= s.widest,
        "cuDNN takes keys of {s.widest} channels here, and they have {s.key_size}", "use xla",
    ),
    Rule(
        "`attn_softcap`", "no", lambda s: not s.capped,
        "cuDNN has no soft cap of scores (attn_softcap)", "use auto or xla, or leave attn_softcap out",
    ),
    Rule(
        "Packed documents", f"keys of up to {WIDEST_PACKED}", lambda s: not s.packed or s.key_size <= WIDEST_PACKED,
        f"cuDNN takes keys of {WIDEST_PACKED} channels for documents within a row, and they have {{s.key_size}}",
        "use packing contiguous, or xla",
    ),
    Rule(  # decision 11
        "Can be used with `deterministic: true`", "no", lambda s: not is_deterministic(),
        "deterministic is true, and XLA does not run cuDNN's deterministic backward pass",
        "use auto or xla, or set deterministic to false",
    ),
)  # fmt: skip


def xla_attention(q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxV: jax.Array, mask: Mask) -> jax.Array:
    """Attention by XLA: a short row at once, a long one in blocks."""
    of = dense_attention if q_BxLxHxK.shape[1] <= LONGEST_WHOLE else blocked_attention
    return of(q_BxLxHxK, k_BxLxGxK, v_BxLxGxV, mask)


KERNELS: Mapping[KernelName, Kernel] = {
    "xla": Kernel(rules=(), compute=xla_attention, row_tokens=lambda length, packed: length),
    "cudnn": Kernel(
        rules=CUDNN, compute=cudnn_attention, row_tokens=lambda length, packed: math.prod(blocks_of(length, packed))
    ),
    "splash": Kernel(
        rules=_on("splash attention", "tpu", "TPUs"),
        compute=splash_attention,
        row_tokens=lambda length, packed: -(-length // LANES) * LANES,
    ),
}


def kernel_for(kernel: AttentionKernel, situation: Situation, *, begun: bool = False) -> KernelName:
    """The kernel that computes attention: the named one, or for auto cuDNN on a GPU and splash attention on a TPU if
    they support the situation, otherwise XLA.

    Raises ValueError, with the rule and the fix, where the named kernel does not support it; `begun` says, for that
    message, whether it is the kernel that a resumed run keeps.
    """
    if kernel == "auto":
        native = native_kernel(situation.device)
        return "xla" if broken_rule(native, situation) else native
    if broken := broken_rule(kernel, situation):
        rule, fix = broken
        if begun:
            raise UserError(
                f"the run began with attention {kernel}, which a resume keeps, and {rule}: resume it where that can "
                f"run, or begin a new run at its checkpoint with {argument('fork', 'RUN@STEP')} and "
                f"{argument('attention', 'xla')}"
            )
        raise UserError(f"attention is {kernel}: {rule}: {fix}")
    return kernel


def native_kernel(device: Any) -> KernelName:
    """The kernel that a kind of device has of its own, else XLA's."""
    return "splash" if device.platform == "tpu" else "cudnn" if device.platform == "gpu" else "xla"


def broken_rule(kernel: KernelName, situation: Situation) -> tuple[str, str] | None:
    """(why a kernel does not support it, the fix); None if it does."""
    broken = (rule for rule in KERNELS[kernel].rules if not rule.holds(situation))
    return next(((rule.reason.format(s=situation), rule.fix) for rule in broken), None)


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


def score_traffic(heads: int, length: int, window: int | None) -> int:
    """Bytes that one layer's scores of a row are read and written with by XLA, forward and backward.

    For each score of a short row 64, of a row in blocks 128: by the compiler for an H200, of which those for q, k and v
    are a small part. cuDNN and splash attention keep scores in registers.
    """
    if length <= LONGEST_WHOLE:
        return 64 * heads * length**2
    seen = min(length, window or length)
    return 128 * heads * (length * seen - seen**2 // 2)


def score_bytes(
    kernel: KernelName, rows: int, heads: int, length: int, window: int | None, *, packed: bool = False
) -> int:
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


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """[B, L, H, V] from queries [B, L, H, K], keys [B, S, G, K] and values [B, S, G, V]; of each pair, in memory."""
    window, pairs = mask.window if mask.by_place else None, mask.dense()
    if mask.cap is not None:
        return _capped(q, k, v, mask.with_scale(k.shape[-1]), mask.cap, window, pairs)
    size, values, scale = k.shape[-1], v.shape[-1], mask.scale or None
    if size != values:  # jax needs values as wide as keys; zeros add nothing to a score
        scale, widest = scale or 1 / math.sqrt(size), max(size, values)
        q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, widest - x.shape[-1])]) for x in (q, k, v))
    options: Any = {"mask": pairs, "scale": scale, "is_causal": mask.by_place, "implementation": "xla"}
    options["local_window_size"] = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, **options)[..., :values]


def _capped(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, cap: float, window: int | None, pairs: jax.Array | None
) -> jax.Array:
    """Attention with a soft cap, which jax's function has not, in float32 at least."""
    (batch, length, heads, size), (_, keys, groups, _) = q.shape, k.shape
    q_BxLxGxRxK = q.reshape(batch, length, groups, heads // groups, size)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("blgrk,bsgk->bgrls", q_BxLxGxRxK, k, preferred_element_type=wide)
    score_BxGxRxLxS = soft_cap(products * mask.scale, cap)
    back = jnp.arange(length)[:, None] - jnp.arange(keys)
    seen = back >= 0 if mask.by_place else jnp.ones((length, keys), bool)
    if window is not None:
        seen &= back < window
    seen = seen if pairs is None else (seen & pairs)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, score_BxGxRxLxS, HIDDEN), axis=-1).astype(v.dtype)
    return jnp.einsum("bgrls,bsgv->blgrv", weights, v).reshape(batch, length, heads, -1)
