"""What is checked: a model, a loss, an optimizer and data, of a `Config` or of a `Trainer` of parts."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from roxxel_dist.cluster.determinism import enable_compilation_cache, pin_threads
from roxxel_dist.cluster.distributed import make_devices
from roxxel_dist.cluster.jax_private import backends_are_initialized
from roxxel_dist.cluster.mesh import simulate_devices
from roxxel_dist.curriculum.phases import Curriculum, Phase
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.packing import Packed
from roxxel_dist.input.stream import Stream
from roxxel_dist.layouts.layout import BatchName, few_rows, virtual_shards
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.transformer import Transformer, TransformerBuilder
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.run.components import build_components, open_corpus, temporary_folder
from roxxel_dist.settings.config import Config
from roxxel_dist.train.parts import Parts
from roxxel_dist.train.step.optimizer import NamedOptimizer, Optimizer
from roxxel_dist.train.step.step import BALANCE, LossFn
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.base import add_base, take_hf_shape

TOKENS = 65
"""The most tokens of a row: enough to be cut in many places, and to run in seconds."""
THREADS = 2
"""Of XLA's pool, for each simulated device: each of them waits in a collective."""
MOST_DEVICES = 64
"""That are simulated: each has threads and programs of its own."""
DOCUMENT_PARTS = 4
"""A packed row is cut into so many equal parts; the first document has all but one of them."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its loss, its optimizer and rows to compute on."""

    model: nnx.Module | Callable[[], nnx.Module]
    loss: LossFn
    optimizer: Optimizer
    seed: int
    curriculum: Curriculum
    mesh: Mesh | None
    """Of a `Trainer`; None: meshes of all devices are made."""
    sharding: NamedSharding | None
    """Of a batch on that mesh."""
    fsdp: bool
    advice: str
    """How to make the model narrower."""

    @classmethod
    def of_parts(cls, parts: Parts) -> "Subject":
        """The subject of a `Trainer`."""
        return cls(
            model=parts.model,
            loss=parts.loss_fn,
            optimizer=parts.update_rule,
            seed=parts.options.seed,
            curriculum=parts.training,
            mesh=parts.mesh,
            sharding=parts.sharding,
            fsdp=parts.options.fsdp,
            advice="build it with smaller widths; layers, experts and the ratios of heads stay",
        )

    @property
    def is_own(self) -> bool:
        """Whether the model or the loss is the user's."""
        built_in = isinstance(self.model, Transformer | TransformerBuilder)
        return not built_in or self.loss not in (token_losses, next_token_loss)

    @property
    def capacity_factor(self) -> float | None:
        """The capacity factor of the built-in model's experts, if they have one."""
        if isinstance(self.model, Transformer | TransformerBuilder):
            return self.model.config.expert_capacity_factor
        return None

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer is the user's."""
        return not isinstance(self.optimizer, NamedOptimizer) or self.optimizer.own is not None

    @property
    def shape(self) -> Shape:
        """The shape of the phase with the longest rows."""
        return max(self.curriculum.shapes, key=lambda shape: shape.seq_len)

    def batch(self, name: BatchName, devices: int, seq_len: int | None, *, even: bool) -> Any:
        """The rows of a step, int32[B, L], or a `Packed` of three such arrays; numpy.

        There are two rows for each device, or one for each virtual shard. The few rows are the first ones. Packed rows
        have two documents each, which are tokens of the corpus, and a token that belongs to neither, so that the inputs
        of both batches are the same tokens: one document is three times as long as the other, or as long where they
        must be `even`.
        """
        length = seq_len or min(self.shape.seq_len, TOKENS)
        rows = self._rows(2 * devices, length, self.shape.packing)
        match name:
            case "rows":
                return rows
            case "few rows":
                return jax.tree.map(lambda array: array[: few_rows(devices)], rows)
            case "rows of shards":
                return self._rows(virtual_shards(devices), length, self.shape.packing)
            case _:
                tokens = np.asarray(jax.tree.leaves(rows)[0])
                return packed_rows(tokens, even=even) if name == "packed" else rows_of_documents(tokens, even=even)

    def _rows(self, rows: int, length: int, packing: Any) -> Any:
        primary = self.curriculum.primary_streamer
        phase = Phase(steps=1, batch_size=rows, seq_len=length, packing=packing)
        plan = Curriculum(primary, [phase]).plan(self.seed)
        return Stream(plan, {"self": primary}, None).batch(0)


