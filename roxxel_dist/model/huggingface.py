"""Conversion between our format and that of Hugging Face for LLaMA, Mistral and Mixtral, in both directions.

Pure functions: a config in both forms (`hf_config`, `model_fields`), and for each of our arrays the Hugging Face
tensors that it consists of (`tensors_of`). There a matrix is [outputs, inputs], and each projection, expert and layer
has its own tensor; here it is [inputs, *outputs], and matrices that are multiplied together are one array.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import FEW_WAVES, MANY_WAVES, THETA
from roxxel_dist.model.mlp import hidden_sizes

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2", "tanh": "tanh",
    "sigmoid": "sigmoid",
}  # fmt: skip
"""Our names of activations to theirs."""
OTHER_NAMES = {"swish": "silu"}
LLAMA_3 = {"low_freq_factor": FEW_WAVES, "high_freq_factor": MANY_WAVES}
"""The constants of all models of that rope_type, as in `layers.rotate`."""
LARGEST_EXPANSION = 64


class Tensors(NamedTuple):
    """The Hugging Face tensors of one of our arrays: for each layer and each expert, some tensors, concatenated."""

    names: tuple[str, ...]
    """With {i} for the layer and {e} for the expert."""
    pieces: tuple[tuple[int, ...], ...]
    """The shape of each tensor's part in our array; the tensor itself is [outputs, inputs], or a vector."""
    axis: int = 0
    """The axis of the pieces along which they are concatenated."""
    stack: tuple[int, ...] = ()
    """The first axes of our array: the number of layers, and of experts."""
    transposed: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our array."""
        inner = list(self.pieces[0])
        inner[self.axis] = sum(piece[self.axis] for piece in self.pieces)
        return (*self.stack, *inner)

    def named(self, *index: int) -> list[str]:
        """The tensor names for one layer and expert."""
        layer, expert = (*index, 0, 0)[:2]
        return [name.format(i=layer, e=expert) for name in self.names]


def tensors_of(config: ModelConfig) -> dict[str, Tensors]:
    """The tensors of every array of a Transformer, by the array's name. For configs that `hf_config` accepts."""
    heads, groups, size = config.heads()
    dim, hidden, vocab, experts = config.dim, hidden_sizes(config)[1], config.vocab_size or 0, config.n_experts
    layers, block = (config.num_blocks,), "model.layers.{i}."
    queries, shared = (dim, groups, heads // groups, size), (dim, groups, 1, size)
    attention, qkv = f"{block}self_attn.", ("q_proj", "k_proj", "v_proj")
    table = {
        "embedding.embedding": Tensors(("model.embed_tokens.weight",), ((vocab, dim),), transposed=False),
        "blocks.attention_norm.scale": Tensors((f"{block}input_layernorm.weight",), ((dim,),), 0, layers, False),
        "blocks.attention.qkv.kernel": Tensors(
            tuple(f"{attention}{name}.weight" for name in qkv), (queries, shared, shared), 2, layers
        ),
        "blocks.attention.out.kernel": Tensors((f"{attention}o_proj.weight",), ((heads * size, dim),), 0, layers),
        "blocks.feedforward_norm.scale": Tensors(
            (f"{block}post_attention_layernorm.weight",), ((dim,),), 0, layers, False
        ),
        "norm.scale": Tensors(("model.norm.weight",), ((dim,),), transposed=False),
    }
    first, second = ((dim, 1, hidden),) * 2, ((hidden, dim),)
    if config.use_moe:
        moe, stack = f"{block}block_sparse_moe.", (*layers, experts)
        one = f"{moe}experts.{{e}}."
        table |= {
            "blocks.feedforward.router.kernel": Tensors((f"{moe}gate.weight",), ((dim, experts),), 0, layers),
            "blocks.feedforward.gate_up": Tensors((f"{one}w1.weight", f"{one}w3.weight"), first, 1, stack),
            "blocks.feedforward.down": Tensors((f"{one}w2.weight",), second, 0, stack),
        }
    else:
        mlp = f"{block}mlp."
        names = f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"
        table |= {
            "blocks.feedforward.gate_up.kernel": Tensors(names, first, 1, layers),
            "blocks.feedforward.down.kernel": Tensors((f"{mlp}down_proj.weight",), second, 0, layers),
        }
    if not config.weight_tying:
        table["head.kernel"] = Tensors(("lm_head.weight",), ((dim, vocab),))
    return table


def their_shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of one of our arrays."""
    shapes = {}
    for index in np.ndindex(tensors.stack):
        for name, (first, *rest) in zip(tensors.named(*index), tensors.pieces, strict=True):
            shapes[name] = (math.prod(rest), first) if tensors.transposed else (first, *rest)
    return shapes


def take_out(array: np.ndarray, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of all tensors of one of our arrays."""
    cuts = np.cumsum([piece[tensors.axis] for piece in tensors.pieces])[:-1]
    for index in np.ndindex(tensors.stack):
        for name, piece in zip(tensors.named(*index), np.split(array[index], cuts, tensors.axis), strict=True):
            yield name, np.ascontiguousarray(piece.reshape(len(piece), -1).T if tensors.transposed else piece)


def put_together(
    tensors: Tensors, index: tuple[slice, ...], read: Callable[[str, tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """A part of one of our arrays.

    Args:
        tensors: the tensors of the array.
        index: the part; a slice without step for each axis.
        read: (name, slices) to that part of a tensor. It is called with slices of the inputs, and of the first axis of
            the outputs.
    """
    whole = [range(*one.indices(size)) for one, size in zip(index, tensors.shape, strict=True)]
    layers, inner = whole[: len(tensors.stack)], index[len(tensors.stack) :]
    stack = tuple(len(each) for each in layers)
    parts = [_inner(tensors, place, inner, read) for place in itertools.product(*layers)]
    return np.stack(parts).reshape(*stack, *parts[0].shape) if stack else parts[0]


def _inner(tensors: Tensors, place: tuple[int, ...], index: tuple[slice, ...], read: Any) -> np.ndarray:
    """The part for one layer and expert."""
    if not tensors.transposed:
        return read(tensors.named(*place)[0], index)
    cut = 2 if tensors.axis == 1 else 1  # the axis of outputs by which rows are read: not the axis of gate and up
    pieces = []
    for name, piece in zip(tensors.named(*place), tensors.pieces, strict=True):
        begin, end, _ = index[cut].indices(piece[cut])
        below = math.prod(piece[cut + 1 :])
        part = read(name, (slice(begin * below, end * below), index[0])).T
        pieces.append(part.reshape(len(part), *piece[1:cut], end - begin, *piece[cut + 1 :]))
    rest = [slice(None) if axis in (0, cut) else one for axis, one in enumerate(index)]
    return np.concatenate(pieces, axis=tensors.axis)[tuple(rest)]


def hf_config(config: ModelConfig, eos_id: int | None = None) -> dict[str, Any]:
    """The contents of `config.json`: LLaMA, or Mistral with a sliding window, or Mixtral with experts.

    Args:
        config: of the model, with vocab_size set.
        eos_id: the token that ends a text and stands before one.

    Raises:
        ValueError: none of the three supports it; the message names every unsupported field.
    """
    family = "mixtral" if config.use_moe else "mistral" if config.sliding_window else "llama"
    if problems := list(_unsaid(config, family)):
        raise UserError(
            f"this model is no LLaMA, Mistral or Mixtral: {'; '.join(problems)}. Use the format safetensors or msgpack"
        )
    heads, groups, size = config.heads()
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]], "model_type": family,
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": hidden_sizes(config)[1],
        "num_hidden_layers": config.num_blocks, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": size, "hidden_act": ACTIVATIONS[config.activation],
        "max_position_embeddings": config.max_context, "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.weight_tying, "initializer_range": config.init_std, "attention_dropout": 0.0,
        "bos_token_id": eos_id, "eos_token_id": eos_id, "use_cache": True,
    }  # fmt: skip
    if family == "llama":
        return values | {"attention_bias": False, "mlp_bias": False, "rope_scaling": _scaling(config)}
    values["sliding_window"] = config.window
    if family == "mixtral":
        values |= {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k_mlp}
    return values


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The Hugging Face form of `rope_scale_factor` and `rope_trained_context`."""
    scale, trained = config.rope_scale_factor, config.rope_trained_context
    if trained is not None:
        return {"rope_type": "llama3", "factor": scale, **LLAMA_3, "original_max_position_embeddings": trained}
    # transformers before 4.45 reads "type".
    return None if scale == 1 else {"rope_type": "linear", "type": "linear", "factor": scale}


def _unsaid(config: ModelConfig, family: str) -> Iterator[str]:
    """Field, value and reason of each setting that the family does not support."""
    if config.use_lora:
        merge = "`roxxel-dist export RUN --format hf --out DIR --merge_lora`"
        yield f"use_lora is True: they have no adapters, which {merge} takes into the weights"
    if config.parametrization != "standard":
        yield f"parametrization is {config.parametrization!r}: they have no scale of scores and logits"
    if config.mla:
        yield "mla is True: they have no latent attention"
    if config.no_sink:
        yield "no_sink is True: they have no gate on attention"
    if config.pos_encoding != "rotary":
        yield f"pos_encoding is {config.pos_encoding!r}: they have rotary positions alone"
    elif config.rope_scale_factor != 1 and family != "llama":
        yield (
            f"rope_scale_factor is {config.rope_scale_factor} with {'use_moe' if config.use_moe else 'sliding_window'}"
            f": transformers before 5 passes over it in a Mistral or Mixtral"
        )
    if config.norm_type != "rmsnorm":
        yield f"norm_type is {config.norm_type!r}: they have rmsnorm alone"
    if not config.use_swiglu:
        yield "use_swiglu is False: they have the gated layer alone"
    if config.use_moe and config.top_k_mlp == 1:
        yield "top_k_mlp is 1: Mixtral divides the weight of the one expert by itself, and here it is the probability"


def model_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelConfig` from the contents of a `config.json`.

    Raises:
        ValueError: another family, or settings that the Transformer does not support; the message names all of them.
    """
    family = values.get("model_type")
    if family not in ARCHITECTURES:
        raise UserError(f"model_type is {family!r}: it must be one of {', '.join(ARCHITECTURES)}")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "max_position_embeddings")  # fmt: skip
    if missing := [name for name in sizes if not _is_number(values.get(name), whole=True)]:
        raise UserError(f"{', '.join(missing)} must be there, a whole number each, above 0")
    if problems := [*_no_numbers(values), *_no_objects(values)]:
        raise UserError("; ".join(problems))
    dim, heads = values["hidden_size"], values["num_attention_heads"]
    size = values.get("head_dim") or dim // heads
    activation = OTHER_NAMES.get(values.get("hidden_act", "silu"), values.get("hidden_act", "silu"))
    rope, problems = _rope(values, 1e6 if family == "mixtral" else THETA)
    if activation not in ACTIVATIONS.values():
        problems.append(f"hidden_act is {activation!r}: it must be one of {', '.join(ACTIVATIONS.values())}")
    problems += [f"{name} is True: it must be False" for name in ("attention_bias", "mlp_bias") if values.get(name)]
    if family == "mixtral" and values.get("num_experts_per_tok", 2) == 1:
        problems.append("num_experts_per_tok is 1: the one expert's weight is 1 there, and its probability here")
    if problems:
        raise UserError("; ".join(problems))
    fields = {
        "dim": dim, "num_blocks": values["num_hidden_layers"], "vocab_size": values["vocab_size"],
        "n_heads": heads, "kv_heads": values.get("num_key_value_heads") or heads,
        "head_size": size if size * heads != dim else None,
        "max_context": values["max_position_embeddings"], **_width(dim, values["intermediate_size"]),
        "weight_tying": bool(values.get("tie_word_embeddings", False)), **rope,
        "norm_eps": values.get("rms_norm_eps") or (1e-5 if family == "mixtral" else 1e-6),
        "activation": next(ours for ours, theirs in ACTIVATIONS.items() if theirs == activation),
        "pos_encoding": "rotary", "norm_type": "rmsnorm", "use_swiglu": True, "mla": False, "no_sink": False,
        "use_moe": family == "mixtral", "sliding_window": False,
    }  # fmt: skip
    if family != "llama" and (window := values.get("sliding_window", 4096 if family == "mistral" else None)):
        fields |= {"sliding_window": True, "context_window": window}
    if family == "mixtral":
        fields |= {
            "n_experts": values.get("num_local_experts") or 8,
            "top_k_mlp": values.get("num_experts_per_tok") or 2,
        }
    return fields


