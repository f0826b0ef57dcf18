"""The feed-forward layer: one, or a mixture of experts."""

from dataclasses import dataclass

from roxxel_dist.model.rules import check_built, check_sizes


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """What follows attention in a block."""

    expansion: int = 4
    """The feed-forward layer has the parameters of a plain one of width expansion x dim."""
    use_swiglu: bool = True
    """A gated feed-forward layer; a plain one is not built yet."""
    activation: str = "silu"
    """What the feed-forward layer bends with; others than silu are not built yet."""
    use_moe: bool = False
    """A mixture of experts instead of one feed-forward layer (not built yet)."""
    n_experts: int = 4
    """Of use_moe: experts a layer."""
    top_k_mlp: int = 2
    """Of use_moe: experts that a token goes through."""
    alpha_balance: float = 0.01
    """Of use_moe: weight of the loss that spreads tokens over experts."""

    def __post_init__(self) -> None:
        check_sizes({"expansion": self.expansion})
        check_built("use_moe", self.use_moe, False)
        check_built("use_swiglu", self.use_swiglu, True)
        check_built("activation", self.activation, "silu")
