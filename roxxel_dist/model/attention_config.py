"""Attention: heads, how far they reach, and what they keep of the past."""

from dataclasses import dataclass

from roxxel_dist.model.rules import check_built, check_sizes


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of every block."""

    n_heads: int | None = None
    """Query heads; derived from dim and kv_heads where not given."""
    head_size: int | None = None
    """Width of a head; dim / n_heads where not given."""
    kv_heads: int | None = None
    """Key and value heads, shared by groups of query heads; as many as n_heads where not given."""
    sliding_window: bool = False
    """Attention reaches back only context_window tokens (not built yet)."""
    context_window: int = 64
    """Of sliding_window: how many tokens one sees, itself included."""
    no_sink: bool = False
    """A sigmoid gate on the output of attention, so that no token need be attended to (not built yet)."""
    mla: bool = False
    """Multi-head latent attention (not built yet)."""
    down_dim_q: int = 128
    """Of mla: width of the compressed queries."""
    down_dim_kv: int = 128
    """Of mla: width of the compressed keys and values."""
    rope_dim: int = 32
    """Of mla: width of the part of a head that carries the position."""
    inference: bool = False
    """Of mla: the form that reads from a cache (not built yet)."""

    def __post_init__(self) -> None:
        check_sizes({name: getattr(self, name) for name in ("n_heads", "head_size", "kv_heads")})
        for name in ("sliding_window", "no_sink", "mla", "inference"):
            check_built(name, getattr(self, name), False)
