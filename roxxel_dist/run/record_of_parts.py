"""The config.yaml of a run that a program of the user's own made of parts, for the commands that read a run."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roxxel_dist.curriculum.phases import Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.data.files.foreign import ForeignFile
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.place.directory import CONFIG, SUMMARY, TOKENIZER
from roxxel_dist.process.durable import write_file
from roxxel_dist.run.components import on_primary
from roxxel_dist.run.metadata import RunMetadata
from roxxel_dist.run.record import summarize
from roxxel_dist.settings.config import Config
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.weights.load import attention_kernel


def record_parts(parts: Parts, state: TrainView) -> None:
    """Write config, tokenizer and sizes into the run directory, where the model is the built-in one. All ranks call it.

    Not of a run in a bucket: it was made from a Config, and has its record already.
    """
    model = state.model
    if type(model) is Transformer and parts.bucket is None:
        on_primary("config of the run", lambda: _write(parts, model, state))


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
