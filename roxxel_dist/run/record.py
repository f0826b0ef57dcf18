"""Metadata of a run as a start writes it, with sizes; and which fields of its config a resume may change."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from roxxel_dist.checkpoint.metadata import CheckpointRef, write_cursor
from roxxel_dist.cluster import determinism
from roxxel_dist.cluster.mesh import num_devices
from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.data.files.foreign import ForeignFile
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.split import count_by_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.place.directory import CONFIG, DATA, SUMMARY, TOKENIZER, has_config, is_of_program
from roxxel_dist.place.run_place import local_run
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import RunComponents, run_on_primary
from roxxel_dist.run.metadata import PACKAGES, RunMetadata
from roxxel_dist.settings.config import DEFAULTS, RECORD, Config
from roxxel_dist.train.loop import Loop
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.resume import ResumePoint, check_same_bits, max_steps_note
from roxxel_dist.train.step.schedule import LrSchedule, scaling_note
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.validation.evaluator import validation_note
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.load import attention_kernel

MB = 1e6
FREE_MODEL_FIELDS = (
    "dropout_rate", "lora_dropout", "gradient_checkpointing", "alpha_balance", "expert_capacity_factor", "z_loss",
    "inference", "attention",
)  # fmt: skip
"""Fields of the model that a resumed run may change. A dropout rate of 0 stays 0, and one above 0 stays above 0; an
attention kernel stays the same, even if it is now given by name."""
WITHOUT_PHASES = ("epochs", "batch_size")
"""Fields that decide which tokens a step reads if no phases are given."""
AMENDABLE = ("phases", *WITHOUT_PHASES)
EXACT_FIELDS = ("virtual_shards", "grad_accum")
"""Fields that decide how a run with virtual shards adds up."""
FIXED_FIELDS = (
    "model", "optimizer", "use_bf16", "init_from", "seed", "phases", "val_fraction", "tokenizer_type", "virtual_shards",
)  # fmt: skip
"""Fields, besides those of the model, that decide what a checkpoint holds, or which tokens a step reads."""


def summarize(params: dict[str, jax.Array], opt_state: Any, frozen: dict[str, jax.Array]) -> dict[str, Any]:
    """Parameters of a model in all, trained and by part, memory of weights and optimizer in MB (10^6 bytes), dtype. An
    array that is sharded over devices or processes counts once, with its whole size."""
    weights = frozen | params
    leaves = list(weights.values())
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "trainable_parameters": sum(leaf.size for leaf in params.values()),
        "parameters_by_part": count_by_module(weights),
        "weights_mem_MB": sum(leaf.nbytes for leaf in leaves) / MB,
        "optimizer_mem_MB": sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) / MB,
        "dtype": dtypes[0] if len(dtypes) == 1 else ", ".join(dtypes),
    }


def write_run_metadata(
    loop: Loop,
    run: Path,
    data_path: str | Path | None,
    components: RunComponents,
    saved: dict[str, Any],
    changed: list[str],
    message: str,
    *,
    name: str,
) -> None:
    """Write config, tokenizer and sizes into the directory of a run that is about to begin, and log its first lines.

    `saved` is the config that the directory holds, `changed` a line for each field that differs from it, and `message`
    a line about the origin of the config. `name` is the run's name in messages. Without a `data_path` the data is in
    the run directory.
    """
    log, data, config = loop.held.log.text, components.data, components.config
    position, state = loop.position, loop.state
    sizes = summarize(state.params, state.optimizer, state.frozen)
    if not position.finished or saved.get("init_from") != config.init_from:
        metadata = _metadata(position.start, components, saved, absolute(data_path or run / DATA))
        if RECORD in saved:
            changed = [*changed, *_other_environment(saved, metadata, is_exact=bool(config.virtual_shards))]
        # Before the config: after a crash between the two writes, an extended run must not count as finished.
        write_cursor(run, position.start.step, position.last_step, finished=position.finished)
        config.save_yaml(run / CONFIG, metadata.to_dict())
        if data.tokenizer is not None:
            data.tokenizer.save(run / TOKENIZER)
        write_file(run / SUMMARY, (json.dumps(sizes, indent=2) + "\n").encode())
    trained, total = sizes["trainable_parameters"], sizes["parameters"]
    share = "" if trained == total else f" ({trained:,} of them trained, {trained / total:.2%})"
    log(f"model: {total:,} parameters{share}, {num_devices(loop.parts.mesh)} device(s), run directory {name}")
    if message:
        log(message)
    train = position.plan.amendments[-1].sources["self"].units.tokens
    parts = f"{train:,} tokens to train on, {data.num_tokens - train:,} held out, in {len(data.shards)} shard(s)"
    log(f"data: {parts}, vocabulary {components.vocab_size:,}")
    for source, data_set in components.curriculum.mix_streamers.items():
        log(f"data {source}: {data_set.num_tokens:,} tokens, in {len(data_set.shards)} shard(s)")
    if (others := list(components.curriculum.mix_streamers)) and not config.validation:
        names = " and ".join(others)
        log(f"validation: uses only the held-out part of self; to validate on {names} too, name shards in `validation`")
    if not position.start.notes:  # otherwise the notes include the plan
        log(position.plan.describe())
    for note in (
        scaling_note(LrSchedule.from_dict(position.metadata.schedule), position.plan.shapes),
        validation_note(position.metadata.validation, position.plan.shapes),
        max_steps_note(position.plan, loop.parts.options),
    ):
        if note:
            log(note)
    if saved and not position.step:
        log(f"{name} has no checkpoint yet: it starts again at step 1")
    for line in changed:
        log(f"changed since {'the run began' if saved else position.start.source}: {line}")


def _other_environment(saved: Mapping[str, Any], metadata: RunMetadata, *, is_exact: bool) -> list[str]:
    """A line for each setting and version that is not that of the run's beginning, and one that says what follows."""
    begun, now = RunMetadata.from_config(saved), metadata.resumes[-1]["bits"]
    was = begun.bits
    if is_exact:  # the results are the same on other devices
        was, now = map(determinism.without_topology, (was, now))
    lines = determinism.changed(was, now)
    if lines:
        names = ", ".join(line.split(":", 1)[0] for line in lines)
        lines.append(f"perhaps the last bits of losses, by {names}; up to rounding they are the same")
    others = {name: version(name) for name in PACKAGES if name not in now}  # jax and jaxlib are among the bits
    return lines + determinism.changed(begun.versions, others)


