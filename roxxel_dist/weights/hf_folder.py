"""A model of Hugging Face on disk: `config.json`, safetensors and a tokenizer, read without a network."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import ACTIVATIONS, FAMILIES, FEATURES_OFF, FULL, LLAMA_3, SLIDING, Family, layer_types
from roxxel_dist.model.huggingface import Tensors, put_together, tensors_of, their_shapes
from roxxel_dist.model.layers import THETA
from roxxel_dist.model.mlp import hidden_sizes
from roxxel_dist.model.split import Leaves
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.weights.files import TensorFiles

HF_CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
THEIRS = {
    "dim": "hidden_size", "n_heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_size": "head_dim", "num_blocks": "num_hidden_layers", "hidden_dim": "intermediate_size",
    "max_context": "max_position_embeddings", "context_window": "sliding_window", "norm_eps": "rms_norm_eps",
    "n_experts": "num_local_experts", "top_k_mlp": "num_experts_per_tok", "rope_scale_factor": "factor",
    "rope_trained_context": "original_max_position_embeddings", "rope_local_theta": "rope_local_base_freq",
    "attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
"""Our names of fields to theirs, where they differ."""
NEEDLESS = (
    "rotary_emb.inv_freq", "rotary_emb.original_inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached",
    "attn.masked_bias",
)  # fmt: skip
"""Ends of the names of buffers in old files: tables of positions and masks, which the config gives."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTER = "adapter_config.json"
KINDS = ("BF16", "F16", "F32", "F64")
"""Types of numbers that safetensors calls so."""
COMPARED = 1 << 24
"""Numbers of two tensors that are compared at a time."""
OTHER_NAMES = {"swish": "silu"}
LARGEST_EXPANSION = 64


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder is such a model, rather than a run."""
    return (folder / HF_CONFIG).is_file() and not (folder / "config.yaml").exists()


def fields_of(folder: Path) -> dict[str, Any]:
    """The fields of a `ModelConfig` that describe the model in a folder. Raises ValueError if the Transformer cannot be
    that model; the message names the file and all obstacles."""
    return _fields(folder / HF_CONFIG, _object_in(folder / HF_CONFIG))


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text: `eos_token_id` of generation_config.json or, where that has none, of config.json. Raises
    ValueError where it is neither an id of the model's vocabulary nor a list of such ids."""
    config = _object_in(folder / HF_CONFIG)
    size = config.get("vocab_size")
    for name in (GENERATION_CONFIG, HF_CONFIG):
        values = config if name == HF_CONFIG else _object_in(folder / name) if (folder / name).is_file() else {}
        ids = values.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        for number in ids:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < (size or number + 1):
                raise UserError(
                    f"{folder / name}: eos_token_id has {number!r}: it must be an id below vocab_size ({size}), or a "
                    f"list of such ids"
                )
        return ids
    return []


def _object_in(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): put the right file back") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}: it must be an object of names and values")
    return values


