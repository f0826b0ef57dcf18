"""ModelConfig, the shape of the built-in Transformer: positions, attention, feed-forward layers, adapters."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Literal, get_args

from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.utils.component import component


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raises ValueError for the first given field that is below 1."""
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: it must be at least 1")


def check_positive(values: Mapping[str, float | None]) -> None:
    """Raises ValueError for the first given field that is not a finite number above 0."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}: it must be above 0, and finite; leave it out for none")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError for a value that is not one of the choices."""
    if value not in choices:
        raise UserError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")


PosEncoding = Literal["rotary", "absolute", "learned", "none"]


@component
class PositionConfig:
    """The position encoding of the model."""

    pos_encoding: PosEncoding = "rotary"
    """Position encoding: rotary (RoPE) turns queries and keys, absolute adds sinusoids to the embedding, learned adds a
    trained vector for each place, none leaves the order to the causal mask."""
    rope_scale_factor: float = 1.0
    """Scaling factor of rotary positions: they are divided by it, which extends a short trained context to a longer
    one."""
    rope_theta: float = 10_000.0
    """Base of rotary positions: the longest wavelength is about this times 2 pi tokens; larger for a longer context."""
    rope_trained_context: int | None = None
    """Context length before rope_scale_factor was applied (original_max_position_embeddings). Only longer wavelengths
    are scaled, as in LLaMA 3.1. Default: all wavelengths are scaled."""
    rope_local_theta: float | None = None
    """Base of rotary positions in the local layers of sliding_window_pattern (rope_local_base_freq), whose positions
    rope_scale_factor leaves alone. Default: as in the global layers."""
    partial_rotary_factor: float = 1.0
    """Share of the channels of a head that rotary positions turn: the first ones."""
    no_rope_layer_interval: int | None = None
    """Layers without positions (NoPE): every so many-th layer turns nothing. Default: none."""

    def __post_init__(self) -> None:
        check_choice("pos_encoding", self.pos_encoding, get_args(PosEncoding))
        if self.pos_encoding != "rotary":
            return
        if not 0 < self.rope_scale_factor < math.inf:
            raise UserError(f"rope_scale_factor is {self.rope_scale_factor}: it must be above 0; 1 changes nothing")
        check_sizes({"rope_trained_context": self.rope_trained_context})
        for name in ("rope_theta", "rope_local_theta"):
            if (theta := getattr(self, name)) is not None and not 1 < theta < math.inf:
                raise UserError(f"{name} is {theta}: it must be above 1; 10000 is usual")
        if not 0 < self.partial_rotary_factor <= 1:
            raise UserError(
                f"partial_rotary_factor is {self.partial_rotary_factor}: it must be above 0 and at most 1, which is all"
            )
        if self.no_rope_layer_interval is not None and self.no_rope_layer_interval < 2:
            raise UserError(
                f"no_rope_layer_interval is {self.no_rope_layer_interval}: it must be at least 2; for no rotary "
                f"positions at all set pos_encoding to none"
            )


AttentionKernel = Literal["auto", "xla", "cudnn", "splash"]
QKNorm = Literal["none", "head", "projection"]