def _metadata(start: ResumePoint, components: RunComponents, saved: dict[str, Any], data_path: str) -> RunMetadata:
    """The metadata of a new run, or of a resumed one with another entry in `resumes`."""
    origin, kernel = start.record, components.kernel
    if RECORD not in saved:
        return RunMetadata.now(kernel, data_path=data_path, corpus=components.data.fingerprint, **origin)
    before, now = RunMetadata.from_config(saved), RunMetadata.now(kernel)
    resume = {"step": start.step, "commit": now.git_commit, **origin, "bits": now.bits}
    resume["changed_from"] = changed_from(saved, components.config)
    return replace(
        before,
        data_path=data_path,
        corpus=components.data.fingerprint,
        initialized_from=origin.get("initialized_from", before.initialized_from),  # the current place of the base
        resumes=[*before.resumes, resume],
    )


def kernel_begun_with(saved: Mapping[str, Any]) -> AttentionKernel | None:
    """The attention kernel of a run, from its saved config; None if there is no run."""
    return RunMetadata.from_config(saved).bits.get("attention")


def check_resumable(saved: dict[str, Any], config: Config, *, amend: bool = False, fork: str = "") -> list[str]:
    """The fields in which a config differs from the saved one of its run, or of its `fork`, a line each.

    Raises ValueError for a field on which the checkpoint's shapes or the order of the data depend; `amend` allows
    another curriculum.
    """
    fixed = {*FIXED_FIELDS, *(WITHOUT_PHASES if config.phases is None else ())}
    # For a user-defined model it is unknown which fields determine shapes; loading the checkpoint checks the shapes.
    fixed |= {"vocab_size"} if config.model else {f.name for f in fields(ModelConfig)} - {*FREE_MODEL_FIELDS}
    if config.virtual_shards:  # grad_accum decides which rows are summed first
        fixed |= {*EXACT_FIELDS}
    if amend:
        fixed -= {*AMENDABLE, *EXACT_FIELDS}
    if "fingerprint" in (RunMetadata.from_config(saved).initialized_from or {}):
        fixed.discard("init_from")  # the base of adapters may be moved: the fingerprint identifies it
    dropouts = {"dropout_rate"} | ({"lora_dropout"} if config.use_lora else set())
    lines, other = [], fork or "the run to resume"
    kernel = kernel_begun_with(saved)
    if kernel and not fork and config.model is None and config.attention not in ("auto", kernel):
        raise UserError(
            f"attention is {config.attention}, and {other} began with {kernel}: leave it as it was, or start a new "
            f"run (at a checkpoint of this one with {argument('fork', 'RUN@STEP')})"
        )
    for name, before in changed_from(saved, config, with_base=True).items():
        value = getattr(config, name)
        if name in EXACT_FIELDS and name in fixed:
            what = "depend on the number of devices" if not config.virtual_shards else "not be those of the run so far"
            raise UserError(
                f"{name} is {value}, and {other} has {before}: from here on its bits would {what}. Leave it as it was, "
                f"or accept that with {argument('amend')}"
            )
        if name in fixed:
            raise UserError(
                f"{name} is {value}, and {other} has {before}: leave it as it was, or "
                f"start a new run"
                + (f" (or change it from here on with {argument('amend')})" if name in AMENDABLE else "")
            )
        if name in dropouts and config.model is None and bool(value) != bool(before):
            raise UserError(
                f"{name} is {value}, and {other} has {before}: its checkpoints hold random streams of dropout "
                f"only where there is some, so use {'a rate above 0' if before else '0'}, or start a new run"
            )
        if name == "ema" and bool(value) != bool(before) and not (fork and value):
            raise UserError(
                f"ema is {value}, and {other} has {before}: a resume cannot begin or end an average. Leave it "
                f"as it was, begin one in a fork ({argument('fork', 'RUN@STEP')}), or start a new run "
                f"({argument('init_from', 'RUN')})"
            )
        lines.append(f"{name} {before} -> {value}")
    return lines


