"""The families of models of Hugging Face that the Transformer can be, and the reading of their `config.json`.

Pure functions of configs. What is written of a model, config and tensors, is `model/huggingface.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import FEW_WAVES, MANY_WAVES, THETA
from roxxel_dist.model.mlp import hidden_sizes
from roxxel_dist.process.exit_codes import UserError

ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2", "tanh": "tanh",
    "sigmoid": "sigmoid",
}  # fmt: skip
"""Our names of activations to theirs."""
OTHER_NAMES = {"swish": "silu"}
LLAMA_3 = {"low_freq_factor": FEW_WAVES, "high_freq_factor": MANY_WAVES}
"""The constants of all models of that rope_type, as in `layers.rotate`."""
LARGEST_EXPANSION = 64
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
    says: Callable[[ModelConfig], dict[str, Any]]
    """What its config has beside what every config has."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Names of its config that the Transformer takes with this value alone, which is also the default."""
    needs: tuple[str, ...] = ()
    """Names that must be there: their defaults are not those of LLaMA."""
    theta: float = THETA
    eps: float = 1e-6
    """The defaults of rope_theta and rms_norm_eps."""
    tied: bool = False
    window: int | None = None
    """The default of sliding_window."""
    fused: bool = False
    """Queries, keys and values are one tensor, and so are gate and up."""


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
    turned = [int(interval is None or (i + 1) % interval != 0) for i in range(config.num_blocks)]
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