@component
class AttentionConfig:
    """The attention of every block."""

    n_heads: int | None = None
    """Number of query heads. Default: derived from dim and kv_heads."""
    head_size: int | None = None
    """Width of a head. Default: dim / n_heads."""
    kv_heads: int | None = None
    """Number of key and value heads, shared by groups of query heads (GQA). Default: n_heads. With mla every head has
    its own."""
    sliding_window: bool = False
    """Sliding-window attention: a token sees only the last context_window tokens."""
    context_window: int = 64
    """Size of the sliding window in tokens, the token itself included."""
    sliding_window_pattern: int | None = None
    """Local and global layers in turn: with sliding_window every so many-th layer sees all tokens, and those between
    their window. Default: all layers are local."""
    qkv_bias: bool = False
    """A bias on queries, keys and values."""
    qk_norm: QKNorm = "none"
    """Normalization of queries and keys before positions: none, of each head, or of the whole projection."""
    attn_softcap: float | None = None
    """Soft cap of attention's scores (attn_logit_softcapping): cap x tanh(score / cap). Default: none."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by the root of this number. Default: the width of a key."""
    no_sink: bool = False
    """Gated attention: a sigmoid gate on the output of attention, so that no token need be an attention sink."""
    mla: bool = False
    """Multi-head latent attention (MLA): keys and values come from one narrow vector per token, the only
    thing that a cache stores."""
    down_dim_q: int = 128
    """Width of the compressed queries of mla (q_lora_rank)."""
    down_dim_kv: int = 128
    """Width of the compressed keys and values of mla (kv_lora_rank)."""
    rope_dim: int = 32
    """Width of the rotary part of a head of mla (qk_rope_head_dim), beside its head_size; at most head_size."""
    inference: bool = False
    """Absorbed MLA: compute attention on the compressed vectors, as decoding with a cache always does. The results are
    the same."""
    attention: AttentionKernel = "auto"
    """Attention kernel. xla: computes rows of more than 1024 tokens in blocks. cudnn: NVIDIA GPUs, in bfloat16. splash:
    TPUs. auto: the kernel of the device if it supports the model, else xla. A resumed run keeps its kernel."""

    @property
    def window(self) -> int | None:
        """How many tokens a token attends to in a local layer, itself included; None for all before it."""
        return self.context_window if self.sliding_window else None

    @property
    def pattern(self) -> int | None:
        """Every so many-th layer sees all tokens; None where all layers see as many."""
        return self.sliding_window_pattern if self.sliding_window else None

    @property
    def widest_window(self) -> int | None:
        """How many tokens a token attends to in the layer where it sees most; None for all before it."""
        return None if self.pattern else self.window

    def __post_init__(self) -> None:
        given = ["n_heads", "head_size", "kv_heads"]
        given += ["context_window"] if self.sliding_window else []
        given += ["down_dim_q", "down_dim_kv"] if self.mla else []
        check_sizes({name: getattr(self, name) for name in given})
        check_choice("attention", self.attention, get_args(AttentionKernel))
        check_choice("qk_norm", self.qk_norm, get_args(QKNorm))
        check_positive({name: getattr(self, name) for name in ("attn_softcap", "query_pre_attn_scalar")})
        if self.pattern is not None and self.pattern < 2:
            raise UserError(
                f"sliding_window_pattern is {self.pattern}: it must be at least 2; where all layers see all tokens, "
                f"leave it and sliding_window out"
            )
        if self.mla:
            self._check_latent()

    def _check_latent(self) -> None:
        """Raises ValueError for what latent attention does not have."""
        if self.qk_norm != "none":
            raise UserError(f"qk_norm is {self.qk_norm!r} with mla, which has norms of its own: set it to none")
        if self.qkv_bias:
            raise UserError("qkv_bias is True with mla, whose projections have no bias: set it to False")
        if self.pattern is not None:
            raise UserError(
                f"sliding_window_pattern is {self.pattern} with mla, whose layers are all alike: leave it out"
            )


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh", "sigmoid")


@component
class FeedForwardConfig:
    """The feed-forward layer after attention in a block."""

    expansion: int = 4
    """Expansion factor: the feed-forward layer has the parameters of a plain one of width expansion x dim."""
    hidden_dim: int | None = None
    """Hidden width of the feed-forward layer and of each expert. Default: from expansion."""
    use_swiglu: bool = True
    """Gated feed-forward layer (SwiGLU), of three matrices, instead of a plain one of two."""
    activation: str = "silu"
    """Activation of the feed-forward layer: silu, gelu, gelu_tanh (its approximation), relu, relu2 (its square), tanh
    or sigmoid."""
    use_moe: bool = False
    """Mixture of experts instead of one feed-forward layer; each expert has the size of that layer."""
    n_experts: int = 4
    """Experts of a layer with use_moe."""
    top_k_mlp: int = 2
    """Experts that a token is routed to with use_moe (num_experts_per_tok)."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum, as Mixtral does, where top_k_mlp is above 1."""
    alpha_balance: float = 0.01
    """Auxiliary loss coefficient of use_moe: weight of the loss that balances the load of the experts."""
    expert_capacity_factor: float | None = None
    """Capacity factor of use_moe, while training: of each row an expert takes at most this many times its even share of
    the tokens' choices, the first ones, and drops the rest. Default: no capacity, no token is dropped."""

    def __post_init__(self) -> None:
        check_sizes({"expansion": self.expansion, "hidden_dim": self.hidden_dim})
        check_choice("activation", self.activation, ACTIVATIONS)
        if not self.use_moe:
            return
        check_sizes({"n_experts": self.n_experts, "top_k_mlp": self.top_k_mlp})
        if self.top_k_mlp > self.n_experts:
            raise UserError(
                f"top_k_mlp is {self.top_k_mlp}: a token cannot go through more experts than n_experts, which is "
                f"{self.n_experts}"
            )
        if not 0 <= self.alpha_balance < float("inf"):
            raise UserError(
                f"alpha_balance is {self.alpha_balance}: it must be a number of at least 0; 0 leaves the balance alone"
            )
        check_positive({"expert_capacity_factor": self.expert_capacity_factor})


