"""What is taken over from a run by one that comes from it, or repeats it: its config, its data, its tokenizer."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.config import RECORD, load_yaml
from roxxel_dist.curriculum.amend import Amendment
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import find_shards, is_tokens
from roxxel_dist.data.tokenizer import TOKENIZER_NAMES, Tokenizer
from roxxel_dist.run_directory import CONFIG, DATA, TOKENIZER
from roxxel_dist.train.checkpoint.metadata import CheckpointRef
from roxxel_dist.train.hf_folder import fields_of, is_hf_folder


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


def with_base(config: Any) -> tuple[Any, str]:
    """(the config with an `init_from` if it wants adapters, a line for people if that comes from a run's config).

    Where `use_lora` was turned on in the config of a run that has no adapters, that run is meant; with the config of
    one that has some, their base.

    Raises:
        ValueError: there is no run whose weights the adapters could stand on.
    """
    if not config.use_lora or config.model is not None:
        return config, ""
    if config.of_run is not None and config.init_from == config.of_run[1]:
        run, _, adapted = config.of_run
        if adapted:
            told = (
                f"{run} has adapters itself: its base {config.init_from} is taken; adapters with init_from {run} stand "
                f"on them"
            )
            return config, told
        told = f"init_from is {run}: the config is that run's, with use_lora turned on"
        return dataclasses.replace(config, init_from=run), told
    if config.init_from is None:
        raise ValueError(
            "use_lora is True, and init_from names no run: adapters stand on weights that are trained already, so add "
            "init_from=RUN, or begin with the config of a run (RUN/config.yaml)"
        )
    return config, ""


def data_of(saved: Mapping[str, Any], run: Path | None) -> str | None:
    """Where the data of a run is: the shards in its folder `run`, made of text, or what its config remembers."""
    if run is not None and is_tokens(run / DATA):
        return str(run / DATA)
    return saved.get(RECORD, {}).get("data_path")


def tokenizer_of(init_from: str) -> Path:
    """The tokenizer of the run that a new one has its weights from.

    Raises:
        ValueError: it has none.
    """
    run = CheckpointRef.parse(init_from).run
    if is_hf_folder(run) and any((run / name).is_file() for name in TOKENIZER_NAMES):
        return run  # with what its other files call end-of-text
    if not (run / TOKENIZER).exists():
        raise ValueError(
            f"init_from is {init_from}: {run} has no {TOKENIZER}, so text cannot become the tokens that it knows; name "
            f"another run, or train on shards"
        )
    return run / TOKENIZER


def check_tokenizer(init_from: str, data: Roxxel) -> None:
    """Raises ValueError if the data was made with another tokenizer than the run that the weights come from."""
    run = CheckpointRef.parse(init_from).run
    names = TOKENIZER_NAMES if is_hf_folder(run) else (TOKENIZER,)  # a folder without one may train on shards
    path = tokenizer_of(init_from) if any((run / name).is_file() for name in names) else run / TOKENIZER
    if not path.exists() or data.tokenizer_fingerprint is None:
        return
    known = Tokenizer.load(path).fingerprint
    if data.tokenizer_fingerprint != known:
        raise ValueError(
            f"init_from is {init_from}, whose tokenizer is {known}, and the data was made with "
            f"{data.tokenizer_fingerprint}: build the data with {path}"
        )


def with_shape_of(config: Any) -> Any:
    """The config with the shape of the model of Hugging Face that `init_from` names; else as it is.

    A field that has its default is taken from there. `max_context` may be set smaller: the weights do not depend on it.

    Raises:
        ValueError: a field that is set says otherwise, or the Transformer cannot be that model.
    """
    folder = None if config.init_from is None else CheckpointRef.parse(config.init_from).run
    if folder is None or config.model is not None or not is_hf_folder(folder):
        return config
    try:
        fields, usual = fields_of(folder), type(config)()
    except ValueError as error:
        raise ValueError(f"init_from is {config.init_from}: {error}") from error
    changed = {}
    for name, theirs in fields.items():
        mine = getattr(config, name)
        if mine == getattr(usual, name):
            changed[name] = theirs
        elif mine != theirs and not (name == "max_context" and mine < theirs):
            raise ValueError(f"{name} is {mine!r}, and the model in {folder} has {theirs!r}: leave it out")
    return dataclasses.replace(config, **changed)


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