EXPERTS = {"use_moe": True}
SCALED = "rope_scale_factor"
FAMILIES = {
    "llama": Family(
        "LLaMA", "LlamaForCausalLM", {}, frozenset({SCALED}), lambda _: _no_bias("attention_bias", "mlp_bias"),
        _no_bias("attention_bias", "mlp_bias"),
    ),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", {}, frozenset({"sliding_window"}), _window,
        _no_bias("attention_bias", "mlp_bias"), window=4096,
    ),
    "mixtral": Family(
        "Mixtral", "MixtralForCausalLM", EXPERTS, frozenset({"sliding_window"}),
        lambda config: {
            **_window(config), "num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k_mlp
        },
        _no_bias("attention_bias", "mlp_bias"), theta=1e6, eps=1e-5,
    ),
    "qwen2": Family(
        "Qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}, frozenset({"sliding_window", SCALED}), _qwen_window,
    ),
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", {"qk_norm": "head"}, frozenset({"sliding_window", SCALED}),
        lambda config: {**_qwen_window(config), "attention_bias": False}, _no_bias("attention_bias"), ("head_dim",),
    ),
    "qwen3_moe": Family(
        "Qwen3 MoE", "Qwen3MoeForCausalLM", {"qk_norm": "head"} | EXPERTS,
        frozenset({"sliding_window", "norm_topk_prob", SCALED}),
        _qwen3_moe, {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ("num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok"),
    ),
    "olmoe": Family(
        "OLMoE", "OlmoeForCausalLM", {"qk_norm": "projection"} | EXPERTS, frozenset({"norm_topk_prob", SCALED}),
        lambda config: {
            **_no_bias("attention_bias"), "clip_qkv": None, "num_experts": config.n_experts,
            "num_experts_per_tok": config.top_k_mlp, "norm_topk_prob": config.top_k_mlp > 1 and config.norm_topk_prob,
        },
        {"attention_bias": False, "clip_qkv": None}, ("num_experts", "num_experts_per_tok"), eps=1e-5,
    ),
    "olmo2": Family(
        "OLMo 2", "Olmo2ForCausalLM", {"qk_norm": "projection", "norm_position": "after"}, frozenset({SCALED}),
        lambda _: _no_bias("attention_bias"), _no_bias("attention_bias"), eps=1e-5,
    ),
    "gemma2": Family(
        "Gemma 2", "Gemma2ForCausalLM",
        {
            "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True, "sliding_window": True,
            "sliding_window_pattern": 2,
        },
        frozenset({"attn_softcap", "logit_softcap", "query_pre_attn_scalar", SCALED}),
        _gemma, {"attention_bias": False, "use_bidirectional_attention": None}, ("head_dim", "num_key_value_heads"),
        tied=True, window=4096,
    ),
    "gemma3_text": Family(
        "Gemma 3", "Gemma3ForCausalLM",
        {"qk_norm": "head", "norm_position": "both", "norm_unit_offset": True, "scale_embeddings": True},
        frozenset({
            "logit_softcap", "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "rope_local_theta",
            SCALED,
        }),
        _gemma3, {"attention_bias": False, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
        ("head_dim", "num_key_value_heads"), theta=1e6, tied=True, window=4096,
    ),
    "smollm3": Family(
        "SmolLM3", "SmolLM3ForCausalLM", {}, frozenset({"no_rope_layer_interval", SCALED}), _smollm3,
        _no_bias("attention_bias", "mlp_bias", "use_sliding_window"), ("num_key_value_heads",), theta=2e6, tied=True,
    ),
    "phi3": Family(
        "Phi-3", "Phi3ForCausalLM", {}, frozenset({"partial_rotary_factor", "sliding_window"}), _phi3, eps=1e-5,
        fused=True,
    ),
}  # fmt: skip
"""By their `model_type`."""


def family_of(config: ModelConfig) -> str:
    """The `model_type` that a config is exported as: the family that has most of its features."""
    marks = {
        "olmoe": config.use_moe and config.qk_norm == "projection" and config.norm_position == "before",
        "gemma": config.norm_unit_offset or config.norm_position == "both" or config.scale_embeddings,
        "olmo2": config.norm_position == "after" or config.qk_norm == "projection",
        "qwen3": config.qk_norm == "head",
        "qwen2": config.qkv_bias,
        "smollm3": config.no_rope_layer_interval is not None,
        "phi3": config.partial_rotary_factor != 1,
        "mixtral": config.use_moe,
        "mistral": config.sliding_window,
    }
    family = next((name for name, has in marks.items() if has), "llama")
    if family == "gemma":
        return "gemma2" if config.qk_norm == "none" else "gemma3_text"
    return "qwen3_moe" if family == "qwen3" and config.use_moe else family


def layer_types(layers: int, sliding: bool, pattern: int | None) -> list[str]:
    """For each layer, whether it is a local or a global one, in words of transformers."""
    return [
        SLIDING if sliding and (pattern is None or (i + 1) % pattern) else FULL for i in range(layers)
    ]  # fmt: skip


def model_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelConfig` from the contents of a `config.json`.

    Raises:
        ValueError: another family, or settings that the Transformer does not support; the message names all of them.
    """
    name = values.get("model_type")
    if name not in FAMILIES:
        raise UserError(f"model_type is {name!r}: it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "max_position_embeddings", *family.needs)  # fmt: skip
    if missing := [one for one in sizes if not _is_number(values.get(one), whole=True)]:
        raise UserError(f"{', '.join(missing)} must be there, a whole number each, above 0")
    if problems := [*_no_numbers(values), *_no_objects(values)]:
        raise UserError("; ".join(problems))
    dim, heads, layers = values["hidden_size"], values["num_attention_heads"], values["num_hidden_layers"]
    size = values.get("head_dim") or dim // heads
    gemma = name.startswith("gemma")
    act, usual = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    activation = values.get(act) or usual
    activation = OTHER_NAMES.get(activation, activation)
    rope, problems = _rope(values, family.theta)
    if activation not in ACTIVATIONS.values():
        problems.append(f"{act} is {activation!r}: it must be one of {', '.join(ACTIVATIONS.values())}")
    for one, wanted in family.must_be.items():
        if (value := values.get(one)) is not None and value != wanted:
            problems.append(f"{one} is {value}: it must be {wanted}")
    fields = {
        "dim": dim, "num_blocks": layers, "vocab_size": values["vocab_size"],
        "n_heads": heads, "kv_heads": values.get("num_key_value_heads") or heads,
        "head_size": size if size * heads != dim else None,
        "max_context": values["max_position_embeddings"],
        **_width(dim, values.get("moe_intermediate_size") if name == "qwen3_moe" else values["intermediate_size"]),
        "weight_tying": bool(values.get("tie_word_embeddings", family.tied)),
        "norm_eps": values.get("rms_norm_eps") or family.eps,
        "activation": next((ours for ours, theirs in ACTIVATIONS.items() if theirs == activation), None),
        "pos_encoding": "rotary", "norm_type": "rmsnorm", "use_swiglu": True, "mla": False, "no_sink": False,
    }  # fmt: skip
    fields |= FEATURES_OFF | dict(family.is_so) | rope
    windows, more = _windows(values, name, family, layers)
    fields |= windows
    problems += more
    if fields["use_moe"]:
        experts, more = _experts(values, name)
        fields |= experts
        problems += more
    if gemma:
        fields |= _of_gemma(values, name, size)
    if name == "smollm3":
        interval, more = _no_rope(values, layers)
        fields["no_rope_layer_interval"] = interval
        problems += more
    if fields["rope_local_theta"] is not None and fields["sliding_window_pattern"] is None:
        problems += _one_kind(fields)
    if problems:
        raise UserError("; ".join(problems))
    return fields


def _windows(values: Mapping[str, Any], name: str, family: Family, layers: int) -> tuple[dict[str, Any], Sequence[str]]:
    """(fields, errors) of local and global layers."""
    may_slide = family.is_so.get("sliding_window") or "sliding_window" in family.may_be
    window = values.get("sliding_window", family.window) if may_slide else None
    if name.startswith("qwen") and not values.get("use_sliding_window"):
        window = None
    fields = {"sliding_window": window is not None}
    if window is None:
        return fields, ["sliding_window is None: it must be a whole number above 0"] if name == "gemma2" else []
    fields["context_window"] = window
    usual = values.get("sliding_window_pattern") or (6 if name == "gemma3_text" else 2 if name == "gemma2" else None)
    if name in ("qwen2", "qwen3"):
        first = values.get("max_window_layers", 28)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    else:
        types = layer_types(layers, True, usual)
    types = values.get("layer_types") or types
    if name in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        types = layer_types(layers, True, None)
    patterns = [2] if name == "gemma2" else [usual, None, *range(2, layers + 1)] if name == "gemma3_text" else [None]
    if FULL in types and SLIDING not in types and name != "gemma2":
        return {"sliding_window": False}, []
    for pattern in patterns:
        if types == layer_types(layers, True, pattern):
            return fields | {"sliding_window_pattern": pattern if FULL in types or name == "gemma2" else None}, []
    rule = "every second" if name == "gemma2" else "every so many-th" if name == "gemma3_text" else "no"
    return fields, [f"layer_types is {types}: {rule} layer must be {FULL}, and the others {SLIDING}"]


def _experts(values: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of experts."""
    top_k, problems = values.get("num_experts_per_tok") or 2, []
    count = values.get("num_local_experts") or values.get("num_experts") or (8 if name == "mixtral" else 128)
    divides = name == "mixtral" or bool(values.get("norm_topk_prob", False))
    if top_k == 1 and divides:
        problems.append("num_experts_per_tok is 1: the one expert's weight is 1 there, and its probability here")
    return {"n_experts": count, "top_k_mlp": top_k, "norm_topk_prob": divides or top_k == 1}, problems


def _of_gemma(values: Mapping[str, Any], name: str, size: int) -> dict[str, Any]:
    scalar = float(values.get("query_pre_attn_scalar") or 256)
    fields: dict[str, Any] = {"query_pre_attn_scalar": None if scalar == size else scalar}
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if name == "gemma2" else {}
    caps = {"attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    for ours, theirs in caps.items():
        cap = values.get(theirs, usual.get(theirs))
        fields[ours] = None if cap is None else float(cap)
    return fields


def _no_rope(values: Mapping[str, Any], layers: int) -> tuple[int | None, list[str]]:
    """(no_rope_layer_interval, errors)."""
    interval = values.get("no_rope_layer_interval") or 4
    turned = values.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if all(turned):
        return None, []
    for each in range(2, layers + 1):
        if list(turned) == [int((i + 1) % each != 0) for i in range(layers)]:
            return each, []
    return None, [f"no_rope_layers is {turned}: every so many-th must be 0, and the others 1"]


def _one_kind(fields: dict[str, Any]) -> list[str]:
    """Of a model whose layers are all global or all local, the one kind of rotary positions that counts."""
    if fields["sliding_window"]:
        fields |= {"rope_theta": fields["rope_local_theta"], "rope_scale_factor": 1.0, "rope_trained_context": None}
    fields["rope_local_theta"] = None
    return []


def _is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether a value is a number above 0."""
    return (
        isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    )


WHOLE = ("head_dim", "num_experts", "num_experts_per_tok", "num_key_value_heads", "num_local_experts", "sliding_window",
         "sliding_window_pattern", "no_rope_layer_interval")  # fmt: skip
NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
           "final_logit_softcapping", "partial_rotary_factor")  # fmt: skip


def _no_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    """Optional values of a wrong type."""
    for name in (*WHOLE, *NUMBERS):
        value = values.get(name)
        if value is not None and not _is_number(value, whole=name in WHOLE):
            yield f"{name} is {value!r}: it must be {'a whole number' if name in WHOLE else 'a number'} above 0"


def _no_objects(values: Mapping[str, Any]) -> Iterator[str]:
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name) or {}, Mapping):
            yield f"{name} is {values[name]!r}: it must be an object of names and values, or null"
    for name in ("layer_types", "no_rope_layers"):
        if not isinstance(values.get(name) or [], list):
            yield f"{name} is {values[name]!r}: it must be a list with an entry for each layer, or null"
    for name in ("hidden_act", "hidden_activation"):
        if not isinstance(values.get(name) or "", str):
            yield f"{name} is {values[name]!r}: it must be one of {', '.join(ACTIVATIONS.values())}"


def _rope(values: Mapping[str, Any], usual_theta: float) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of rotary positions; transformers 5 writes them in another place than earlier versions."""
    rope, local = values.get("rope_parameters") or {}, None
    if values["model_type"] == "gemma3_text":
        of_local, rope = rope.get(SLIDING) or {}, rope.get(FULL) or {}
        local = of_local.get("rope_theta", values.get("rope_local_base_freq") or THETA)
    scaling = values.get("rope_scaling") or rope
    problems = []
    numbers = {"rope_theta": rope.get("rope_theta", values.get("rope_theta") or usual_theta)}
    part = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if values["model_type"] == "phi3":
        numbers["partial_rotary_factor"] = part
    elif part != 1:
        problems.append(f"partial_rotary_factor is {part}: it must be 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kinds = ("default",) if values["model_type"] == "phi3" else ("default", "linear", "llama3")
    if kind not in kinds:
        problems.append(
            f"rope_type is {kind!r}: it must be {', '.join(kinds[:-1])}{' or ' * (len(kinds) > 1)}{kinds[-1]}"
        )
    elif kind != "default":
        numbers["factor"] = scaling.get("factor")
    if local is not None:
        numbers["rope_local_base_freq"] = local
    problems += [
        f"{name} is {one!r}: it must be a number above 0" for name, one in numbers.items() if not _is_number(one)
    ]
    trained = scaling.get("original_max_position_embeddings") if kind == "llama3" else None
    if kind == "llama3":
        if not _is_number(trained, whole=True):
            problems.append(f"original_max_position_embeddings is {trained!r}: it must be a whole number above 0")
        problems += [
            f"{name} is {scaling.get(name)}: it must be {wanted:g}"
            for name, wanted in LLAMA_3.items()
            if scaling.get(name) != wanted
        ]
    if problems:
        return {}, problems
    return {
        "rope_theta": float(numbers["rope_theta"]), "rope_scale_factor": float(numbers.get("factor", 1.0)),
        "rope_trained_context": trained, "rope_local_theta": None if local is None else float(local),
        "partial_rotary_factor": float(part),
    }, []  # fmt: skip


def _width(dim: int, hidden: Any) -> dict[str, int]:
    """`expansion` if it gives the same width, otherwise `hidden_dim`."""
    for expansion in range(1, LARGEST_EXPANSION):
        config = ModelConfig(dim=dim, n_heads=1, head_size=dim, pos_encoding="none", expansion=expansion)
        if hidden_sizes(config)[1] == hidden:
            return {"expansion": expansion}
    return {"hidden_dim": hidden}
