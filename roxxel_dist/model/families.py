"""The families of models of Hugging Face that the Transformer can be, and what is in their `config.json`.

A family is a row of `FAMILIES`; what it alone has is a small function that the row names. Pure functions of configs.
Which tensors their weights are is `model/huggingface.py`; `weights/hf_folder.py` reads a config by the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import FEW_WAVES, MANY_WAVES, THETA
from roxxel_dist.model.mlp import hidden_sizes
from roxxel_dist.process.exit_codes import UserError

ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2", "tanh": "tanh",
    "sigmoid": "sigmoid",
}  # fmt: skip
"""Our names of activations to theirs."""
LLAMA_3 = {"low_freq_factor": FEW_WAVES, "high_freq_factor": MANY_WAVES}
"""The constants of all models of that rope_type, as in `layers.rotate`."""
FEATURES_OFF: dict[str, Any] = {
    "qkv_bias": False, "qk_norm": "none", "norm_position": "before", "norm_unit_offset": False,
    "scale_embeddings": False, "attn_softcap": None, "logit_softcap": None, "query_pre_attn_scalar": None,
    "sliding_window": False, "sliding_window_pattern": None, "rope_local_theta": None, "partial_rotary_factor": 1.0,
    "no_rope_layer_interval": None, "use_moe": False, "norm_topk_prob": True, "rope_scale_factor": 1.0,
}  # fmt: skip
"""The fields in which families differ, each with the value that turns it off."""
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """What the models of one `model_type` have."""

    title: str
    architecture: str
    is_so: Mapping[str, Any]
    """Of `FEATURES_OFF`, the fields that are otherwise in every model of the family."""
    may_be: frozenset[str]
    """Of `FEATURES_OFF`, the fields that its config has; the others are as in `FEATURES_OFF`."""
    is_nearest: Callable[[ModelConfig], Any]
    """Whether a config has what marks the family; the last row that has it is the nearest."""
    says: Callable[[ModelConfig], dict[str, Any]]
    """What its config has beside what every config has."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Names of its config that the Transformer takes with this value alone, which is also the default."""
    needs: tuple[str, ...] = ()
    """Names that must be there: their defaults are not those of LLaMA."""
    reads: Callable[[Mapping[str, Any], dict[str, Any]], list[str]] = lambda values, fields: []
    """(its config, fields) -> errors: sets the fields that it alone has."""
    refuses: Callable[[ModelConfig], str] = lambda config: ""
    """Why a model of its features is none of it, or nothing."""
    slides: Callable[[Mapping[str, Any], int], "Slides"] = lambda values, layers: Slides([SLIDING] * layers)
    """(its config, number of layers) -> which layers are local, where it has a window."""
    theta: float = THETA
    eps: float = 1e-6
    """The defaults of rope_theta and rms_norm_eps."""
    tied: bool = False
    window: int | None = None
    """The default of sliding_window."""
    window_switch: str | None = None
    """The name that must be true for that to count."""
    experts: int = 128
    """The default of their number."""
    width: str = "intermediate_size"
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Its name, and its default."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3")
    fused: bool = False
    """Queries, keys and values are one tensor, and so are gate and up."""
    expert_tensors: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """Parts of the names of tensors: of the layer of experts, and of each expert's gate, up and down."""
    pads: bool = True
    """Whether the usual token of padding may be beyond the vocabulary, so that the config must name one."""


class Slides(NamedTuple):
    """Which layers are local."""

    types: list[str]
    """Of each layer."""
    patterns: Sequence[int | None] = (None,)
    """Of `sliding_window_pattern`, those that it may be."""
    rule: str = "no"
    """Which layers are global, for a message."""


def _no_bias(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, False)


def _window(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.window}


def _qwen_window(config: ModelConfig) -> dict[str, Any]:
    first = 0 if config.sliding_window else config.num_blocks  # the layer from which on they slide
    return {"use_sliding_window": config.sliding_window, **_window(config), "max_window_layers": first}


def _qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.sliding_window, **_window(config), "attention_bias": False,
        "num_experts": config.n_experts, "num_experts_per_tok": config.top_k_mlp,
        "moe_intermediate_size": hidden_sizes(config)[1], "decoder_sparse_step": 1, "mlp_only_layers": [],
        "norm_topk_prob": config.top_k_mlp > 1 and config.norm_topk_prob,
    }  # fmt: skip