def _fields(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    try:
        fields = model_fields(values)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    try:
        ModelConfig(**fields)
    except ValueError as error:
        theirs = [f"{ours} is {name}" for ours, name in THEIRS.items() if re.search(rf"\b{ours}\b", str(error))]
        raise UserError(f"{path}: {error}" + (f" (there, {', '.join(theirs)})" if theirs else "")) from error
    return fields


class HfFolder(TensorFiles):
    """The weights of such a model, by our names; open for reading. Raises ValueError where a file is missing or
    damaged, or the Transformer cannot be that model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        values = _object_in(folder / HF_CONFIG)
        config = ModelConfig(**_fields(folder / HF_CONFIG, values))
        self.tensors: dict[str, Tensors] = tensors_of(config, values["model_type"])
        if (folder / ADAPTER).is_file():
            raise UserError(
                f"{folder} has {ADAPTER}: its adapters are for other weights, and are not read here. Merge them (in "
                f"peft: merge_and_unload), or remove their files to use the weights without them"
            )
        self._is_tied = config.weight_tying
        super().__init__(folder)
        there = self.shapes()
        if self._is_tied and HEAD in there and EMBEDDING not in there:  # of two names for one, a file may have either
            table = self.tensors["embedding.embedding"]
            self.tensors["embedding.embedding"] = table._replace(names=(HEAD,))
        try:
            self._check_files()
        except BaseException:
            self.close()
            raise

    def params(self) -> dict[str, np.ndarray]:
        """The parameters, whole and in memory, of the type that the embedding is stored in; float16 as float32.

        Raises ValueError where one does not agree with its digest.
        """
        for name in self.digests:
            self.read(name)
        params = {name: self._part(name, (slice(None),) * len(own.shape)) for name, own in self.tensors.items()}
        # Where norms or routers are stored wider than the rest: a model computes in one type, as it does for others.
        kind = params["embedding.embedding"].dtype
        return {name: array.astype(kind, copy=False) for name, array in params.items()}

    def check_params(self, like: Mapping[str, Any]) -> None:
        """Raises ValueError where the parameters `like`, or their shapes, are of another model."""
        for name in sorted({*like, *self.tensors}):
            here = tuple(like[name].shape) if name in like else None
            there = self.tensors[name].shape if name in self.tensors else None
            if here != there:
                raise UserError(
                    f"the weights in {self._folder} are of another model ({name} is {there} in it and {here} here): "
                    f"leave out the model fields, they are taken from its {HF_CONFIG}"
                )

    def restore_params(self, like: Mapping[str, Any]) -> Leaves:
        """The parameters, placed and of the types as `like`; each process reads the parts that it holds. Raises
        ValueError where they are of another model, or do not agree with their digests."""
        self.check_params(like)
        self.check_together()
        return {
            name: jax.make_array_from_callback(
                leaf.shape, leaf.sharding,
                lambda index, name=name, leaf=leaf: self._part(name, index or ()).astype(leaf.dtype),
            )
            for name, leaf in like.items()
        }  # fmt: skip

    def _part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = put_together(self.tensors[name], index, self.read)
        return part.astype(np.float32) if part.dtype == np.float16 else part

    def _check_files(self) -> None:
        there, wanted = self.shapes(), {}
        for tensors in self.tensors.values():
            wanted |= their_shapes(tensors)
        for name, shape in wanted.items():
            if there.get(name) != shape:
                shape_there = "not there" if name not in there else f"{there[name]}"
                raise UserError(f"{self._folder}: {name} is {shape_there}, and must be {shape} by its {HF_CONFIG}")
            if (kind := self.kind_of(name)) not in KINDS:
                raise UserError(
                    f"{self._folder}: {name} is {kind}: it must be one of {', '.join(KINDS)}, so use the weights "
                    f"before they were quantized"
                )
        tied = {HEAD} if self._is_tied and HEAD in there and HEAD not in wanted else set[str]()
        extra = [name for name in sorted(there.keys() - wanted.keys() - tied) if not name.endswith(NEEDLESS)]
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            raise UserError(f"{self._folder}: there is no place for {', '.join(extra[:5])}{more} in the Transformer")
        if tied and not self._has_equal(HEAD, EMBEDDING):
            raise UserError(
                f"{self._folder}: {HEAD} differs from {EMBEDDING}, and by its {HF_CONFIG} they are one "
                f"(tie_word_embeddings): set tie_word_embeddings to false there to use both, or remove {HEAD}"
            )

    def _has_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same numbers, whatever their types."""
        shape = self.shapes()[one]
        if shape != self.shapes()[other]:
            return False
        step = max(1, COMPARED // max(1, shape[1]))
        pairs = (
            [np.asarray(self.read(name, (slice(i, min(i + step, shape[0])),)), np.float32) for name in (one, other)]
            for i in range(0, shape[0], step)
        )
        return all(np.array_equal(first, second) for first, second in pairs)


def model_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelConfig` from the contents of a `config.json`. Raises ValueError: another family, or
    settings that the Transformer does not support; the message names all of them."""
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
    act, usual = family.activation
    activation = values.get(act) or usual
    activation = OTHER_NAMES.get(activation, activation)
    rope, problems = _rope(values, family)
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
        **_width(dim, values[family.width]),
        "weight_tying": bool(values.get("tie_word_embeddings", family.tied)),
        "norm_eps": values.get("rms_norm_eps") or family.eps,
        "activation": next((ours for ours, theirs in ACTIVATIONS.items() if theirs == activation), None),
        "pos_encoding": "rotary", "norm_type": "rmsnorm", "use_swiglu": True, "mla": False, "no_sink": False,
    }  # fmt: skip
    fields |= FEATURES_OFF | dict(family.is_so) | rope
    windows, more = _windows(values, family, layers)
    fields |= windows
    problems += more
    if fields["use_moe"]:
        experts, more = _experts(values, family)
        fields |= experts
        problems += more
    problems += family.reads(values, fields)
    if fields["rope_local_theta"] is not None and fields["sliding_window_pattern"] is None:
        # All layers are global or all are local, so one kind of rotary positions counts.
        if fields["sliding_window"]:
            local = fields["rope_local_theta"]
            fields |= {"rope_theta": local, "rope_scale_factor": 1.0, "rope_trained_context": None}
        fields["rope_local_theta"] = None
    if problems:
        raise UserError("; ".join(problems))
    return fields


def _windows(values: Mapping[str, Any], family: Family, layers: int) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of local and global layers."""
    always = "sliding_window" in family.is_so
    window = values.get("sliding_window", family.window) if always or "sliding_window" in family.may_be else None
    if family.window_switch is not None and not values.get(family.window_switch):
        window = None
    fields = {"sliding_window": window is not None}
    if window is None:
        return fields, ["sliding_window is None: it must be a whole number above 0"] if always else []
    fields["context_window"] = window
    types, patterns, rule = family.slides(values, layers)
    if FULL in types and SLIDING not in types and not always:
        return {"sliding_window": False}, []
    for pattern in patterns:
        if types == layer_types(layers, True, pattern):
            return fields | {"sliding_window_pattern": pattern if FULL in types or always else None}, []
    return fields, [f"layer_types is {types}: {rule} layer must be {FULL}, and the others {SLIDING}"]


def _experts(values: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of experts."""
    top_k, problems = values.get("num_experts_per_tok") or 2, []
    count = values.get("num_local_experts") or values.get("num_experts") or family.experts
    divides = "norm_topk_prob" not in family.may_be or bool(values.get("norm_topk_prob", False))
    if top_k == 1 and divides:
        problems.append("num_experts_per_tok is 1: the one expert's weight is 1 there, and its probability here")
    return {"n_experts": count, "top_k_mlp": top_k, "norm_topk_prob": divides or top_k == 1}, problems


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


def _rope(values: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """(fields, errors) of rotary positions; transformers 5 writes them in another place than earlier versions."""
    rope, local = values.get("rope_parameters") or {}, None
    if "rope_local_theta" in family.may_be:
        of_local, rope = rope.get(SLIDING) or {}, rope.get(FULL) or {}
        local = of_local.get("rope_theta", values.get("rope_local_base_freq") or THETA)
    scaling = values.get("rope_scaling") or rope
    problems = []
    numbers = {"rope_theta": rope.get("rope_theta", values.get("rope_theta") or family.theta)}
    part = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if "partial_rotary_factor" in family.may_be:
        numbers["partial_rotary_factor"] = part
    elif part != 1:
        problems.append(f"partial_rotary_factor is {part}: it must be 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kinds = family.rope_types
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
