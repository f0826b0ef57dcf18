"""Attention: heads, how far they reach, and what they keep of the past."""

from dataclasses import dataclass

from roxxel_dist.model.rules import check_sizes


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of every block."""

    n_heads: int | None = None
    """Query heads; derived from dim and kv_heads where not given."""
    head_size: int | None = None
    """Width of a head; dim / n_heads where not given."""
    kv_heads: int | None = None
    """Key and value heads, shared by groups of query heads; as many as n_heads where not given. With mla every head
    has its own."""
    sliding_window: bool = False
    """Attention reaches back only context_window tokens."""
    context_window: int = 64
    """Of sliding_window: how many tokens one sees, itself included."""
    no_sink: bool = False
    """A sigmoid gate on the output of attention, so that no token need be attended to."""
    mla: bool = False
    """Multi-head latent attention: keys and values come from one narrow vector a token, all that a cache keeps."""
    down_dim_q: int = 128
    """Of mla: width of the compressed queries."""
    down_dim_kv: int = 128
    """Of mla: width of the compressed keys and values."""
    rope_dim: int = 32
    """Of mla with rotary positions: width of the part that carries the position, beside the head_size of each head; at
    most head_size."""
    inference: bool = False
    """Of mla: attend among the compressed vectors themselves, which decoding with a cache always does. The same
    numbers."""

    @property
    def window(self) -> int | None:
        """How many tokens one sees, itself included; None for all before it."""
        return self.context_window if self.sliding_window else None

    def __post_init__(self) -> None:
        given = ["n_heads", "head_size", "kv_heads"]
        given += ["context_window"] if self.sliding_window else []
        given += ["down_dim_q", "down_dim_kv"] if self.mla else []
        check_sizes({name: getattr(self, name) for name in given})