def _gemma(config: ModelConfig) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar or config.heads()[2]
    return {
        "hidden_activation": ACTIVATIONS[config.activation], "attention_bias": False, **_window(config),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "layer_types": layer_types(config.num_blocks, config.sliding_window, config.pattern),
        "attn_logit_softcapping": config.attn_softcap, "final_logit_softcapping": config.logit_softcap,
    }  # fmt: skip


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    local = (config.pattern and config.rope_local_theta) or config.rope_theta
    return _gemma(config) | {"rope_local_base_freq": local, "sliding_window_pattern": config.pattern or 1}


def _smollm3(config: ModelConfig) -> dict[str, Any]:
    interval = config.no_rope_layer_interval
    turned = _turned(config.num_blocks, interval or config.num_blocks + 1)
    return {
        **_no_bias("attention_bias", "mlp_bias", "use_sliding_window"), "no_rope_layers": turned,
        "no_rope_layer_interval": interval or config.num_blocks + 1,
        "layer_types": layer_types(config.num_blocks, False, None),
    }  # fmt: skip


def _phi3(config: ModelConfig) -> dict[str, Any]:
    return {
        **_window(config), "partial_rotary_factor": config.partial_rotary_factor,
        "original_max_position_embeddings": config.max_context,
    }  # fmt: skip


def _olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_no_bias("attention_bias"), "clip_qkv": None, "num_experts": config.n_experts,
        "num_experts_per_tok": config.top_k_mlp, "norm_topk_prob": config.top_k_mlp > 1 and config.norm_topk_prob,
    }  # fmt: skip


def _is_gemma(config: ModelConfig) -> bool:
    return config.norm_unit_offset or config.norm_position == "both" or config.scale_embeddings


def _is_olmoe(config: ModelConfig) -> bool:
    return config.use_moe and config.qk_norm == "projection" and config.norm_position == "before"