LoraTargets = Literal["attention", "mlp", "all"]


@component
class LoraConfig:
    """The matrices with adapters, and their size."""

    use_lora: bool = False
    """Low-rank adapters (LoRA) that are trained beside the weights of init_from, which are frozen."""
    lora_rank: int = 8
    """Rank of an adapter."""
    lora_alpha: float = 16.0
    """Scale of an adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout before an adapter, while training."""
    lora_targets: LoraTargets = "attention"
    """Matrices with adapters: the projections of attention, the feed-forward layers (mlp), or all of both."""

    def __post_init__(self) -> None:
        if not self.use_lora:
            return
        check_sizes({"lora_rank": self.lora_rank})
        if not 0 < self.lora_alpha < float("inf"):
            raise UserError(f"lora_alpha is {self.lora_alpha}: it must be above 0, and finite")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora_dropout is {self.lora_dropout}: it must be at least 0 and below 1")
        check_choice("lora_targets", self.lora_targets, get_args(LoraTargets))

    def adapts(self, part: Literal["attention", "mlp"]) -> bool:
        """Whether the matrices of a part of a block get adapters."""
        return self.use_lora and self.lora_targets in (part, "all")


USUAL_HEAD_SIZE = 64
LARGEST_DIM = 1 << 20

NormType = Literal["rmsnorm", "layernorm"]
NormPosition = Literal["before", "after", "both"]
Parametrization = Literal["standard", "mup"]
GradientCheckpointing = bool | Literal["products"]


