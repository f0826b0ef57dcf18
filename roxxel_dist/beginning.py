"""What a run writes down, and tells people, before its first step."""

import json
from pathlib import Path
from typing import Any

from roxxel_dist.assemble import Recipe
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.mesh import num_devices
from roxxel_dist.config import RECORD
from roxxel_dist.data.commit import write_file
from roxxel_dist.lineage import changed_from
from roxxel_dist.record import describe_environment, summarize
from roxxel_dist.run_directory import CONFIG, DATA, SUMMARY, TOKENIZER
from roxxel_dist.train.cursor import write_cursor
from roxxel_dist.train.follow import longer_than_its_phases
from roxxel_dist.train.fork import FROM
from roxxel_dist.train.trainer import Trainer


def write_down(
    trainer: Trainer, run: Path, data_path: Any, made: Recipe, saved: dict[str, Any], changed: list[str], told: str
) -> None:
    """What a person or a later command needs to know about a run.

    Args:
        trainer: the run, ready to begin.
        run: its directory.
        data_path: the primary data set; None where it is in the run directory.
        made: what the run is made of.
        saved: the config that the run directory holds; empty for a new run.
        changed: what the config says otherwise than that one, a line each.
        told: a line about how the config came about; may be empty.
    """
    say, data = trainer.logger.text, made.data
    summary = summarize(trainer.state.params, trainer.state.optimizer, trainer.state.frozen)
    moved = saved.get("init_from") != made.config.init_from
    if moved or not trainer.finished:
        record = _record(trainer, made, saved, str(Path(data_path or run / DATA).absolute()))
        if before := saved.get(RECORD):
            changed = [*changed, *determinism.changed(before.get("bits", {}), determinism.numerics_fingerprint())]
        # Before the config: cut off between the two, a finished run that goes on must not be taken for finished.
        write_cursor(run, trainer.start_step, trainer.last_step, finished=trainer.finished)
        made.config.save_yaml(run / CONFIG, record)
        if data.tokenizer is not None:
            data.tokenizer.save(run / TOKENIZER)
        write_file(run / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
    trained, of_all = summary["trainable_parameters"], summary["parameters"]
    some = "" if trained == of_all else f" ({trained:,} of them trained, {trained / of_all:.2%})"
    say(f"model: {of_all:,} parameters{some}, {num_devices(trainer.mesh)} device(s), run directory {run}")
    if told:
        say(told)
    train = trainer.plan.amendments[-1].sources["self"].units.tokens
    parts = f"{train:,} tokens to train on, {data.num_tokens - train:,} held out, in {len(data.shards)} shard(s)"
    say(f"data: {parts}, vocabulary {made.config.vocab_size:,}")
    for name, one in made.curriculum.mix_streamers.items():
        say(f"data {name}: {one.num_tokens:,} tokens, in {len(one.shards)} shard(s)")
    if not trainer.start.notes:  # else they have it
        say(trainer.plan.describe())
    if note := longer_than_its_phases(trainer.plan, trainer.options):
        say(note)
    if saved and not trainer.step:
        say(f"{run} has no checkpoint yet: it begins again, at step 1")
    for line in changed:
        say(f"changed since {'the run began' if saved else trainer.start.source}: {line}")


def _record(trainer: Trainer, made: Recipe, saved: dict[str, Any], place: str) -> dict[str, Any]:
    """What a config keeps beside its fields: where and with what the run was made, and each time it was resumed."""
    now = {"data_path": place, "corpus": made.data.fingerprint}
    record = describe_environment() | now | trainer.start.record | {"bits": determinism.numerics_fingerprint()}
    if not (before := saved.get(RECORD)):
        return record
    this = {"step": trainer.start_step, "commit": record["git_commit"]} | trainer.start.record
    this |= {"bits": record["bits"], "changed_from": changed_from(saved, made.config)}
    found = before | now | {"resumes": [*before.get("resumes", []), this]}
    return found | ({FROM: dict(this[FROM])} if FROM in this else {})  # where the base is now
