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
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.param_count import by_part
from roxxel_dist.run_directory import CONFIG, DATA
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
