"""The model of a Config, and a trained model from its folder, ready to be called.

The weights of a trained model as arrays in memory, from any kind of folder.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.checkpoint import files
from roxxel_dist.checkpoint.digests import problems_text, read_verified
from roxxel_dist.checkpoint.metadata import (
    CHECKPOINTS,
    BaseModelRef,
    CheckpointMetadata,
    CheckpointRef,
    best_of,
    saved_checkpoints,
)
from roxxel_dist.checkpoint.stored_blocks import check_checkpoint
from roxxel_dist.cluster.mesh import FSDP, make_mesh
from roxxel_dist.cluster.parameter_sharding import parameter_sharding
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.files.discovery import absolute
from roxxel_dist.data.tokenizer.tokenizer import TOKENIZER_NAMES, Tokenizer
from roxxel_dist.model.attention.kernels import Situation, broken_rule, kernel_for, native_kernel, score_traffic
from roxxel_dist.model.attention.mask import key_size
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.lora import LORA_A_SUFFIX, merge_adapters, target_of
from roxxel_dist.model.parametrization import Width, rescale_to, widths
from roxxel_dist.model.split import Leaves, Part, trace_module
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.model.user_code import call_function, import_function
from roxxel_dist.place.directory import CONFIG, METRICS, TOKENIZER, has_config, is_study, no_run
from roxxel_dist.place.run_place import bucket_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import RECORD, Config, load_yaml
from roxxel_dist.utils.display import size
from roxxel_dist.weights.base import INITIALIZED_FROM, base_of, check_base
from roxxel_dist.weights.files import BEST, NEWEST, OF_STATE, WHOLE, TensorFiles, has_tensors, read_model, step_of
from roxxel_dist.weights.hf_folder import HfFolder, fields_of, is_hf_folder


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's config and weights."""

    config: Any
    """The `Config`, with its vocabulary size."""
    params: dict[str, np.ndarray]
    """Parameters by name, such as "blocks.attention.qkv.kernel", in their stored dtype, including adapters and their
    base."""
    state: dict[str, np.ndarray]
    """What a user-defined model has beside its parameters, by name: such as "norm.mean", and random streams, whose keys
    are integers here. Empty for the built-in one."""
    step: int
    """Optimizer steps done; 0 for a Hugging Face model, and for files without a step."""
    tokenizer: Path | None
    """The path for `Tokenizer.load`; None if the model was trained on tokens without a tokenizer."""
    scales: dict[str, float] = field(default_factory=dict)
    """The scale of every adapter by name."""
    folders: tuple[Path, ...] = ()
    """The folders that were read, including those of the bases of adapters."""

    def merge_adapters(self) -> "Weights":
        """The same model with its adapters merged into the base weights."""
        config = replace(self.config, use_lora=False, init_from=None)
        return replace(self, config=config, params=merge_adapters(self.params, self.scales), scales={})


def weights_of(path: str | Path, *, step: int | None = None, best: bool = False) -> Weights:
    """The weights in a run directory, an exported folder, or a Hugging Face folder.

    The default is a run's newest checkpoint, with `best` that of the lowest val_loss, if one was validated; a run
    without checkpoints has files of weights. Devices are not used. Raises ValueError: the folder has no model, no
    weights, or no weights of that step.
    """
    named, named_step = CheckpointRef.parse(path)
    bucket = bucket_run(named)
    run = named if bucket is None else bucket.pull()
    step = named_step if step is None else step
    if is_hf_folder(run):
        if step is not None:
            raise UserError(f"{run} is a model of Hugging Face, which has no step {step}: leave the step out")
        return _of_hugging_face(run)
    if not has_config(run) or is_study(run):
        raise UserError(no_run(run, absolute(named)))
    config = Config.from_yaml(run / CONFIG)
    checkpoints = (run / CHECKPOINTS).absolute()  # Orbax reads no others
    saved = saved_checkpoints(checkpoints) if bucket is None else bucket.checkpoints.list_saved(read_only=True)
    if saved:
        done = step if step is not None else (best and best_of(saved)) or max(saved)
        if done not in saved:
            raise UserError(
                f"{bucket or run} has no checkpoint of step {done}; those there are: {', '.join(map(str, saved))}"
            )
        if bucket is not None and (problems := bucket.checkpoints.fetch_model(done)):
            raise UserError(
                f"the checkpoint of step {done} in {bucket} is damaged ({problems_text(problems)}): name another"
            )
        params, state, metadata = _of_checkpoint(checkpoints / str(done))
    else:
        params, state, done = _of_files(run, step, best=best)
        metadata = _metadata_of_adapters(load_yaml(run / CONFIG), params)
    scales = dict(metadata.adapter_scales or {})
    folders = (run,)
    if metadata.base is not None and (base := base_of(run, metadata)) is not None:
        check_base(base)
        weights = weights_of(base.run, step=base.step or None).merge_adapters()  # a base may have adapters too
        params, folders = weights.params | params, (run, *weights.folders)
    tokenizer = run / TOKENIZER if (run / TOKENIZER).exists() else None
    state = {} if config.model is None else state  # the random streams of dropout
    return Weights(
        config=config, params=params, state=state, step=done, tokenizer=tokenizer, scales=scales, folders=folders
    )


