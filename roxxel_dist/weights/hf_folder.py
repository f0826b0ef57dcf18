"""A model of Hugging Face on disk: `config.json`, safetensors and a tokenizer, read without a network."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import model_fields
from roxxel_dist.model.huggingface import Tensors, put_together, tensors_of, their_shapes
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


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder is such a model, rather than a run."""
    return (folder / HF_CONFIG).is_file() and not (folder / "config.yaml").exists()


def fields_of(folder: Path) -> dict[str, Any]:
    """The fields of a `ModelConfig` that describe the model in a folder.

    Raises ValueError if the Transformer cannot be that model; the message names the file and all obstacles.
    """
    return _fields(folder / HF_CONFIG, _config_of(folder))


def end_ids(folder: Path) -> list[int]:
    """The ids that end a text: `eos_token_id` of generation_config.json or, where that has none, of config.json.

    Raises ValueError where it is neither an id of the model's vocabulary nor a list of such ids.
    """
    config = _config_of(folder)
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


def _config_of(folder: Path) -> dict[str, Any]:
    """The contents of `config.json`."""
    return _object_in(folder / HF_CONFIG)


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
    """The weights of such a model, by our names; open for reading.

    Raises ValueError where a file is missing or damaged, or the Transformer cannot be that model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        values = _config_of(folder)
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
        """All parameters whole, in memory, of the type that the embedding is stored in; float16 as float32.

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
        """The parameters, placed and of the types as `like`; each process reads the parts that it holds.

        Raises ValueError where they are of another model, or do not agree with their digests.
        """
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
