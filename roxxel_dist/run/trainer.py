"""The one name `Trainer` for two things: a run made of parts, and a run made from a Config."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

from roxxel_dist.cluster.durable import write_file
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.data.files.foreign import ForeignFile
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.place.directory import CONFIG, SUMMARY, TOKENIZER
from roxxel_dist.run.components import on_primary
from roxxel_dist.run.experiment import Experiment
from roxxel_dist.run.record import RunMetadata, summarize
from roxxel_dist.settings.config import Config
from roxxel_dist.train.step.state import TrainView
from roxxel_dist.train.trainer import Trainer as Loop
from roxxel_dist.weights.model import attention_kernel

__all__ = ["Curriculum", "Phase", "Trainer"]


class Trainer(Loop):
    """A run made of parts: `Trainer(model, optimizer, curriculum, …)`, see `train.trainer.Trainer` for the arguments.

    The run directory of a `Transformer` has a `config.yaml`, so `eval`, `generate`, `export` and `report` read it.

    With a `Config` as its only argument it returns an `Experiment`: `Trainer(config).fit("corpus.txt")`.
    """

    @overload
    def __new__(cls, config: Config, /) -> Experiment: ...
    @overload
    def __new__(cls, *parts: Any, **options: Any) -> "Trainer": ...
    def __new__(cls, *parts: Any, **options: Any) -> Any:
        """An `Experiment` for a single `Config`; otherwise a trainer of these parts."""
        given = [*parts, *options.values()]
        if len(given) == 1 and isinstance(given[0], Config) and set(options) <= {"config"}:
            return Experiment(given[0])
        return super().__new__(cls)

    def run(self, at_the_end: Callable[[], None] | None = None) -> TrainView:
        """As `train.trainer.Trainer.run`."""
        model = self.state.model
        if type(model) is Transformer and self._bucket is None:
            on_primary("config of the run", lambda: self._write_config(model))
        return super().run(at_the_end)

    def _write_config(self, model: Transformer) -> None:
        """Write the config.yaml that commands look for in a run directory."""
        run, primary = self._folder, self._curriculum.primary_streamer
        source, file = primary.filepath, primary.shards[0]
        is_headerless = isinstance(file, ForeignFile) and file.is_headerless
        fields = dataclasses.asdict(model.config) | dataclasses.asdict(self.options)
        phases = [_plain(phase) for phase in self._curriculum.phases]
        known: Any = primary.dtype.name if is_headerless and primary.guessed_dtype is None else "auto"
        config = Config(
            **fields | {"phases": phases, "grad_accum": self._grad_accum, "loss": _name_of(self._loss_fn)},
            datasets=_paths(self._curriculum.mix_streamers),
            validation=_paths(self._given_validation),
            data_dtype=known,
        )
        with Roxxel(source, dtype=primary.dtype) as data:
            if data.tokenizer is not None:
                data.tokenizer.save(run / TOKENIZER)
            made = RunMetadata.now(
                attention_kernel(config, self._curriculum.shapes, devices=list(self.mesh.devices.flat)),
                data_path=absolute(source) if isinstance(source, str | os.PathLike) else None,
                corpus=data.fingerprint,
                program=Path(sys.argv[0]).name or "a Python program",
            )
        config.save_yaml(run / CONFIG, made.to_dict())
        sizes = summarize(self.state.params, self.state.optimizer, self.state.frozen)
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