def _of_checkpoint(checkpoint: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], CheckpointMetadata]:
    """(parameters, state, the metadata of the checkpoint)."""
    try:
        saved, table = read_verified(checkpoint, int(checkpoint.name))
        return *files.read_model(checkpoint, saved, table), CheckpointMetadata.from_dict(saved.meta)
    except Exception as error:  # Orbax has no specific error for this
        folder, older = checkpoint.parent, saved_checkpoints(checkpoint.parent)
        steps = [step for step in sorted(older, reverse=True) if step < int(checkpoint.name)]
        whole = next((step for step in steps if not check_checkpoint(folder / str(step), step)), None)
        why = problems_text(check_checkpoint(checkpoint, int(checkpoint.name))) or files.cause(error)
        hint = "no older one is complete" if whole is None else f"name step {whole}, the next older complete one"
        raise UserError(f"the checkpoint {checkpoint} is damaged ({why}): {hint}") from error


def _metadata_of_adapters(saved: Mapping[str, Any], params: Mapping[str, Any]) -> CheckpointMetadata:
    """The checkpoint metadata for the adapters among some parameters, from the config beside them."""
    names = [name.removesuffix(LORA_A_SUFFIX) for name in params if name.endswith(LORA_A_SUFFIX)]
    if not names:
        return CheckpointMetadata()
    base, source = None, saved.get(RECORD, {}).get(INITIALIZED_FROM)
    if source and any(target_of(name) not in params for name in names):
        base = BaseModelRef.from_dict({**source, "asked": saved["init_from"]})
    scale = float(saved["lora_alpha"] / saved["lora_rank"])
    return CheckpointMetadata(adapter_scales=dict.fromkeys(names, scale), base=base)