def _is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether a value is a number above 0."""
    return (
        isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    )


def _no_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    """Optional values of a wrong type."""
    whole = {"num_key_value_heads", "head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok"}
    for name in (*sorted(whole), "rms_norm_eps", "rope_theta"):
        value = values.get(name)
        if value is not None and not _is_number(value, whole=name in whole):
            yield f"{name} is {value!r}: it must be {'a whole number' if name in whole else 'a number'} above 0"


def _no_objects(values: Mapping[str, Any]) -> Iterator[str]:
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(values.get(name) or {}, Mapping):
            yield f"{name} is {values[name]!r}: it must be an object of names and values, or null"
    if not isinstance(values.get("hidden_act", ""), str):
        yield f"hidden_act is {values['hidden_act']!r}: it must be one of {', '.join(ACTIVATIONS.values())}"


def _rope(values: Mapping[str, Any], usual_theta: float) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of rotary positions; transformers 5 writes them in another place than earlier versions."""
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or rope
    problems = []
    numbers = {"rope_theta": rope.get("rope_theta", values.get("rope_theta") or usual_theta)}
    if (part := rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1))) not in (1, None):
        problems.append(f"partial_rotary_factor is {part}: it must be 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        problems.append(f"rope_type is {kind!r}: it must be default, linear or llama3")
    if kind != "default":
        numbers["factor"] = scaling.get("factor")
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
    theta, scale = float(numbers["rope_theta"]), float(numbers.get("factor", 1.0))
    return {"rope_theta": theta, "rope_scale_factor": scale, "rope_trained_context": trained}, []


def _width(dim: int, hidden: int) -> dict[str, int]:
    """`expansion` if it gives the same width, otherwise `hidden_dim`."""
    for expansion in range(1, LARGEST_EXPANSION):
        config = ModelConfig(dim=dim, n_heads=1, head_size=dim, pos_encoding="none", expansion=expansion)
        if hidden_sizes(config)[1] == hidden:
            return {"expansion": expansion}
    return {"hidden_dim": hidden}