def _reads_gemma(values: Mapping[str, Any], fields: dict[str, Any], **usual: float) -> list[str]:
    size = fields["head_size"] or fields["dim"] // fields["n_heads"]
    scalar = float(values.get("query_pre_attn_scalar") or 256)
    fields["query_pre_attn_scalar"] = None if scalar == size else scalar
    caps = {"attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    for ours, theirs in caps.items():
        cap = values.get(theirs, usual.get(ours))
        fields[ours] = None if cap is None else float(cap)
    return []


def _reads_smollm3(values: Mapping[str, Any], fields: dict[str, Any]) -> list[str]:
    layers, interval = fields["num_blocks"], values.get("no_rope_layer_interval") or 4
    turned = values.get("no_rope_layers") or _turned(layers, interval)
    found = (each for each in range(2, layers + 1) if list(turned) == _turned(layers, each))
    fields["no_rope_layer_interval"] = None if all(turned) else next(found, None)
    if all(turned) or fields["no_rope_layer_interval"]:
        return []
    return [f"no_rope_layers is {turned}: every so many-th must be 0, and the others 1"]


def _turned(layers: int, interval: int) -> list[int]:
    """Marks of the layers: 1 where one has rotary positions."""
    return [int((i + 1) % interval != 0) for i in range(layers)]


def _slides_qwen(values: Mapping[str, Any], layers: int) -> Slides:
    first = values.get("max_window_layers", 28)
    return Slides(values.get("layer_types") or [SLIDING if i >= first else FULL for i in range(layers)])


def _slides_gemma2(values: Mapping[str, Any], layers: int) -> Slides:
    usual = values.get("sliding_window_pattern") or 2
    return Slides(values.get("layer_types") or layer_types(layers, True, usual), [2], "every second")


def _slides_gemma3(values: Mapping[str, Any], layers: int) -> Slides:
    usual = values.get("sliding_window_pattern") or 6
    types = values.get("layer_types") or layer_types(layers, True, usual)
    return Slides(types, [usual, None, *range(2, layers + 1)], "every so many-th")


def _refuses_mistral(config: ModelConfig) -> str:
    if config.rope_scale_factor == 1:
        return ""
    switch = "use_moe" if config.use_moe else "sliding_window"
    why = "transformers before 5 passes over it in a Mistral or Mixtral"
    return f"rope_scale_factor is {config.rope_scale_factor} with {switch}: {why}"


def _refuses_mixtral(config: ModelConfig) -> str:
    if config.top_k_mlp != 1:
        return _refuses_mistral(config)
    return "top_k_mlp is 1: Mixtral divides the weight of the one expert by itself, and here it is the probability"


def _refuses_olmoe(config: ModelConfig) -> str:
    heads, _, size = config.heads()
    return f"head_size is {config.head_size}: in OLMoE n_heads x head_size is dim" if heads * size != config.dim else ""


def _refuses_gemma3(config: ModelConfig) -> str:
    own_local = config.pattern is not None and config.rope_local_theta is not None
    if not config.sliding_window or config.rope_scale_factor == 1 or own_local:
        return ""
    rule = "Gemma 3 does not scale local layers: set sliding_window_pattern and rope_local_theta"
    return f"rope_scale_factor is {config.rope_scale_factor}: {rule}"


EXPERTS = {"use_moe": True}
SCALED = "rope_scale_factor"
GEMMA = {"norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True}
BIASES = _no_bias("attention_bias", "mlp_bias")
GELU = ("hidden_activation", "gelu_pytorch_tanh")
SWITCH = "use_sliding_window"
FAMILIES = {
    "llama": Family(
        "LLaMA", "LlamaForCausalLM", {}, frozenset({SCALED}), lambda _: True, lambda _: BIASES, BIASES, pads=False,
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", {}, frozenset({"sliding_window"}), lambda config: config.sliding_window,
        _window, BIASES, refuses=_refuses_mistral, window=4096, pads=False,
    ),
    "mixtral": Family(
        "Mixtral", "MixtralForCausalLM", EXPERTS, frozenset({"sliding_window"}), lambda config: config.use_moe,
        lambda config: {
            **_window(config), "num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k_mlp
        },
        BIASES, refuses=_refuses_mixtral, theta=1e6, eps=1e-5, experts=8,
        expert_tensors=("block_sparse_moe", "w1", "w3", "w2"), pads=False,
    ),
    "qwen2": Family(
        "Qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}, frozenset({"sliding_window", SCALED}),
        lambda config: config.qkv_bias, _qwen_window, slides=_slides_qwen, window_switch=SWITCH,
    ),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", {"qk_norm": "head"}, frozenset({"sliding_window", SCALED}),
        lambda config: config.qk_norm == "head", lambda config: {**_qwen_window(config), "attention_bias": False},
        _no_bias("attention_bias"), ("head_dim",), slides=_slides_qwen, window_switch=SWITCH,
    ),
    "qwen3_moe": Family(
        "Qwen3 MoE", "Qwen3MoeForCausalLM", {"qk_norm": "head"} | EXPERTS,
        frozenset({"sliding_window", "norm_topk_prob", SCALED}),
        lambda config: config.qk_norm == "head" and config.use_moe,
        _qwen3_moe, {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ("num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok"),
        window_switch=SWITCH, width="moe_intermediate_size",
    ),
    "olmoe": Family(
        "OLMoE", "OlmoeForCausalLM", {"qk_norm": "projection"} | EXPERTS, frozenset({"norm_topk_prob", SCALED}),
        _is_olmoe, _olmoe, {"attention_bias": False, "clip_qkv": None}, ("num_experts", "num_experts_per_tok"),
        refuses=_refuses_olmoe, eps=1e-5,
    ),
    "olmo2": Family(
        "OLMo 2", "Olmo2ForCausalLM", {"qk_norm": "projection", "norm_position": "after"}, frozenset({SCALED}),
        lambda config: (config.norm_position == "after" or config.qk_norm == "projection") and not _is_olmoe(config),
        lambda _: _no_bias("attention_bias"), _no_bias("attention_bias"), eps=1e-5,
    ),
    "gemma2": Family(
        "Gemma 2", "Gemma2ForCausalLM", GEMMA | {"sliding_window": True, "sliding_window_pattern": 2},
        frozenset({"attn_softcap", "logit_softcap", "query_pre_attn_scalar", SCALED}), _is_gemma,
        _gemma, {"attention_bias": False, "use_bidirectional_attention": None}, ("head_dim", "num_key_value_heads"),
        partial(_reads_gemma, attn_softcap=50.0, logit_softcap=30.0), slides=_slides_gemma2, tied=True, window=4096,
        activation=GELU,
    ),
    "gemma3_text": Family(
        "Gemma 3", "Gemma3ForCausalLM", GEMMA | {"qk_norm": "head"},
        frozenset({
            "logit_softcap", "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "rope_local_theta",
            SCALED,
        }),
        lambda config: _is_gemma(config) and config.qk_norm != "none",
        _gemma3, {"attention_bias": False, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
        ("head_dim", "num_key_value_heads"), _reads_gemma, _refuses_gemma3, _slides_gemma3, theta=1e6, tied=True,
        window=4096, activation=GELU,
    ),
    "smollm3": Family(
        "SmolLM3", "SmolLM3ForCausalLM", {}, frozenset({"no_rope_layer_interval", SCALED}),
        lambda config: config.no_rope_layer_interval is not None, _smollm3, {**BIASES, **_no_bias(SWITCH)},
        ("num_key_value_heads",), _reads_smollm3, theta=2e6, tied=True,
    ),
    "phi3": Family(
        "Phi-3", "Phi3ForCausalLM", {}, frozenset({"partial_rotary_factor", "sliding_window"}),
        lambda config: config.partial_rotary_factor != 1, _phi3, eps=1e-5, rope_types=("default",), fused=True,
    ),
}  # fmt: skip
"""By their `model_type`."""


def family_of(config: ModelConfig) -> str:
    """The `model_type` that a config is exported as: the family that has most of its features."""
    return next(name for name, family in reversed(FAMILIES.items()) if family.is_nearest(config))


def layer_types(layers: int, sliding: bool, pattern: int | None) -> list[str]:
    """The kind of each layer, local or global, in words of transformers."""
    return [
        SLIDING if sliding and (pattern is None or (i + 1) % pattern) else FULL for i in range(layers)
    ]  # fmt: skip


def hf_config(config: ModelConfig, eos_id: int | None = None) -> dict[str, Any]:
    """The contents of `config.json`, of the family that `family_of` names, of a config with vocab_size set; `eos_id` is
    the token that ends a text and stands before one.

    Raises ValueError, which names every unsupported field, where the family does not support it.
    """
    name = family_of(config)
    family = FAMILIES[name]
    if problems := list(_unsaid(config, family)):
        raise UserError(
            f"this model is no {family.title}, the nearest family: {'; '.join(problems)}. Use the format safetensors "
            f"or msgpack"
        )
    heads, groups, size = config.heads()
    values: dict[str, Any] = {
        "architectures": [family.architecture], "model_type": name,
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": hidden_sizes(config)[1],
        "num_hidden_layers": config.num_blocks, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": size, "hidden_act": ACTIVATIONS[config.activation],
        "max_position_embeddings": config.max_context, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.weight_tying, "initializer_range": config.init_std, "attention_dropout": 0.0,
        "bos_token_id": eos_id, "eos_token_id": eos_id, "use_cache": True,
    }  # fmt: skip
    if family.pads:
        values["pad_token_id"] = eos_id
    if SCALED in family.may_be:
        values["rope_scaling"] = _scaling(config)
    return values | family.says(config)


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The Hugging Face form of `rope_scale_factor` and `rope_trained_context`."""
    scale, trained = config.rope_scale_factor, config.rope_trained_context
    if trained is not None:
        return {"rope_type": "llama3", "factor": scale, **LLAMA_3, "original_max_position_embeddings": trained}
    # transformers before 4.45 reads "type".
    return None if scale == 1 else {"rope_type": "linear", "type": "linear", "factor": scale}


MERGE = "`roxxel-dist export RUN --format hf --out DIR --merge_lora`"
NOWHERE = (
    ("use_lora", False, f"they have no adapters, which {MERGE} takes into the weights"),
    ("parametrization", "standard", "they have no scale of scores and logits"),
    ("mla", False, "they have no latent attention"),
    ("no_sink", False, "they have no gate on attention"),
    ("pos_encoding", "rotary", "they have rotary positions alone"),
    ("norm_type", "rmsnorm", "they have rmsnorm alone"),
    ("use_swiglu", True, "they have the gated layer alone"),
)
"""Fields, the value that they have in all families, and why no other."""


def _unsaid(config: ModelConfig, family: Family) -> Iterator[str]:
    """Field, value and reason of each setting that the family does not support."""
    for own, wanted, why in NOWHERE:
        if (value := getattr(config, own)) != wanted:
            yield f"{own} is {value!r}: {why}"
    if why := family.refuses(config):
        yield why
    for own, plain in FEATURES_OFF.items():
        value, wanted = getattr(config, own), family.is_so.get(own, plain)
        said = own in family.may_be or why.startswith(f"{own} is ")
        if not said and value != wanted and not _has_no_effect(own, config):
            yield f"{own} is {value!r}: in {family.title} it is {wanted!r}"


def _has_no_effect(name: str, config: ModelConfig) -> bool:
    if name == "norm_topk_prob":
        return not config.use_moe or config.top_k_mlp == 1
    if name in ("rope_scale_factor", "rope_local_theta", "partial_rotary_factor", "no_rope_layer_interval"):
        return config.pos_encoding != "rotary"
    return name == "sliding_window_pattern" and not config.sliding_window