def check_same_run(saved: Mapping[str, Any], config: Config, kernel: AttentionKernel, step: int) -> None:
    """Raises UserError as `check_same_bits` for the steps of a run after this one, by its saved config."""
    if not (config.virtual_shards and saved.get("virtual_shards")):
        return
    record = RunMetadata.from_config(saved)
    # Those of the newest of its steps: nothing is left of a resume from this step on.
    resumes = (one["bits"] for one in reversed(record.resumes) if one.get("bits") and one["step"] < step)
    was = next(resumes, record.bits)
    now = determinism.numerics_fingerprint() | {"attention": kernel}
    check_same_bits(was, now, config.virtual_shards)


def changed_from(saved: Mapping[str, Any], config: Any, *, with_base: bool = False) -> dict[str, Any]:
    """The old values, by name, of fields that differ between the saved config of a run and the config that resumes it.

    Without `init_from` unless `with_base`: the new place of a moved base is valid for older steps too. A field that is
    newer than the run had its default there.
    """
    before = {**DEFAULTS, "vocab_size": None, **saved} if saved else {}
    return {
        name: before[name]
        for name, now in config.to_dict().items()
        # An unset vocab_size is that of the data, which the saved config has.
        if name in before and before[name] != now and not (name == "vocab_size" and None in (before[name], now))
        if with_base or name != "init_from"
    }


