"""What a run writes down about itself (config, versions, commit, sizes), and what a later command reads of that."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from roxxel_dist.config import RECORD, load_yaml
from roxxel_dist.curriculum.amend import Amendment
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import find_shards, is_tokens
from roxxel_dist.data.tokenizer import Tokenizer
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.param_count import by_part
from roxxel_dist.run_directory import CONFIG, DATA, TOKENIZER
from roxxel_dist.train.checkpoint.metadata import CheckpointRef
from roxxel_dist.train.init_from import INITIALIZED_FROM

PACKAGES = ("roxxel-dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
MB = 1e6
FREE_MODEL_FIELDS = ("dropout_rate", "lora_dropout", "gradient_checkpointing", "alpha_balance", "inference")
"""Of the model, what a resumed run may change; a rate of dropout not between 0 and above 0."""
DATA_FIELDS = ("seed", "phases", "epochs", "batch_size", "grad_accum", "val_fraction", "tokenizer_type")
"""What decides which tokens a step reads."""
WITHOUT_PHASES = ("epochs", "batch_size", "grad_accum")
"""Of that, what decides it only where no phases are given."""
STATE_FIELDS = ("optimizer", "use_bf16", "init_from")
"""What decides what a checkpoint holds, beside the model, and what the first one held."""
AMENDABLE = ("phases", *WITHOUT_PHASES)
"""Of that, what an amendment may change."""


def describe_environment() -> dict[str, Any]:
    """Versions, git commit of the working folder, processes and devices, and the thread pool that decides bits."""
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(Path.cwd()),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "platform": jax.devices()[0].platform,
        "pjrt_nproc": int(os.environ["PJRT_NPROC"]),
    }


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+changes" if files differ from it; None outside of git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def summarize(params: dict[str, jax.Array], opt_state: Any, frozen: dict[str, jax.Array]) -> dict[str, Any]:
    """Sizes of a model: parameters in all, trained and by part, memory of weights and optimizer in MB (10^6 bytes),
    dtype.

    Of arrays that are cut over devices or processes, the whole counts, once.
    """
    weights = frozen | params
    leaves = list(weights.values())
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "trainable_parameters": sum(leaf.size for leaf in params.values()),
        "parameters_by_part": by_part(weights),
        "weights_mem_MB": sum(leaf.nbytes for leaf in leaves) / MB,
        "optimizer_mem_MB": sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) / MB,
        "dtype": dtypes[0] if len(dtypes) == 1 else ", ".join(dtypes),
    }


def check_resumable(saved: dict[str, Any], config: Any, *, amend: bool = False, whose: str = "") -> list[str]:
    """What a run's config says otherwise than the saved one, a line each; `whose` names that, if it is another run's.

    Raises:
        ValueError: a field changed on which the checkpoint's shapes or the order of the data depend.
    """
    # Of a model of the user's own nobody knows which values its shapes follow from: the checkpoint knows the shapes.
    shape = {"vocab_size"} if config.model else {f.name for f in fields(ModelConfig)} - set(FREE_MODEL_FIELDS)
    fixed = {"model"} | shape
    fixed |= {*STATE_FIELDS, *DATA_FIELDS} - (set() if config.phases is None else set(WITHOUT_PHASES))
    fixed -= set(AMENDABLE) if amend else set()
    if "fingerprint" in saved.get(RECORD, {}).get(INITIALIZED_FROM, {}):
        fixed.discard("init_from")  # what adapters stand on may be moved: it is known again by that
    changed, other = [], whose or "the run that shall be resumed"
    for name, value in config.to_dict().items():
        if name in saved and saved[name] != value and not (name == "vocab_size" and value is None):
            if name in fixed:
                raise ValueError(
                    f"{name} is {value}, and {other} has {saved[name]}: leave it as it was, or "
                    f"start a new run" + (" (or change it from here on with amend=True)" if name in AMENDABLE else "")
                )
            counts = name == "dropout_rate" or (name == "lora_dropout" and config.use_lora)
            if counts and config.model is None and bool(value) != bool(saved[name]):
                raise ValueError(
                    f"{name} is {value}, and {other} has {saved[name]}: its checkpoints hold random streams of dropout "
                    f"only where there is some, so use {'a rate above 0' if saved[name] else '0'}, or start a new run"
                )
            changed.append(f"{name} {saved[name]} -> {value}")
    return changed


def saved_config(run: Path) -> dict[str, Any]:
    """The config that a run keeps, its record included, `init_from` made absolute; empty where there is no run."""
    saved = load_yaml(run / CONFIG) if (run / CONFIG).exists() else {}
    init_from = saved.get("init_from")
    return {**saved, "init_from": os.path.abspath(init_from)} if isinstance(init_from, str) else saved


def changed_from(saved: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """What the saved config of a run says otherwise than the one that it is resumed with: the old values by name."""
    # A base that was moved is where it is now for older steps too.
    fields = {name: now for name, now in config.to_dict().items() if name != "init_from"}
    return {
        name: saved[name]
        for name, now in fields.items()
        # Without a vocab_size it is that of the data, which the saved config knows.
        if name in saved and saved[name] != now and not (name == "vocab_size" and now is None)
    }


def config_at(saved: Mapping[str, Any], step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, record) of the process that did a step of a run, whatever the run was resumed with since.

    Args:
        saved: the config that the run keeps, its record included.
        step: counted from 1.

    Returns:
        The fields by name, and of the record what that process has written: "bits" and "commit" are its own.
    """
    record = dict(saved.get(RECORD, {}))
    values = {name: value for name, value in saved.items() if name != RECORD}
    # In the order of time; each one cuts the log behind the step at which it begins.
    resumes = record.get("resumes", [])
    for resume in reversed(resumes):
        if resume["step"] < step:
            mine = {name: resume[name] for name in ("bits", "commit") if name in resume}
            return values, {**record, **mine}
        values |= resume.get("changed_from", {})
    return values, {**record, "commit": record.get("git_commit")}


