"""The private parts of jax that the package needs, in one place, to be checked with each new version of jax.

Last checked: jax 0.10.2 and 0.12.0.1. None of them has a public equivalent.
"""

import inspect
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler, dispatch, distributed, xla_bridge

_unkept: deque[tuple[Any, ...]] = deque(maxlen=64)
"""The last programs that jax has compiled in this process and has not put into its cache, as `_put` takes them."""


def backends_are_initialized() -> bool:
    """Whether jax has made its devices, so that XLA has read its flags. `jax.devices()` would make them."""
    return xla_bridge.backends_are_initialized()


def key_value_store() -> Any:
    """The client of jax's coordinator: keys that all processes see, barriers with a limit; None in a process alone.

    Keys are written once. A wait that times out costs the coordinator some 34 KB that it never gives back. Orbax uses
    the same object.
    """
    return distributed.global_state.client


def assume_compute_capability(capability: tuple[int, int]) -> None:
    """Have attention by cuDNN traced for GPUs of this capability: jax asks a GPU of this process, and there is none.

    Only for a process that compiles for GPUs that are elsewhere.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    def reached(needed: str) -> bool:
        return capability >= tuple(int(part) for part in needed.split("."))

    attention.check_compute_capability = reached


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, *, scale: float, causal: bool, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Attention of one device by cuDNN, with the log-sums that its backward pass reads.

    `jax.nn.dot_product_attention` rounds log-sums to bfloat16, and has no gradient for a part of a row's keys.

    Args:
        q: bfloat16[B, L, H, K].
        k: bfloat16[B, S, G, K]; groups of H / G queries share a key.
        v: bfloat16[B, S, G, K].
        bias: bfloat16[B or 1, 1, L, S], added to scores, without a gradient; then L and S are even.
        scale: of scores.
        causal: whether the query at l sees the keys up to l alone.
        window: keys that a query sees, of a causal mask; None for all.

    Returns:
        bfloat16[B, L, H, K]; float32[B, H, L] the logarithms of the softmax sums.

    Raises:
        RuntimeError: jax has no cuDNN here.
        NotImplementedError: cuDNN does not take such arrays.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    options = _cudnn_options(q, k, v, bias, scale, causal, window)
    none = jax.numpy.zeros(0, q.dtype)
    inputs = q, k, v, none if bias is None else bias, *[none] * 6
    out, log_sums = fused._dot_product_attention_fwd_p.bind(*inputs, **options, is_training=True)
    return out, log_sums


def cudnn_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    out: jax.Array,
    log_sums: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `q`, `k` and `v` of `cudnn_attention`.

    `k` and `v` may be some of the keys that queries see: then `out` and `log_sums` are those of all of them, and the
    sums of the gradients over the parts are those of the whole.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    options = _cudnn_options(q, k, v, bias, scale, causal, window)
    none = jax.numpy.zeros(0, q.dtype)
    inputs = q, k, v, none if bias is None else bias, *[none] * 6, log_sums, out, d_out
    d_q, d_k, d_v = fused._dot_product_attention_bwd_p.bind(*inputs, **options)
    return d_q, d_k, d_v


def _cudnn_options(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, scale: float, causal: bool, window: int | None
) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    # They look at no device while they are lowered, and a program that does may have arrays of one mesh only.
    dispatch.prim_requires_devices_during_lowering -= {
        fused._dot_product_attention_fwd_p,
        fused._dot_product_attention_bwd_p,
    }
    layout = fused.AttentionLayout.BTNH.value
    fused.check_is_flash_attention(q, k, v, layout, fused.check_cudnn_version(), bias is not None, True)
    # Since jax 0.12 a function may change the scores: here none does.
    named = inspect.signature(fused._dot_product_attention_fwd_cuda_lowering).parameters
    more = {name: None for name in ("score_mod_name", "score_mod_jaxpr") if name in named}
    return more | {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (bias is not None, False),
        "mask_type": fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK, "layout": layout,
        "sliding_window_length": window,
    }  # fmt: skip


def note_unkept_programs() -> None:
    """Note from now on which programs jax compiles here and does not keep: its cache takes those of process 0 alone."""
    if distributed.global_state.process_id == 0 or compiler._cache_write is _note:
        return
    compiler._cache_write = _note


def _note(*entry: Any, **_: Any) -> None:
    if len(entry) not in (5, 6):
        return  # another jax: the program is compiled again
    key, seconds, name, backend, executable, *callbacks = entry
    if not any(callbacks) and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:  # pyright: ignore[reportAttributeAccessIssue]
        _unkept.append((key, name, executable, backend, int(seconds)))


def keep_noted_programs() -> None:
    """Put the programs that were noted into jax's cache, where it has not that of process 0.

    It has not where the folder is of this machine alone, and on CPUs, where each process has keys of its own.
    """
    while _unkept:
        key, name, executable, backend, seconds = _unkept.pop()
        with suppress(Exception):  # a full disk, say: it is compiled again then
            if not compilation_cache.is_executable_in_cache(backend, key):
                _put(key, name, executable, backend, seconds)


def _put(key: str, *entry: Any) -> None:
    """As jax does; in one piece where it can be, as processes of one machine may do so at the same time."""
    folder, limit = jax.config.jax_compilation_cache_dir, jax.config.jax_compilation_cache_max_size  # pyright: ignore[reportAttributeAccessIssue]
    if "://" in folder or limit >= 0:
        return compilation_cache.put_executable_and_time(key, *entry)
    own = f"{key}.{os.getpid()}"
    compilation_cache.put_executable_and_time(own, *entry)
    Path(folder, f"{own}-cache").replace(Path(folder, f"{key}-cache"))
