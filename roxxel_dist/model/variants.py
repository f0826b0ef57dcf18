"""What the built-in Transformer will be able to be: known by name, so that a file which names it can be read."""

from dataclasses import dataclass, fields

SWITCHES = (
    "use_moe",
    "sliding_window",
    "no_sink",
    "mla",
    "inference",
    "use_swiglu",
    "activation",
    "norm_type",
    "pos_encoding",
    "rope_scale_factor",
    "use_lora",
)
"""Fields that ask for something; the others say how it is, and mean nothing without."""


@dataclass(frozen=True, kw_only=True)
class VariantConfig:
    """Variants of the model. None is built yet: each default is what the Transformer is."""

    use_moe: bool = False
    """A mixture of experts instead of one feed-forward layer (not built yet)."""
    n_experts: int = 4
    """Of use_moe: experts a layer."""
    top_k_mlp: int = 2
    """Of use_moe: experts that a token goes through."""
    alpha_balance: float = 0.01
    """Of use_moe: weight of the loss that spreads tokens over experts."""
    sliding_window: bool = False
    """Attention reaches back only context_window tokens (not built yet)."""
    context_window: int = 64
    """Of sliding_window: how far it reaches."""
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
    use_swiglu: bool = True
    """A gated feed-forward layer; a plain one is not built yet."""
    activation: str = "silu"
    """What the feed-forward layer bends with; others than silu are not built yet."""
    norm_type: str = "rmsnorm"
    """What normalises before each part; others than rmsnorm are not built yet."""
    pos_encoding: str = "rotary"
    """How a token knows its place; others than rotary are not built yet."""
    rope_scale_factor: float = 1.0
    """Rotary positions divided by this, for longer contexts; others than 1 are not built yet."""
    use_lora: bool = False
    """Train small adapters and leave the weights alone (not built yet)."""
    lora_rank: int = 8
    """Of use_lora: rank of an adapter."""
    lora_alpha: float = 16.0
    """Of use_lora: an adapter counts lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Of use_lora: dropout before an adapter."""
    lora_targets: str = "attention"
    """Of use_lora: what is adapted: attention, mlp or all."""

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in SWITCHES:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ValueError(
                    f"{name} is {value!r}: not built yet; leave it out, or set it to {defaults[name]!r}, which is built"
                )
