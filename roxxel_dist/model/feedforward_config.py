"""The feed-forward layer: one, or a mixture of experts."""

from dataclasses import dataclass

from roxxel_dist.model.rules import check_sizes

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """What follows attention in a block."""

    expansion: int = 4
    """The feed-forward layer has the parameters of a plain one of width expansion x dim."""
    hidden_dim: int | None = None
    """Width inside the feed-forward layer, and inside each expert; from expansion where not given."""
    use_swiglu: bool = True
    """A gated feed-forward layer of three matrices instead of a plain one of two."""
    activation: str = "silu"
    """What the feed-forward layer bends with: silu, gelu, gelu_tanh (its approximation), relu, relu2 (its square), tanh
    or sigmoid."""
    use_moe: bool = False
    """A mixture of experts instead of one feed-forward layer; each expert has the size of that layer."""
    n_experts: int = 4
    """Of use_moe: experts a layer."""
    top_k_mlp: int = 2
    """Of use_moe: experts that a token goes through."""
    alpha_balance: float = 0.01
    """Of use_moe: weight of the loss that spreads tokens over experts."""

    def __post_init__(self) -> None:
        check_sizes({"expansion": self.expansion, "hidden_dim": self.hidden_dim})
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}: it must be one of {', '.join(ACTIVATIONS)}")
        if not self.use_moe:
            return
        check_sizes({"n_experts": self.n_experts, "top_k_mlp": self.top_k_mlp})
        if self.top_k_mlp > self.n_experts:
            raise ValueError(
                f"top_k_mlp is {self.top_k_mlp}: a token cannot go through more experts than n_experts, which is "
                f"{self.n_experts}"
            )
        if not 0 <= self.alpha_balance < float("inf"):
            raise ValueError(
                f"alpha_balance is {self.alpha_balance}: it must be a number of at least 0; 0 leaves the balance alone"
            )