def _of_files(run: Path, step: int | None, *, best: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """(parameters, state, steps done) of a run without checkpoints."""
    steps = {name: done for name in (NEWEST, BEST) if (done := step_of(run / name)) is not None}
    if not steps and has_tensors(run):
        with TensorFiles(run) as tensors:
            done = tensors.step()
            if step not in (None, done):
                known = "they do not say their step" if done is None else f"they are of step {done}"
                raise UserError(f"{run} has no weights of step {step}: {known}; leave the step out")
            arrays = {name: tensors.read(name) for name in tensors.shapes()}
        params = {name: array for name, array in arrays.items() if not name.startswith(OF_STATE)}
        return params, files.select_prefix(OF_STATE, arrays), done or 0
    if not steps and any((run / name).exists() for name in (CHECKPOINTS, METRICS)):
        raise UserError(f"{run} has no complete checkpoint: train it until its first one is saved")
    if not steps:
        raise UserError(
            f"{run} has no weights beside its {CONFIG}. If it is a run, train it until a checkpoint is saved. If "
            f"it is an export, {NEWEST} or {WHOLE} is missing or damaged: put it back, or export the run again"
        )
    names = [name for name in ((BEST, NEWEST) if best else (NEWEST, BEST)) if name in steps]
    name = next((name for name in names if step in (None, steps[name])), None)
    if name is None:
        kept = ", ".join(map(str, sorted(set(steps.values()))))
        raise UserError(f"{run} has no checkpoint, and no weights of step {step}; those there are: {kept}")
    if not best and step is None and name == BEST:
        line = f"roxxel-dist: {run} has no {NEWEST}: taking {BEST}, of step {steps[BEST]}"
        print(line, file=sys.stderr, flush=True)
    return read_model(run / name)


def _of_hugging_face(folder: Path) -> Weights:
    config = Config(**fields_of(folder))
    with HfFolder(folder) as tensors:
        params = tensors.params()
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_NAMES)
    tokenizer = folder if has_tokenizer else None
    return Weights(config=config, params=params, state={}, step=0, tokenizer=tokenizer, folders=(folder,))


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A trained model, and what it was trained with."""

    model: Any
    """The `nnx.Module`, with dropout off, on the first device."""
    tokenizer: Tokenizer | None
    """Text to ids and back; None if the model was trained on tokens alone."""
    config: Config
    """The fields of the run, with the size of its vocabulary."""
    step: int
    """Optimizer steps done; 0 for a Hugging Face model, and for files without a step."""


def load_run(run: str | Path, step: int | None = None, *, best: bool = False) -> LoadedRun:
    """The model of a run, of an export, or of a Hugging Face folder, ready to be called; also a model of your own.

    A function of yours that makes the model (`model: MODULE:FUNCTION`) is imported, from the current folder too.

    Args:
        run: the folder, or RUN@STEP.
        step: the checkpoint of this step; by default the newest.
        best: the checkpoint with the lowest val_loss; the newest if none was validated.

    Raises:
        ValueError: the folder has no model, no weights, or none of that step; or its module cannot be imported.
    """
    weights = weights_of(run, step=step, best=best)
    tokenizer = None if weights.tokenizer is None else Tokenizer.load(weights.tokenizer)
    return LoadedRun(model=model_of(weights, run), tokenizer=tokenizer, config=weights.config, step=weights.step)


def load_transformer(path: str | Path, *, best: bool = True) -> Any:
    """The model of `Transformer.from_pretrained`."""
    weights = weights_of(path, best=best)
    if weights.config.model is not None:
        raise UserError(
            f"{path} has model {weights.config.model!r}, which is no Transformer: load it with "
            f"roxxel_dist.load_run({str(path)!r}).model, from the folder that has that module"
        )
    return model_of(weights, path)


def model_of(weights: Weights, path: str | Path, mesh: Mesh | None = None) -> Any:
    """The module of some weights, with dropout off; ValueError, which names `path`, if the config does not fit. It is
    divided over a mesh of several devices as in training; without one it lies on the first device."""
    mesh = mesh or first_device()
    traced = trace_module(model_builder(weights.config), mesh)
    parts = traced.split
    # With adapters in a user-defined model, a run does not store the frozen weights: the model creates them.
    frozen = [name for name in parts.frozen.names if weights.config.model is None or name in weights.params]
    like = {name: traced.shapes[name] for name in (*parts.params.names, *frozen)}
    if wrong := files.difference(files.shapes(weights.params), files.shapes(like), whole=False):
        raise UserError(f"the weights in {path} are of another model than its config ({wrong}): put the right back")
    state = _state_of(weights, {name: traced.shapes[name] for name in parts.rest.names}, parts.state_names, path)
    made = [name for name in (*parts.frozen.names, *parts.hparams.names) if name not in frozen]

    def others(state: Leaves) -> Any:
        """Computes only what is used: no initial weights."""
        first = traced.compute(parts.rest.names)
        rest = first | files.data_to_keys(state, {name: jnp.asarray(first[name]) for name in state})
        return rest, traced.compute(made)

    is_divided = mesh.size > 1
    with jax.set_mesh(mesh):
        rest, inputs = jax.jit(others, out_shardings=NamedSharding(mesh, P()) if is_divided else None)(state)

    def placed(part: Part) -> Leaves:
        leaves = {}
        for name, spec, axes in zip(part.names, part.partition_spec, part.axes, strict=True):
            if name in weights.params:
                array = weights.params[name]
                place = parameter_sharding(name, array.shape, mesh, spec, mesh.shape[FSDP] > 1, axes)
                leaves[name] = jax.device_put(array, place) if is_divided else jnp.asarray(array)
        return leaves

    inputs |= {name: leaf for name, leaf in placed(parts.frozen).items() if name in frozen}
    return parts.merge(placed(parts.params), rest, inputs, training=False)


def first_device() -> Mesh:
    """The first device of this process, with the axes of training: a model of the user's own may name them."""
    return make_mesh(devices=jax.local_devices()[:1])


def _state_of(weights: Weights, like: Leaves, needed: Collection[str], path: str | Path) -> Leaves:
    """The state in some weights, of the types of `like`, keys as integers; ValueError if a `needed` one lacks."""
    if lacking := [name for name in needed if name not in weights.state]:
        raise UserError(
            f"the weights in {path} lack {', '.join(lacking[:3])}, which the model {weights.config.model!r} has beside "
            f"its parameters: they were written for another model. Name the run that they "
            f"are from, with its checkpoints, or export that again"
        )
    like = {name: leaf for name, leaf in like.items() if name in weights.state}
    stored = jax.eval_shape(files.keys_to_data, like)
    known = {name: array for name, array in weights.state.items() if name in stored}
    if wrong := files.difference(files.shapes(known), files.shapes(stored), whole=False):
        raise UserError(f"the weights in {path} are of another model than its config ({wrong}): put the right back")
    return {name: jnp.asarray(weights.state[name], stored[name].dtype) for name in like}