def forked_from(
    fork: str | None, skip_steps: tuple[int, int] | None, saved: dict[str, Any], run: Path
) -> tuple[CheckpointRef | None, tuple[int, int] | None]:
    """(the checkpoint that the run in `run` is forked from, the steps whose rows it leaves out): as given, or of a run
    that exists as its saved config has them.

    Raises ValueError if `fork` names no run, or the run exists and was forked in another way.
    """
    recorded = RunMetadata.from_config(saved).forked_from
    known = CheckpointRef(Path(recorded["run"]), recorded["step"]) if recorded else None
    skipped: Any = tuple(recorded["skipped"]) if recorded and "skipped" in recorded else None
    if fork is None:
        if saved and skip_steps is not None:
            raise UserError(
                f"skip_steps leaves rows out in a new run, and {run} exists: begin one at a checkpoint of it with "
                f"{argument('fork', f'{run}@STEP')} and another run_dir"
            )
        return known, skipped if saved else skip_steps
    given = CheckpointRef.parse(fork)
    if absolute(given.run) == absolute(run):
        raise UserError(f"fork is {given}, and run_dir is the same run: a fork needs a run_dir of its own")
    if saved and (known is None or (absolute(given.run), given.step) != (absolute(known.run), known.step)):
        came = f"was forked from {known}" if known else "is no fork"
        raise UserError(f"fork is {given}, and the run in {run} {came}: leave fork out, or name another run_dir")
    if saved and skip_steps != skipped:
        was, now = ("{}:{}".format(*steps) if steps else None for steps in (skipped, skip_steps))
        raise UserError(f"skip_steps is {now}, and the run in {run} began with {was}: name another run_dir")
    if not has_config(local_run(given.run)) and not is_of_program(local_run(given.run)):
        raise UserError(f"fork is {given}: {given.run} is not a run directory, it has no {CONFIG}, or an empty one")
    return given, skip_steps


def record_parts(parts: Parts, state: TrainView) -> None:
    """Write config, tokenizer and sizes into the run directory, where the model is the built-in one. All ranks call it.
    Not of a run in a bucket: it was made from a Config, and has its record already."""
    model = state.model
    if type(model) is Transformer and parts.bucket is None:
        run_on_primary("config of the run", lambda: _write(parts, model, state))


def _write(parts: Parts, model: Transformer, state: TrainView) -> None:
    run, curriculum = parts.folder, parts.training
    primary = curriculum.primary_streamer
    source, file = primary.filepath, primary.shards[0]
    is_headerless = isinstance(file, ForeignFile) and file.is_headerless
    fields = dataclasses.asdict(model.config) | dataclasses.asdict(parts.options)
    phases = [_plain(phase) for phase in curriculum.phases]
    known: Any = primary.dtype.name if is_headerless and primary.guessed_dtype is None else "auto"
    config = Config(
        **fields | {"phases": phases, "grad_accum": parts.grad_accum, "loss": _name_of(parts.loss_fn)},
        datasets=_paths(curriculum.mix_streamers),
        validation=_paths(parts.validation),
        data_dtype=known,
    )
    with Roxxel(source, dtype=primary.dtype) as data:
        if data.tokenizer is not None:
            data.tokenizer.save(run / TOKENIZER)
        made = RunMetadata.now(
            attention_kernel(config, curriculum.shapes, devices=list(parts.mesh.devices.flat)),
            data_path=absolute(source) if isinstance(source, str | os.PathLike) else None,
            corpus=data.fingerprint,
            program=Path(sys.argv[0]).name or "a Python program",
        )
    config.save_yaml(run / CONFIG, made.to_dict())
    sizes = summarize(state.params, state.optimizer, state.frozen)
    write_file(run / SUMMARY, (json.dumps(sizes, indent=2) + "\n").encode())


def _plain(phase: Phase) -> dict[str, Any]:
    """The fields of a phase that differ from their defaults, for YAML."""
    values = {field.name: (getattr(phase, field.name), field.default) for field in dataclasses.fields(phase)}
    plain = {name: value for name, (value, default) in values.items() if value != default}
    return plain | ({"weights": dict(phase.weights)} if phase.weights else {})


def _paths(sets: Mapping[str, Roxxel] | None) -> dict[str, str] | None:
    """The paths of data sets by name; None if there are none."""
    named = {name: data.filepath for name, data in (sets or {}).items()}
    return {name: absolute(path) for name, path in named.items() if isinstance(path, str | os.PathLike)} or None


def _name_of(loss: Any) -> str | None:
    """module:function of a loss; None for the default loss."""
    if loss is token_losses:
        return None
    return f"{getattr(loss, '__module__', '?')}:{getattr(loss, '__qualname__', type(loss).__name__)}"
