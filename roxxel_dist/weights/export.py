"""A run's model written anew: exported for other programs, in one of three formats, with config and tokenizer; or as
the mean of several checkpoints, in a run directory that is read.

Merged weights stand in for a decay of the rate: what a constant rate has gathered between two checkpoints counts as
much as it would under a lower one (Tian et al. 2025, "WSM", arXiv 2507.17634).
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import TABLE, DigestTable, FileDigest, read_verified
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CheckpointMetadata, CheckpointRange, CheckpointRef, MetaFile
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.data.files.discovery import absolute, check_local, is_tokens
from roxxel_dist.data.tokenizer.tokenizer import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import hf_config
from roxxel_dist.model.huggingface import take_out, tensors_of, their_shapes
from roxxel_dist.place.directory import CONFIG, DATA, TOKENIZER
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process import interrupt
from roxxel_dist.process.durable import make_folder, sync_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.weights.base import open_checkpoint
from roxxel_dist.weights.files import LIMIT, NEWEST, join_state, write_tensors, write_weights
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
    weights = weights.merge_adapters() if merge_lora else weights
    params = dict(weights.params)
    for name, array in params.items() if dtype is not None else ():
        if jnp.issubdtype(array.dtype, jnp.floating):
            params[name] = array.astype(jnp.dtype(dtype))
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
    arrays = join_state(params, weights.state)
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
        files.sync_file(path)
    sync_folder(folder)
    old = folder.with_name(f"{folder.name}.replaced")  # no name that a folder of the user may have
    if out.exists():
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(out.parent)


MERGED_FROM = "merged_from"
"""The key, in the record of a merged run, of the checkpoints that it is made of."""
MergeWeights = Literal["uniform", "1-sqrt"]


def merge_run(run: str | Path, out: str | Path, *, weights: MergeWeights = "uniform") -> str:
    """Write the mean of several checkpoints of a run into the folder `out`, which appears whole or not at all.

    It is a run directory with one checkpoint, of the last of the steps, without moments: commands that read a run read
    it, and `init_from` begins with it. Of each checkpoint the parameters are those that it is evaluated with: their
    average, where the run keeps one (`ema`), and the plain model, where it trains adapters. What a model has beside
    its parameters, such as running statistics, is that of the last checkpoint.

    The sum is in float64, one checkpoint after another by their steps, on the host, and is rounded once to the type of
    the parameters; so its bits depend on no device.

    Args:
        run: RUN@A:B, all kept checkpoints from step A to B, or RUN@A,B,C.
        out: the folder to make.
        weights: "uniform", or "1-sqrt"; see `shares_of`.

    Returns:
        A line that describes what was written.

    Raises:
        ValueError: fewer than two checkpoints, one that is not kept or damaged, or a folder that exists.
    """
    check_local("out", out)
    named, out = CheckpointRange.parse(run), Path(out)
    if named is None:
        raise UserError(f"RUN is {run}: it must name at least two checkpoints, as RUN@1000:2000 or RUN@1000,1500,2000")
    if out.exists():
        raise UserError(f"out is {out}, which is there already: name a new folder")
    with open_checkpoint("RUN", CheckpointRef(named.run, None)) as (store, _):
        steps = named.among(store.steps())
        if len(steps) < 2:
            raise UserError(
                f"RUN is {named}: it names one kept checkpoint, {steps[0]}, and a mean needs two; kept are "
                f"{', '.join(map(str, store.steps()))}"
            )
        shares = shares_of(steps, weights)
        last: list[Weights] = []
        params = mean(_params(named.run, steps, last), shares)
        saved, _ = read_verified(store.folder / str(steps[-1]), steps[-1])
        rest = files.read_named(
            store.folder / str(steps[-1]), {name for name in saved.shapes if name.startswith(files.REST)}
        )
    record = {"run": absolute(named.run), "steps": steps, "weights": weights, "shares": shares}
    make_folder(out.parent)
    with interrupt.temporary_folder(f".{out.name}-", out.parent) as folder:
        _write(folder, params, rest, saved, steps[-1])
        _describe(folder, local_run(named.run), last[0], record)
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.parent)
    size = sum(array.size for array in params.values())
    return f"steps {', '.join(map(str, steps))} of {named.run} ({weights}): {size:,} parameters, in {out}"


def shares_of(steps: Sequence[int], weights: MergeWeights) -> list[float]:
    """The share of each checkpoint in the mean, which sum to 1, for their steps, in order.

    "uniform": the same of each. "1-sqrt": that of a decay of the rate from 1 at the first step to 0 at the last, as
    1 - sqrt(t) (Hägele et al. 2024, arXiv 2405.18392). Let w_i be the mean of that curve between checkpoints i - 1 and
    i. The update between them counts w_i in the mean, if checkpoint i has the share w_i - w_(i + 1), and the first one
    1 - w_1 (Tian et al. 2025, theorem 3.1).
    """
    if weights == "uniform":
        return [1 / len(steps)] * len(steps)
    if weights != "1-sqrt":
        raise UserError(f"weights is {weights!r}: it must be uniform or 1-sqrt")
    times = [(step - steps[0]) / (steps[-1] - steps[0]) for step in steps]
    # The integral of 1 - sqrt(t) is t - 2/3 t^1.5.
    rates = [1 - (end**1.5 - begin**1.5) * 2 / 3 / (end - begin) for begin, end in pairwise(times)]
    return [one - next_one for one, next_one in pairwise([1.0, *rates, 0.0])]


def mean(models: Iterable[Mapping[str, np.ndarray]], shares: Sequence[float]) -> dict[str, np.ndarray]:
    """The weighted mean of arrays by name, summed in float64 in the order of the models; in the types of the first.

    Raises ValueError where a model has other names or shapes than the first.
    """
    total: dict[str, np.ndarray] = {}
    types: dict[str, Any] = {}
    like: dict[str, list[Any]] = {}
    for model, share in zip(models, shares, strict=True):
        if not total:
            types, like = {name: array.dtype for name, array in model.items()}, files.shapes(dict(model))
            total = {name: np.zeros(array.shape, np.float64) for name, array in model.items()}
        if wrong := files.difference(files.shapes(dict(model)), like, whole=True):
            raise UserError(f"the checkpoints are of different models ({wrong}): merge those of one model")
        for name, array in model.items():
            total[name] += share * np.asarray(array, np.float64)
    return {name: array.astype(types[name]) for name, array in total.items()}


def _params(run: Path, steps: Sequence[int], last: list[Weights]) -> Iterable[Mapping[str, np.ndarray]]:
    """The parameters of one checkpoint after another; `last` is the newest that was read, without parameters."""
    for step in steps:
        weights = weights_of(run, step=step)
        weights = weights.merge_adapters() if weights.scales else weights
        last[:] = [dataclasses.replace(weights, params={})]
        yield {name: np.asarray(array) for name, array in weights.params.items()}


def _write(
    folder: Path, params: Mapping[str, np.ndarray], rest: Mapping[str, np.ndarray], saved: MetaFile, step: int
) -> None:
    """The checkpoint."""
    shapes = {files.PARAMS + name: [*array.shape, str(array.dtype)] for name, array in params.items()}
    shapes |= {name: shape for name, shape in saved.shapes.items() if name.startswith(files.REST)}
    metadata = CheckpointMetadata.from_dict(saved.meta)
    metadata = dataclasses.replace(metadata, adapter_scales=None, base=None, digest="")
    state = {"params": dict(params)} | ({"rest": files.select_prefix(files.REST, rest)} if rest else {})
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        make_devices()
        device = None
    placed = jax.device_put(state, device)
    _write_checkpoint(folder / CHECKPOINTS / str(step), placed, MetaFile(shapes, metadata.to_dict(), None))


def _write_checkpoint(checkpoint: Path, state: Any, saved: MetaFile) -> None:
    """Write a whole checkpoint of arrays on this process's devices, random keys as integers, without other ranks.
    Raises OSError."""
    checkpoint = checkpoint.absolute()  # Orbax writes no others
    temporary = checkpoint.with_name(f"{checkpoint.name}{files.TEMPORARY}-1")
    make_folder(checkpoint.parent)
    with files.quiet_orbax(), contextlib.closing(files.array_handler()) as handler:
        begun = files.begin(handler, temporary, state)
        for written in begun.writes:
            written.result()
        files.write_part(temporary, int(checkpoint.name), files.hash_blocks(begun.blocks, 0), 0)
        files.commit(handler, temporary, checkpoint, saved.to_json(), 1)


def _describe(folder: Path, run: Path, weights: Weights, record: Mapping[str, Any]) -> None:
    """The config, with the names of the merged checkpoints, and the tokenizer."""
    before = {name: value for name, value in load_yaml(run / CONFIG)[RECORD].items() if name != "resumes"}
    if is_tokens(run / DATA):  # made of text, in the run
        before["data_path"] = absolute(run / DATA)
    weights.config.save_yaml(folder / CONFIG, {**before, MERGED_FROM: dict(record)})
    if weights.tokenizer is not None:
        Tokenizer.load(weights.tokenizer).save(folder / TOKENIZER)
