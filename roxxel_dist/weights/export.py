"""A run's model as a folder for other programs: its weights in one of three formats, its config and its tokenizer."""

import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from roxxel_dist.checkpoint.digests import TABLE, DigestTable, FileDigest
from roxxel_dist.checkpoint.metadata import CheckpointRef
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.huggingface import hf_config, take_out, tensors_of, their_shapes
from roxxel_dist.place.directory import CONFIG, TOKENIZER
from roxxel_dist.process import interrupt
from roxxel_dist.process.durable import make_folder, sync_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.weights.files import LIMIT, NEWEST, with_state, write_tensors, write_weights
from roxxel_dist.weights.hf_folder import HF_CONFIG
from roxxel_dist.weights.load import Weights, weights_of

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export_run(
    run: str | Path,
    format: str,
    out: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    merge_lora: bool = False,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> str:
    """Write the model of a run into the folder `out`, which appears whole or not at all.

    Args:
        run: a run directory, or RUN@STEP.
        format: "msgpack": flax's format, as the run's own files of weights; "safetensors": the same names; "hf": a
            folder that transformers loads. `Transformer.from_pretrained` and `Generator` read all three.
        out: the folder to make.
        step: the checkpoint of this step; default: the newest.
        best: the checkpoint with the lowest val_loss; the newest if none was validated.
        merge_lora: for a run that trained adapters, write the plain model with the adapters merged in.
        dtype: of the parameters; default: unchanged.
        max_shard_size: largest size of a safetensors file, such as "500MB".
        overwrite: replace the folder of an earlier export. A folder with any other file is never replaced.

    Returns:
        A line that describes the written files, and one about what the tokenizer loses of texts.

    Raises:
        ValueError: there is no such model, the format cannot hold it, or the folder exists already.
    """
    out, limit = Path(out), _bytes(max_shard_size)
    _check_out(out, overwrite, CheckpointRef.parse(run).run)
    weights = weights_of(run, step=step, best=best)
    _check_out(out, overwrite, *weights.folders)
    if merge_lora and not weights.scales:
        raise UserError(f"--merge_lora: {run} has no adapters; leave it out")
    weights = weights.merged() if merge_lora else weights
    params = weights.params if dtype is None else {name: _cast(array, dtype) for name, array in weights.params.items()}
    make_folder(out.parent)
    with interrupt.temporary_folder(f".{out.name}-", out.parent) as folder:
        if format == "hf":
            _write_hf(folder, weights, params, limit)
        else:
            _write_own(folder, weights, params, format, limit)
        written = {path.name: FileDigest.of_file(path) for path in sorted(folder.iterdir())}
        DigestTable(step=weights.step, files=written).write(folder / TABLE)
        _put(folder, out)
    count, size = (sum(getattr(array, what) for array in params.values()) for what in ("size", "nbytes"))
    lost = "" if weights.tokenizer is None else Tokenizer.load(weights.tokenizer).losses
    return f"step {weights.step} of {run}: {count:,} parameters, {size / 1e6:,.1f} MB, in {out}" + (
        f"\n{lost}" if lost else ""
    )


def _check_out(out: Path, overwrite: bool, *read: Path) -> None:
    """Raises ValueError if `out` may not be replaced: it contains a folder that is read, or is not from an export."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: name a folder")
    for folder in map(Path.resolve, read):
        if out.resolve() in (folder, *folder.parents):
            raise UserError(f"--out {out} holds the run, or the base of its adapters: name another folder")
    made = _files_of_export(out)
    for path in sorted(out.iterdir(), key=lambda path: path.name in made) if out.is_dir() else []:
        if path.name not in made:
            raise UserError(f"--out {out} has {path.name} in it, which no export made: name another folder")
        if not overwrite:
            raise UserError(f"--out {out} has an export already: name another folder, or replace it with --overwrite")


def _files_of_export(out: Path) -> set[str]:
    """The names of the files that an export wrote into a folder, by its table; empty without one."""
    try:
        return {TABLE, *DigestTable.read(out / TABLE).files}
    except (OSError, ValueError):
        return set()


def _write_own(folder: Path, weights: Weights, params: dict[str, np.ndarray], format: str, limit: int) -> None:
    """Write the weights under our own names, and the files that let a folder be read as a run."""
    arrays = with_state(params, weights.state)
    sizes = {name: array.nbytes for name, array in arrays.items()}
    if format == "safetensors":
        arrays = ((name, np.asarray(array, order="C")) for name, array in arrays.items())
        write_tensors(folder, arrays, sizes, limit, weights.step)
    elif format != "msgpack":
        raise UserError(f"format is {format!r}: it must be msgpack, safetensors or hf")
    elif (size := sum(sizes.values())) >= LIMIT:
        raise UserError(
            f"the weights take {size / 1e9:.1f} GB, and a msgpack file holds less than {LIMIT / 1e9:.0f} GB: use "
            f"--format safetensors"
        )
    else:
        write_weights(folder / NEWEST, weights.step, params, weights.state)
    weights.config.save_yaml(folder / CONFIG)
    if weights.tokenizer is not None:
        Tokenizer.load(weights.tokenizer).save(folder / TOKENIZER)


def _write_hf(folder: Path, weights: Weights, params: dict[str, np.ndarray], limit: int) -> None:
    """Write the files that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read."""
    if weights.config.model is not None:
        raise UserError(f"model is {weights.config.model!r}: hf holds the built-in Transformer alone; use safetensors")
    config = weights.config.part(ModelConfig)
    tokenizer = None if weights.tokenizer is None else Tokenizer.load(weights.tokenizer)
    fields = hf_config(config, None if tokenizer is None else tokenizer.eos_id)
    layout = tensors_of(config)
    dtypes = sorted({one.dtype.name for one in params.values()})
    fields |= {"torch_dtype": dtypes[0] if len(dtypes) == 1 else "float32"}
    sizes = {}
    for name, tensors in layout.items():
        sizes |= {one: math.prod(shape) * params[name].itemsize for one, shape in their_shapes(tensors).items()}
    arrays = itertools.chain.from_iterable(take_out(params[name], tensors) for name, tensors in layout.items())
    write_tensors(folder, arrays, sizes, limit, weights.step)
    _write_json(folder / HF_CONFIG, fields)
    ends = {name: fields[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", {"do_sample": True, **ends})
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer, config.max_context)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_context: int) -> None:
    """The end-of-text token is also the token before a text, because the model was trained so."""
    if tokenizer.kind == "sentencepiece":
        raise UserError(
            "the tokenizer is a SentencePiece model, which hf has no file for here: use --format safetensors"
        )
    tokenizer.save(folder / TOKENIZER_FILE)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token,
        "bos_token": tokenizer.eos_token,
        "model_max_length": max_context, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _write_json(folder / CONFIG_FILE, about)


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Cast floating-point arrays only."""
    return array.astype(jnp.dtype(dtype)) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)\s*([KMG]?B|)", text.strip().upper())
    if not match or int(match[1]) < 1:
        raise UserError(f"max_shard_size is {text!r}: write a whole number with KB, MB or GB, such as 500MB")
    return int(match[1]) * UNITS.get(match[2], 1)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _put(folder: Path, out: Path) -> None:
    """Rename a finished folder to its final name, and remove the old folder there."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
    old = folder.with_name(f"{folder.name}.replaced")  # no name that a folder of the user may have
    if out.exists():
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(out.parent)
