"""From a Config and shards to what is read when: the curriculum over the part that is trained on. No jax."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.config import RECORD, Config, load_yaml
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import NoShardsError, check_local, is_tokens
from roxxel_dist.data.place import place_of
from roxxel_dist.run_directory import CHECKPOINTS, CONFIG, DATA
from roxxel_dist.train.checkpoint.metadata import META

SHOWN = 60


def curriculum_of(config: Any, data: Roxxel) -> tuple[Curriculum, Roxxel]:
    """(phases over the training part of the data, the held-out part).

    Raises:
        ValueError: a phase breaks its rules, or reads more tokens than the model does.
    """
    max_context = config.max_context
    phases: list[Any] = config.phases or [
        Phase(epochs=config.epochs, batch_size=config.batch_size * config.grad_accum, seq_len=max_context + 1)
    ]
    curriculum = Curriculum(data, phases, blended_sets(config, data))
    curriculum, held_out = curriculum.hold_out(0 if config.validation else config.val_fraction)
    for i, phase in enumerate(curriculum.phases):
        if (phase.seq_len or 0) > max_context + 1:
            raise ValueError(
                f"phase {i + 1}: seq_len is {phase.seq_len}, and the model reads at most max_context + 1 = "
                f"{max_context + 1} tokens, target included: use a larger max_context or a smaller seq_len"
            )
    return curriculum, held_out


def absolute_paths(config: Any) -> dict[str, Any]:
    """The fields of a config that name paths, so that a run may be resumed from another folder.

    Raises:
        ValueError: one is in a bucket.
    """
    fields = {field: getattr(config, field) for field in ("datasets", "validation")}
    check_local("init_from", config.init_from)
    for field, paths in fields.items():
        for name, path in paths.items() if isinstance(paths, dict) else ():
            check_local(f"{field} {name!r}", path)
    absolute = {
        field: {name: os.path.abspath(path) if isinstance(path, str) else path for name, path in paths.items()}
        if isinstance(paths, dict)
        else paths
        for field, paths in fields.items()
    }
    init_from = config.init_from
    return {**absolute, "init_from": os.path.abspath(init_from) if isinstance(init_from, str) else init_from}


def primary_path(config: Any, data_path: str | Path | None) -> str | Path | None:
    """The path of the data set "self": `data_path`, or what `datasets` names so; None where neither does."""
    return data_path or (config.datasets or {}).get("self")


def blended_sets(config: Any, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets of the config's `datasets` by name, without "self", which is `data`.

    Raises:
        ValueError: one is no data set, or was made with another tokenizer than `data`.
    """
    others = {name: path for name, path in (config.datasets or {}).items() if name != "self"}
    return _opened("datasets", others, data)


def validation_sets(config: Any, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets of the config's `validation` by name; none where it names none.

    Raises:
        ValueError: one is no data set, or was made with another tokenizer than `data`.
    """
    return _opened("validation", config.validation or {}, data)


def check_named_sets(config: Any) -> None:
    """Raises ValueError where `datasets`, but for "self", or `validation` names what are no shards."""
    for field, paths in (("datasets", config.datasets), ("validation", config.validation)):
        for name, path in (paths or {}).items():
            if field == "validation" or name != "self":
                _check_shards(field, name, path)


def _check_shards(field: str, name: str, path: str) -> None:
    if not is_tokens(path):
        raise NoShardsError(
            f"{field} {name!r} is {path}: there are no shards. Check the path; text becomes shards with "
            f"`roxxel-dist data build {path} --out DIR`, and the tokenizer.json of the data to train on"
        )


def _opened(field: str, paths: Mapping[str, str], data: Roxxel) -> dict[str, Roxxel]:
    sets = {}
    for name, path in paths.items():
        _check_shards(field, name, path)
        sets[name] = one = Roxxel(path)
        prints = data.tokenizer_fingerprint, one.tokenizer_fingerprint
        if None not in prints and prints[0] != prints[1]:
            raise ValueError(
                f"{field} {name!r} was made with tokenizer {prints[1]}, the data to train on with {prints[0]}: "
                f"build both with the same tokenizer.json"
            )
    return sets


def saved_plan(run: Path) -> Plan | None:
    """The plan that a run's newest checkpoint follows, amendments and steps left out included; None without one."""
    found = [path for path in run.glob(f"{CHECKPOINTS}/*/{META}") if path.parent.name.isdigit()]
    if not found:
        return None
    newest = max(found, key=lambda path: int(path.parent.name))
    return Plan.from_state(json.loads(newest.read_text(encoding="utf-8"))["meta"]["plan"])


def describe_batch(source: str | Path, step: int, data_path: str | Path | None = None, *, text: bool = False) -> str:
    """What one step reads, a line a row: data set, token, shard, document, and how the row begins.

    Args:
        source: a run directory, or a config file.
        step: counted from 1, as in the log.
        data_path: the shards; a run remembers its own.
        text: the whole rows, decoded.

    Raises:
        ValueError: there is no such run, step or data.
    """
    source = Path(source)
    path = source / CONFIG if source.is_dir() else source
    recorded = load_yaml(path).get(RECORD, {})
    config = Config.from_yaml(path)
    config.validate()
    if data_path is None and is_tokens(source / DATA):
        data_path = source / DATA
    elif data_path is None:
        data_path = primary_path(config, None) or recorded.get("data_path")
    if data_path is None or not is_tokens(data_path):
        raise ValueError(f"{source} does not say which shards it reads: name them with data_path=PATH")
    with Roxxel(data_path) as data:
        plan = saved_plan(source) or curriculum_of(config, data)[0].plan(config.seed)
        if not 1 <= step <= plan.total_steps:
            raise ValueError(f"step {step}: the plan has steps 1 to {plan.total_steps}")
        rows = plan.rows(step - 1)
        sets = {"self": data, **blended_sets(config, data)}
        lines = [
            f"step {step} of {plan.total_steps}, phase {plan.phase(step - 1) + 1} of {len(plan.shapes)}: "
            f"{len(rows.offset)} rows x {rows.seq_len} tokens"
        ]
        for row, offset in enumerate(rows.offset.tolist()):
            name = plan.datasets[rows.dataset[row]]
            if name not in sets:
                raise ValueError(f"step {step} reads the data set {name!r}, and datasets in {path} does not name it")
            place = place_of(sets[name], offset)
            ids = sets[name].read(rows.offset[row : row + 1], rows.seq_len)[0].tolist()
            said = data.tokenizer.decode(ids) if data.tokenizer else " ".join(map(str, ids))
            where = f"{name} token {offset:,} ({place.path.name}, document {place.document}, +{place.position:,})"
            lines.append(f"row {row}: {where}" + (f"\n{said}" if text else f": {said[:SHOWN]!r}"))
    return "\n".join(lines)