def _cut(tokens: np.ndarray, *, even: bool) -> tuple[int, int]:
    """(tokens of the first document of a row, tokens of both)."""
    part = (tokens.shape[1] - 1) // DOCUMENT_PARTS
    return part * (DOCUMENT_PARTS // 2 if even else DOCUMENT_PARTS - 1), part * DOCUMENT_PARTS


def packed_rows(tokens: np.ndarray, *, even: bool) -> Packed:
    """Each row as two documents, and a token behind them."""
    first, both = _cut(tokens, even=even)
    place = np.broadcast_to(np.arange(both + 1, dtype=np.int32), (len(tokens), both + 1))
    segments = (place >= first).astype(np.int32) + (place >= both)
    positions = place - np.where(segments == 0, 0, np.where(segments == 1, first, both))
    return Packed(np.ascontiguousarray(tokens[:, : both + 1]), segments, positions.astype(np.int32))


def rows_of_documents(tokens: np.ndarray, *, even: bool) -> Packed:
    """The documents of `packed_rows`, each in a row of its own; what is behind it is documents of one token, which
    predict nothing."""
    first, both = _cut(tokens, even=even)
    length = max(first, both - first) + 1
    of_rows = list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    for row in tokens:
        for begin, end in ((0, first), (first, both)):
            own = row[begin:end]
            behind = length - len(own)
            ids = np.concatenate([own, np.resize(row[end : end + 1], behind)])
            segments = np.concatenate([np.zeros(len(own)), np.arange(1, behind + 1)])
            positions = np.concatenate([np.arange(len(own)), np.zeros(behind)])
            of_rows.append((ids.astype(np.int32), segments.astype(np.int32), positions.astype(np.int32)))
    return Packed(*(np.stack(arrays) for arrays in zip(*of_rows, strict=True)))


@contextlib.contextmanager
def open_subject(config: Config, data_path: str | Path | None, devices: int) -> Iterator[Subject]:
    """The subject of a config, which is not changed, on `devices` simulated CPU devices, 2 to `MOST_DEVICES`, or with 0
    on those of this machine; its data is open within.

    Raises UserError for a mistake in the config or the data, and where jax has made other devices already.
    """
    if not 0 <= devices <= MOST_DEVICES or devices == 1:
        raise UserError(f"devices is {devices}: it must be from 2 to {MOST_DEVICES}, or 0 for those of this machine")
    config = add_base(config)[0].with_absolute_paths()
    config.validate()
    config = take_hf_shape(config)
    changes: dict[str, Any] = {"init_from": None}  # weights are those of the seed
    if devices:
        simulate_devices(devices)
        if not backends_are_initialized():
            pin_threads(THREADS * devices)
        changes["attention"] = "xla" if config.attention in ("cudnn", "splash") else config.attention
    else:
        make_devices()
    config = dataclasses.replace(config, **changes)
    path = config.primary_path(data_path)
    with temporary_folder(path, "check-layouts") as folder, open_corpus(config, path, folder) as data:
        enable_compilation_cache()
        of = build_components(config, data)
        yield Subject(
            model=of.build,
            loss=of.loss,
            optimizer=of.optimizer,
            seed=config.seed,
            curriculum=of.curriculum,
            mesh=None,
            sharding=None,
            fsdp=False,
            advice=narrower(of.config),
        )


def drop_balance(loss_fn: LossFn) -> LossFn:
    """A loss without its second term."""
    own = token_losses if loss_fn is next_token_loss else loss_fn

    def alone(model: Any, batch: Any) -> Any:
        result = own(model, batch)
        loss, aux = result if isinstance(result, tuple) else (None, result)
        if isinstance(aux, Mapping):
            aux = {name: value for name, value in aux.items() if name != BALANCE}
        return (loss, aux) if isinstance(result, tuple) else aux

    return alone


def narrower(config: Config) -> str:
    """What makes a model half as wide with the same structure."""
    if config.model is not None:
        return (
            "build it with smaller widths (model_args={NAME: VALUE}); layers, experts and the ratios of heads stay as "
            "they are"
        )
    values = {
        "dim": config.dim,
        "n_heads": config.n_heads,
        "kv_heads": config.kv_heads,
        "hidden_dim": config.hidden_dim,
    }
    halved = {name: value // 2 for name, value in values.items() if value and value % 2 == 0}
    flags = " ".join(f"{name}={value}" for name, value in halved.items())
    return f"{flags} and so on keep its structure: layers, experts, the size of a head and the ratios of heads stay"


def check_devices(mesh: Mesh | None) -> list[Any]:
    """The devices to compare on; raises UserError where there is one alone, or other processes have some."""
    devices = list(jax.devices() if mesh is None else mesh.devices.flat)
    if jax.process_count() > 1:
        raise UserError(
            "check-layouts is for one process, with simulated devices or those of one host: do not launch it"
        )
    if len(devices) < 2:
        raise UserError(
            f"one device has one layout alone: simulate several with {argument('devices', 8)}, or with "
            "jax.config.update('jax_num_cpu_devices', 8) before the first array of a program"
        )
    return devices
