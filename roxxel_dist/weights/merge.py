"""Several checkpoints of a run as one model: the weighted mean of their parameters, as a run directory that is read.

Merged weights stand in for a decay of the rate: what a constant rate has gathered between two checkpoints counts as
much as it would under a lower one (Tian et al. 2025, "WSM", arXiv 2507.17634).
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import read_verified
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, CheckpointMetadata, CheckpointRange, CheckpointRef, MetaFile
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.data.files.discovery import absolute, check_local, is_tokens
from roxxel_dist.data.tokenizer.tokenizer import Tokenizer
from roxxel_dist.place.directory import CONFIG, DATA, TOKENIZER
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process import interrupt
from roxxel_dist.process.durable import make_folder, sync_folder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, load_yaml
from roxxel_dist.weights.base import open_checkpoint
from roxxel_dist.weights.load import Weights, weights_of

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
        rest = files.read_named(store.folder / str(steps[-1]), {name for name in saved.shapes if _is_rest(name)})
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
        weights = weights.merged() if weights.scales else weights
        last[:] = [dataclasses.replace(weights, params={})]
        yield {name: np.asarray(array) for name, array in weights.params.items()}


def _is_rest(name: str) -> bool:
    return name.startswith(files.REST)


def _write(
    folder: Path, params: Mapping[str, np.ndarray], rest: Mapping[str, np.ndarray], saved: MetaFile, step: int
) -> None:
    """The checkpoint."""
    shapes = {files.PARAMS + name: [*array.shape, str(array.dtype)] for name, array in params.items()}
    shapes |= {name: shape for name, shape in saved.shapes.items() if _is_rest(name)}
    metadata = CheckpointMetadata.from_dict(saved.meta)
    metadata = dataclasses.replace(metadata, adapter_scales=None, base=None, digest="")
    state = {"params": dict(params)} | ({"rest": files.below(files.REST, rest)} if rest else {})
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        make_devices()
        device = None
    placed = jax.device_put(state, device)
    _write_checkpoint(folder / CHECKPOINTS / str(step), placed, MetaFile(shapes, metadata.to_dict(), None))


def _write_checkpoint(checkpoint: Path, state: Any, saved: MetaFile) -> None:
    """Write a whole checkpoint of arrays on this process's devices, random keys as integers, without other ranks.

    Raises OSError.
    """
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