def forked_from(fork: str | None, saved: dict[str, Any], run: Path) -> CheckpointRef | None:
    """The checkpoint that a run is forked from: the one that is named, or the one that its config remembers.

    Args:
        fork: RUN@STEP.
        saved: the config of the run in `run`, where there is one.
        run: the new run's folder.

    Raises:
        ValueError: no run is named, or the run is there already and comes from elsewhere.
    """
    recorded = saved.get(RECORD, {}).get("forked_from")
    known = CheckpointRef(Path(recorded["run"]), recorded["step"]) if recorded else None
    if fork is None:
        return known
    given = CheckpointRef.parse(fork)
    if given.run.absolute() == run.absolute():
        raise ValueError(f"fork is {given}, and run_dir is the same run: a fork needs a run_dir of its own")
    if saved and (known is None or (given.run.absolute(), given.step) != known):
        came = f"was forked from {known}" if known else "is no fork"
        raise ValueError(f"fork is {given}, and the run in {run} {came}: leave fork out, or name another run_dir")
    if not (given.run / CONFIG).exists():
        raise ValueError(f"fork is {given}: {given.run} is not a run directory, it has no {CONFIG}")
    return given


def data_of(saved: Mapping[str, Any], run: Path | None) -> str | None:
    """Where the data of a run is: the shards in its folder `run`, made of text, or what its config remembers."""
    if run is not None and is_tokens(run / DATA):
        return str(run / DATA)
    return saved.get(RECORD, {}).get("data_path")


def data_at(
    wanted: CheckpointRef, record: Mapping[str, Any], saved: Mapping[str, Any], fraction: float, named: str | None
) -> tuple[Roxxel, bool]:
    """(the primary data set of a run as it was at a step, whether it is the run's own).

    Shards that were added since are left out. The data is compared as a resume does it; other data has to be named.

    Args:
        wanted: the run and the step.
        record: of the run.
        saved: what the checkpoint of the step says beside its arrays.
        fraction: of each shard that is held out.
        named: the data that is asked for instead of what the run remembers.

    Raises:
        ValueError: there are no shards, or other ones.
    """
    path = named or data_of({RECORD: record}, wanted.run)
    if path is None or not is_tokens(path) or not find_shards(path):
        raise ValueError(
            f"data_path is {path}: there are no shards. Put the data of {wanted.run} back, or name it with "
            f"data_path=PATH; text becomes shards with `roxxel-dist data build TEXT --out DIR` and the run's tokenizer"
        )
    plan, corpus = Plan.from_state(saved["plan"]), saved["corpus"].partition("+")[0]
    data, newest = Roxxel(path), _shards(plan.amendments[-1])
    enough = len(data.shards) >= newest
    found = data.first_shards(newest).split(fraction)[0].fingerprint if enough else f"{len(data.shards)} shard(s)"
    if found == corpus:
        # A checkpoint that the run was amended at knows the plan behind it too.
        shards = _shards([one for one in plan.amendments if one.from_step < (wanted.step or 0)][-1])
        if shards > len(data.shards):
            raise ValueError(
                f"data_path is {path}: it has {len(data.shards)} shard(s), and had {shards} at step {wanted.step} of "
                f"{wanted.run}: put the others back, or name them with data_path=PATH"
            )
        return data.first_shards(shards), True
    if named is None:
        raise ValueError(
            f"data_path is {path}: it is not what {wanted.run} was trained on ({corpus}, now {found}): put that back, "
            f"or name data with data_path=PATH, this or another, to evaluate on"
        )
    _check_same_tokenizer(wanted.run, named, data)
    return data, False


def _shards(amendment: Amendment) -> int:
    return len(amendment.sources["self"].units.ranges)


def _check_same_tokenizer(run: Path, path: str, data: Roxxel) -> None:
    """Raises ValueError for data that was made with another tokenizer than the run's."""
    if not (run / TOKENIZER).exists() or data.tokenizer_fingerprint is None:
        return
    known = Tokenizer.load(run / TOKENIZER).fingerprint
    if data.tokenizer_fingerprint != known:
        raise ValueError(
            f"data_path is {path}, made with tokenizer {data.tokenizer_fingerprint}, and {run} was trained with "
            f"{known}: build the data with {run / TOKENIZER}"
        )