@component
class ModelConfig(LoraConfig, FeedForwardConfig, PositionConfig, AttentionConfig):  # fields: of the last first
    """A decoder-only Transformer, by default with rotary positions, SwiGLU, and RMSNorm before each part."""

    dim: int = 256
    """Width of the residual stream."""
    num_blocks: int = 4
    """Number of blocks, each attention and then a feed-forward layer."""
    vocab_size: int | None = None
    """Vocabulary size of the model. Default: that of the tokenizer."""
    max_context: int = 256
    """Context length: the longest sequence that the model reads, in tokens."""
    dropout_rate: float = 0.0
    """Dropout on the output of attention and feed-forward, while training."""
    weight_tying: bool = True
    """Use the embedding as the output matrix too."""
    norm_type: NormType = "rmsnorm"
    """Normalization before each part: rmsnorm scales; layernorm also subtracts the mean."""
    norm_position: NormPosition = "before"
    """Norms of a block: before attention and feed-forward, after each of them on what it adds (OLMo 2), or both
    (Gemma)."""
    norm_unit_offset: bool = False
    """An rmsnorm multiplies by 1 + its weight, which starts as 0 (Gemma)."""
    scale_embeddings: bool = False
    """Multiply the embedding by the root of dim (Gemma)."""
    logit_softcap: float | None = None
    """Soft cap of the logits (final_logit_softcapping): cap x tanh(logit / cap). Default: none."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices; the last matrix of attention and feed-forward starts smaller, by the
    depth. With mup: the value at base_dim."""
    parametrization: Parametrization = "standard"
    """Parametrization of the width: standard, or mup (maximal update), whose initial scales and learning rates follow
    the width so that the best lr at base_dim is the best one at any dim."""
    base_dim: int | None = None
    """Width at which mup is the standard parametrization: the dim for which lr was searched."""
    norm_eps: float = 1e-6
    """Epsilon of a norm: it is added to the mean square, or the variance, before the root is taken."""
    gradient_checkpointing: GradientCheckpointing = False
    """Gradient checkpointing (remat): the backward pass computes each block's activations again, but for attention's
    output, which takes less memory and up to a third more work. products: it keeps the products with weights too, and
    computes again what is between them: a few percent more work."""
    scan_layers: bool = False
    """Compile one block for all of them: the time to compile no longer grows with num_blocks. The same weights,
    checkpoints and numbers."""
    z_loss: float = 0.0
    """Weight of the z-loss, which is minimized too and keeps logits small: the square of the logarithm of the softmax's
    sum, a mean over tokens (PaLM); 0 for none."""
    loss_chunk: int | str = "auto"
    """Tokens of a batch, over all devices, whose logits, loss and gradient are computed at a time: with a large
    vocabulary they are most of the memory. auto: as many as have 64 MB of logits on each device (1 GiB on a GPU), on
    a GPU or TPU at least 2,048 of them. 0 for all at once."""

    def __post_init__(self) -> None:
        check_sizes({name: getattr(self, name) for name in ("dim", "num_blocks", "max_context", "vocab_size")})
        for group in (AttentionConfig, PositionConfig, FeedForwardConfig, LoraConfig):
            group.__post_init__(self)
        if self.dim > LARGEST_DIM:
            raise UserError(f"dim is {self.dim}: it must be at most {LARGEST_DIM:,}, and no model is as wide")
        check_choice("gradient_checkpointing", str(self.gradient_checkpointing), ("False", "True", "products"))
        check_choice("norm_type", self.norm_type, get_args(NormType))
        check_choice("norm_position", self.norm_position, get_args(NormPosition))
        if self.norm_unit_offset and self.norm_type != "rmsnorm":
            raise UserError(
                f"norm_unit_offset is True, and norm_type is {self.norm_type}: only rmsnorm has it; set one of the two"
            )
        check_positive({"logit_softcap": self.logit_softcap})
        if not 0 <= self.z_loss < math.inf:
            raise UserError(f"z_loss is {self.z_loss}: it must be at least 0, and finite; 1e-4 is usual, 0 is none")
        if self.scale_embeddings and self.pos_encoding == "absolute":
            raise UserError(
                "scale_embeddings is True, and pos_encoding is absolute, which scales them already: leave it out"
            )
        if not 0 < self.norm_eps < 1:
            raise UserError(f"norm_eps is {self.norm_eps}: it must be above 0 and below 1; 1e-6 is usual")
        if not 0 < self.init_std < math.inf:
            raise UserError(f"init_std is {self.init_std}: it must be above 0, and finite; 0.02 is usual")
        if self.loss_chunk != "auto" and (isinstance(self.loss_chunk, str) or self.loss_chunk < 0):
            raise UserError(
                f"loss_chunk is {self.loss_chunk}: it must be auto, a number of tokens, or 0 for all at once"
            )
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"dropout_rate is {self.dropout_rate}: it must be at least 0 and below 1")
        if self.use_moe and self.adapts("mlp") and self.lora_dropout:
            raise UserError(
                f"lora_dropout is {self.lora_dropout}: adapters of experts (use_moe, lora_targets {self.lora_targets}) "
                f"have none; set it to 0, or lora_targets to attention"
            )
        if self.mla and self.inference and self.lora_dropout and self.adapts("attention"):
            raise UserError(
                f"lora_dropout is {self.lora_dropout} with mla and inference: attention among compressed vectors takes "
                f"adapters into its matrices, and no dropout comes before those; set inference to False to train"
            )
        self._check_parametrization()
        _, _, head_size = self.heads()
        if self.pos_encoding == "rotary":
            self._check_rotary(head_size)

    def heads(self) -> tuple[int, int, int]:
        """(n_heads, kv_heads, head_size), with defaults derived. Raises ValueError where they do not fit together."""
        n_heads = self.n_heads or (self.dim // self.head_size if self.head_size else self._usual_heads())
        head_size = self.head_size or self.dim // n_heads
        if (self.n_heads is None or self.head_size is None) and n_heads * head_size != self.dim:
            raise UserError(
                f"n_heads x head_size must be dim, and {n_heads} x {head_size} is not {self.dim}: "
                f"leave n_heads and head_size out to have them derived from dim, or give both"
            )
        kv_heads = self.kv_heads or n_heads
        if n_heads % kv_heads:
            raise UserError(f"kv_heads is {kv_heads}: it must divide n_heads, which is {n_heads}")
        return n_heads, kv_heads, head_size

    @property
    def has_second_loss(self) -> bool:
        """Whether training adds something to the cross-entropy: a balance of experts, or a z-loss."""
        return self.use_moe or self.z_loss > 0

    def rotary_channels(self, head_size: int) -> int:
        """How many channels of a head rotary positions turn."""
        return int(head_size * self.partial_rotary_factor)

    @property
    def period(self) -> int:
        """After how many layers the kinds of layers come again: see `attention.layer_kinds`."""
        without = self.no_rope_layer_interval if self.pos_encoding == "rotary" else None
        return math.lcm(self.pattern or 1, without or 1)

    def at_base_width(self) -> "ModelConfig":
        """The config of this model at `base_dim`, with the standard parametrization."""
        return dataclasses.replace(self, dim=self.base_dim or self.dim, parametrization="standard", base_dim=None)

    def _check_parametrization(self) -> None:
        check_choice("parametrization", self.parametrization, get_args(Parametrization))
        if self.parametrization == "standard":
            if self.base_dim is not None:
                raise UserError(
                    f"base_dim is {self.base_dim}, and parametrization is standard, which has no base width: leave "
                    f"base_dim out, or set parametrization to mup"
                )
            return
        if self.query_pre_attn_scalar is not None:
            raise UserError(
                f"query_pre_attn_scalar is {self.query_pre_attn_scalar}, and parametrization is mup, which sets the "
                f"scale of scores: leave one of the two out"
            )
        if self.base_dim is None:
            raise UserError("parametrization is mup: set base_dim to the dim for which lr was searched")
        if self.use_lora:
            raise UserError(
                "parametrization is mup with use_lora: adapters are trained with the standard one; leave "
                "parametrization out"
            )
        try:
            self.at_base_width()
        except ValueError as error:
            raise UserError(f"base_dim is {self.base_dim}, and a model of that dim is not possible: {error}") from error

    def _check_rotary(self, head_size: int) -> None:
        if not self.mla and head_size % 2 and self.partial_rotary_factor == 1:
            raise UserError(f"head_size is {head_size}: rotary positions turn pairs, so it must be even")
        if not self.mla and (turned := self.rotary_channels(head_size)) % 2 + (turned == 0):
            raise UserError(
                f"partial_rotary_factor is {self.partial_rotary_factor}: of heads of {head_size} channels it turns "
                f"{turned}, and that must be an even number above 0"
            )
        if self.mla and (self.partial_rotary_factor != 1 or self.no_rope_layer_interval is not None):
            raise UserError(
                f"partial_rotary_factor is {self.partial_rotary_factor} and no_rope_layer_interval "
                f"{self.no_rope_layer_interval} with mla: rope_dim says what it turns, in every layer; leave them out"
            )
        if self.mla and (self.rope_dim < 2 or self.rope_dim % 2):
            raise UserError(f"rope_dim is {self.rope_dim}: rotary positions turn pairs, so it must be even, at least 2")
        if self.mla and self.rope_dim > head_size:
            raise UserError(
                f"rope_dim is {self.rope_dim}: it must be at most head_size, which is {head_size}; make it smaller, or "
                f"head_size larger"
            )

    def _usual_heads(self) -> int:
        """The number of heads, a multiple of kv_heads, with an even head size closest to 64."""
        group = self.kv_heads or 1
        fitting = [n for n in range(group, self.dim + 1, group) if self.dim % n == 0 and (self.dim // n) % 2 == 0]
        if not fitting:
            raise UserError(
                f"dim is {self.dim}: no multiple of kv_heads ({group}) cuts it into heads of an even size; "
                f"use a multiple of {2 * group}"
            )
        return min(fitting, key=lambda n: abs(self.dim // n - USUAL_HEAD_SIZE))
