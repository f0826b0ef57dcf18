"""From a Config and shards to what is read when: the curriculum over the part that is trained on. No jax."""

import json
from pathlib import Path
from typing import Any

from roxxel_dist.config import RECORD, Config, load_yaml
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.plan import Plan
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.locate import is_tokens
from roxxel_dist.data.place import place_of
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.run_directory import CHECKPOINTS, CONFIG, DATA
from roxxel_dist.train.config import LoopConfig
from roxxel_dist.train.standing import META

SHOWN = 60


def curriculum_of(config: Any, data: Roxxel) -> tuple[Curriculum, Roxxel]:
    """(phases over the training part of the data, the held-out part).

    Raises:
        ValueError: a phase breaks its rules, or reads more tokens than the model does.
    """
    loop, model = config.part(LoopConfig), config.part(ModelConfig)
    phases: list[Any] = loop.phases or [
        Phase(epochs=loop.epochs, batch_size=loop.batch_size * loop.grad_accum, seq_len=model.max_context + 1)
    ]
    curriculum, held_out = Curriculum(data, phases).hold_out(0 if config.validation else loop.val_fraction)
    for i, phase in enumerate(curriculum.phases):
        if (phase.seq_len or 0) > model.max_context + 1:
            raise ValueError(
                f"phase {i + 1}: seq_len is {phase.seq_len}, and the model reads at most max_context + 1 = "
                f"{model.max_context + 1} tokens, target included: use a larger max_context or a smaller seq_len"
            )
    return curriculum, held_out


def validation_sets(config: Any, data: Roxxel) -> dict[str, Roxxel]:
    """The data sets of the config's `validation` by name; none where it names none.

    Raises:
        ValueError: one was made with another tokenizer than the data to train on.
    """
    sets = {name: Roxxel(path) for name, path in (config.validation or {}).items()}
    for name, one in sets.items():
        prints = data.tokenizer_fingerprint, one.tokenizer_fingerprint
        if None not in prints and prints[0] != prints[1]:
            raise ValueError(
                f"validation {name!r} was made with tokenizer {prints[1]}, the data to train on with {prints[0]}: "
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
    if data_path is None:
        data_path = source / DATA if is_tokens(source / DATA) else recorded.get("data_path")
    if data_path is None or not is_tokens(data_path):
        raise ValueError(f"{source} does not say which shards it reads: name them with --data_path")
    with Roxxel(data_path) as data:
        plan = saved_plan(source) or curriculum_of(config, data)[0].plan(config.seed)
        if not 1 <= step <= plan.total_steps:
            raise ValueError(f"step {step}: the plan has steps 1 to {plan.total_steps}")
        rows = plan.rows(step - 1)
        tokens = data.read(rows.offset, rows.seq_len)
        lines = [
            f"step {step} of {plan.total_steps}, phase {plan.phase(step - 1) + 1} of {len(plan.shapes)}: "
            f"{len(tokens)} rows x {rows.seq_len} tokens"
        ]
        for row, offset in enumerate(rows.offset.tolist()):
            place = place_of(data, offset)
            name = plan.datasets[rows.dataset[row]]
            ids = tokens[row].tolist()
            said = data.tokenizer.decode(ids) if data.tokenizer else " ".join(map(str, ids))
            where = f"{name} token {offset:,} ({place.path.name}, document {place.document}, +{place.position:,})"
            lines.append(f"row {row}: {where}" + (f"\n{said}" if text else f": {said[:SHOWN]!r}"))
    return "\n".join(lines)