def attention_kernel(
    config: Config,
    shapes: Sequence[Shape],
    begun_with: AttentionKernel | None = None,
    devices: Sequence[Any] | None = None,
) -> AttentionKernel:
    """The attention kernel of a run with batches of these shapes, on these devices, or on those of all processes. auto
    keeps the kernel `begun_with`. Raises ValueError if the named or kept kernel cannot run here."""
    if config.model is not None:
        return config.attention
    keeps = config.attention == "auto" and begun_with is not None
    kernel = begun_with if begun_with is not None and keeps else config.attention
    return kernel_for(kernel, _situation(config, shapes, devices), begun=keeps)


def _situation(config: Config, shapes: Sequence[Shape], devices: Sequence[Any] | None) -> Situation:
    """What attention computes in a run with whole rows."""
    return Situation(
        device=(devices or jax.devices())[0],
        key_size=key_size(config.part(ModelConfig)),
        bf16=config.use_bf16 or config.bf16_compute,
        packed=any(shape.packing == "documents" for shape in shapes),
        capped=config.attn_softcap is not None,
    )


def slower_attention(
    config: Config, shapes: Sequence[Shape], kernel: AttentionKernel, devices: Sequence[Any] | None = None
) -> str:
    """The line of a run on devices whose own kernel does not take its attention: why, and what XLA's costs; or ""."""
    if config.model is not None or kernel != "xla" or config.attention != "auto":
        return ""
    situation, model = _situation(config, shapes, devices), config.part(ModelConfig)
    native = native_kernel(situation.device)
    broken = broken_rule(native, situation)
    if broken is None:
        return ""
    length = max(shape.seq_len for shape in shapes) - 1
    moved = size(score_traffic(model.heads()[0], length, model.window if model.pattern is None else None))
    return (
        f"attention is computed by XLA, as {broken[0]}: for each row of {length:,} inputs a layer reads and writes "
        f"about {moved} of scores, which {native} keeps on the chip"
    )


def model_builder(config: Config, kernel: AttentionKernel = "auto") -> Callable[[], nnx.Module]:
    """A function that makes the model of a config whose `vocab_size` is known, with the same weights each time.
    `kernel` is the attention kernel and overrides the config: a model may be used on other devices than in training."""
    rngs = {"params": config.seed, "dropout": config.seed + 1}
    if config.model is None:
        shape = dataclasses.replace(config.part(ModelConfig), attention=kernel)
        return TransformerBuilder(shape, **rngs)
    make = import_function("model", config.model)

    def build() -> nnx.Module:
        own = copy.deepcopy(config)  # the user's function may change it
        own.model_args = own.model_args or {}
        streams = nnx.Rngs(config.seed + 2, **rngs)
        model = call_function("model", str(config.model), make, "def build(config, rngs)", own, streams)
        if not isinstance(model, nnx.Module):
            raise UserError(
                f"model is {config.model!r}: it returned a {type(model).__name__}, and must return an nnx.Module"
            )
        return model

    if config.parametrization == "standard":
        return build
    build_base = model_builder(_at_base_width(config))

    def build_scaled() -> nnx.Module:
        model = build()
        rescale_to(model, build_base())
        return model

    return build_scaled


def _at_base_width(config: Config) -> Config:
    """The config of the same model at its base width, with the standard parametrization."""
    fields: dict[str, Any] = {"dim": config.base_dim}
    if config.base_widths is not None:
        fields = dict(import_function("base_widths", config.base_widths)(copy.deepcopy(config)))
        if unfit := sorted(set(fields) - set(config.to_dict())):
            raise UserError(
                f"base_widths is {config.base_widths!r}: it returned {unfit[0]!r}, and must return fields of the config"
            )
    elif config.base_dim is None:
        raise UserError("parametrization is mup: set base_dim to the dim for which lr was searched, or base_widths")
    return dataclasses.replace(config, **fields, parametrization="standard", base_dim=None, base_widths=None)


def parameter_widths(config: Config, build: Callable[[], nnx.Module]) -> dict[str, Width]:
    """The factor by which each parameter is wider than at its base width, with mup; otherwise empty."""
    if config.parametrization == "standard":
        return {}
    return widths(*(nnx.eval_shape(make) for make in (build, model_builder(_at_base_width(config)))))
