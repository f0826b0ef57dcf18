"""Weights that a run begins with or, with adapters, stands on: those of another run, or of a folder of Hugging Face.

A checkpoint of adapters holds nothing of its base: it names the run and the step, with a fingerprint of the weights.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.checkpoint.files import shapes as shapes_of
from roxxel_dist.checkpoint.metadata import CHECKPOINTS, BaseModelRef, CheckpointMetadata, CheckpointRef
from roxxel_dist.checkpoint.reader import CheckpointReader
from roxxel_dist.cluster.distributed import is_primary
from roxxel_dist.data.dataset import Roxxel
from roxxel_dist.data.tokenizer.tokenizer import TOKENIZER_FILE, TOKENIZER_NAMES, Tokenizer
from roxxel_dist.model.lora import LORA_A_SUFFIX, LORA_B_SUFFIX, adapter_shapes, merge_adapter, target_of
from roxxel_dist.model.split import Leaves
from roxxel_dist.place.directory import CONFIG
from roxxel_dist.place.run_place import bucket_run, local_run
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import load_yaml
from roxxel_dist.utils.voice import argument
from roxxel_dist.weights.files import NEWEST, TensorFiles, has_tensors
from roxxel_dist.weights.hf_folder import HfFolder, fields_of, is_hf_folder

INITIALIZED_FROM = "initialized_from"
"""The key, in a run's record, of the checkpoint that its weights come from."""
OF_METADATA, OF_DIGESTS = "metadata:", "digests:"
"""The prefix of a fingerprint: from the metadata of a checkpoint or folder, or from the digests of its weights."""


@contextlib.contextmanager
def open_checkpoint(field: str, ref: CheckpointRef) -> Iterator[tuple[CheckpointReader, int]]:
    """The checkpoints of a run that is only read, and the step meant: the newest where none is named. Raises ValueError
    where there is no such checkpoint; the message begins with `field`, what names it."""
    bucket = bucket_run(ref.run)
    folder, remote = (ref.run, None) if bucket is None else (bucket.folder, bucket.checkpoints)
    store = CheckpointReader(folder / CHECKPOINTS, remote=remote)
    try:
        kept = store.steps()
        if not kept:
            raise UserError(f"{field} is {ref}: {ref.run} has no checkpoint; {_instead(ref.run)}")
        step = kept[-1] if ref.step is None else ref.step
        if step not in kept:
            below, above = [s for s in kept if s < step][-1:], [s for s in kept if s > step][:1]
            raise UserError(
                f"{field} is {ref}: {ref.run} has no checkpoint of step {step}; nearest is "
                f"{' or '.join(map(str, below + above))}, kept are {', '.join(map(str, kept))} (a run keeps more with "
                f"keep_every, keep_steps or max_to_keep)"
            )
        yield store, step
    finally:
        store.close()


def _instead(run: Path) -> str:
    if (run / NEWEST).is_file() or has_tensors(run):
        own = load_yaml(run / CONFIG).get("model") is not None
        more = "" if own else ", or what `roxxel-dist export RUN --format hf --out DIR` makes of that"
        return f"it has weights alone, as an export; name the run that it is from{more}"
    return "name the folder of a run that has"


def find_checkpoint(init_from: str) -> CheckpointRef:
    """The checkpoint that a run has its weights from; a folder of Hugging Face has no step. ValueError if not there."""
    ref = CheckpointRef.parse(init_from)
    if is_hf_folder(ref.run):
        return ref
    with open_checkpoint("init_from", ref) as (_, step):
        return ref._replace(step=step)


@contextlib.contextmanager
def _errors_of(source: CheckpointRef) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"init_from is {source}: {error}") from error


def check_weights(source: CheckpointRef, like: dict[str, Any]) -> None:
    """Raises ValueError where the parameters `like`, or their shapes, are of another model than the checkpoint."""
    if is_hf_folder(source.run):
        with _errors_of(source), HfFolder(source.run) as folder:
            return folder.check_params(like)
    with open_checkpoint("init_from", source) as (store, step), _errors_of(source):
        base = base_of(source.run, store.metadata(step))
        if base is None:
            store.check_params(step, like)
            return None
    return check_weights(base.checkpoint, like)


def load_params(source: CheckpointRef, like: Leaves, state: Leaves) -> Leaves:
    """The parameters and the state of a checkpoint, placed as `like` and `state`; of adapters the merged parameters.

    The parameters are those that it is evaluated with: their average, where the run keeps one.

    State that the checkpoint does not have, or has in another shape, is left out with a line for the user. Raises
    ValueError where the parameters are of another model.
    """
    if is_hf_folder(source.run):
        with _errors_of(source), HfFolder(source.run) as folder:
            return folder.restore_params(like)
    with open_checkpoint("init_from", source) as (store, step), _errors_of(source):
        metadata = store.metadata(step)
        base, known = base_of(source.run, metadata), _known_state(source, store.rest_shapes(step), state)
        rest = {"rest": known} if known else {}
        if base is None:
            restored = store.restore_evaluated(step, {"params": like, **rest})
            return restored["params"] | restored.get("rest", {})
        merged_weights, saved = dict(load_base_params(base, like, {})), store.param_shapes(step)
        scales = metadata.adapter_scales or {}
        lora_a = next(leaf for name, leaf in saved.items() if name.endswith(LORA_A_SUFFIX))
        place = next(iter(like.values())).sharding
        place = NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else place
        shapes: dict[str, Any] = {}
        for name in scales:
            pair = adapter_shapes(name, like[target_of(name)].shape, lora_a.shape[-1])
            for suffix, shape in zip((LORA_A_SUFFIX, LORA_B_SUFFIX), pair, strict=True):
                shapes[name + suffix] = jax.ShapeDtypeStruct(shape, lora_a.dtype, sharding=place)
        restored = store.restore_evaluated(step, {"params": shapes, **rest})
        adapters = restored["params"]
        for name, scale in scales.items():
            target = target_of(name)
            a, b = adapters[name + LORA_A_SUFFIX], adapters[name + LORA_B_SUFFIX]
            add = jax.jit(merge_adapter, out_shardings=merged_weights[target].sharding, static_argnums=3)
            merged_weights[target] = add(merged_weights[target], a, b, scale)
        return merged_weights | restored.get("rest", {})


def _known_state(source: CheckpointRef, saved: Mapping[str, list[Any]], state: Leaves) -> Leaves:
    """The part of a model's state that a checkpoint has in the same shape."""
    wanted = shapes_of(state)
    known = {name: leaf for name, leaf in state.items() if name in saved and saved[name][:-1] == wanted[name][:-1]}
    others = [name for name in state if name not in known]
    if others and is_primary():
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        print(
            f"roxxel-dist: {source} has no {', '.join(others[:3])}{more} of this model's shape: what the model is made "
            f"with is used",
            flush=True,
        )
    return known


def load_base_params(base: BaseModelRef, like: Leaves, state: Leaves) -> Leaves:
    """`load_params` of the base of adapters; raises ValueError where that is gone or another one."""
    check_base(base)
    return load_params(base.checkpoint, like, state)


def base_of(run: Path, metadata: CheckpointMetadata) -> BaseModelRef | None:
    """The base of a run's adapters, where the config of that run says that it is now; None of a run without adapters.
    Raises ValueError where the adapters stand on what a function of the user's makes."""
    if metadata.adapter_scales is None:
        return None
    if metadata.base is None:
        raise UserError("it holds adapters alone, for weights that are in no run: name a run that holds all weights")
    path = local_run(run) / CONFIG
    return (
        metadata.base.resolve(load_yaml(path).get("init_from")) if path.exists() else metadata.base
    )  # of a bare Trainer


def check_base(base: BaseModelRef) -> None:
    """Raises ValueError where the weights that adapters stand on are gone, or others."""
    cure = (
        f"put {base.checkpoint} back or, if it was moved, name its new place: resume with "
        f"{argument('init_from', 'NEW_PLACE')}"
    )
    try:
        now = fingerprint(base.checkpoint)
    except ValueError as error:
        raise UserError(f"the base weights of the adapters are missing: {error}; {cure}") from error
    if base.fingerprint and now != base.fingerprint:
        raise UserError(
            f"init_from is {base.checkpoint}: its weights are not those that the adapters were trained for "
            f"({base.fingerprint}, now {now}): {cure}"
        )


def fingerprint(source: CheckpointRef) -> str:
    """A hash that identifies the base of adapters: of the digests of its weights.

    Of a folder of Hugging Face that has none: of the names and shapes of its tensors and the size of its files. Raises
    ValueError if it is gone.
    """
    about: Any = None
    if is_hf_folder(source.run):
        with _errors_of(source), TensorFiles(source.run) as files:
            about = [files.bytes, files.shapes()]
            digests = json.dumps(sorted(files.digests.items())) if files.digests else ""
    else:
        with open_checkpoint("init_from", source) as (store, step), _errors_of(source):
            digests = store.fingerprint(step)
    kind, text = (OF_DIGESTS, digests) if digests else (OF_METADATA, json.dumps(about, sort_keys=True))
    return kind + hashlib.sha256(text.encode()).hexdigest()[:16]


def add_base(config: Any) -> tuple[Any, str]:
    """(the config with an `init_from` if it wants adapters, a line for people if that comes from a run's config).

    Where `use_lora` was turned on in the config of a run that has no adapters, that run is meant; with the config of
    one that has some, their base. Raises ValueError where there is no run whose weights the adapters could stand on.
    """
    if not config.use_lora or config.model is not None:
        return config, ""
    if config.of_run is not None and config.init_from == config.of_run[1]:
        run, _, adapted = config.of_run
        if adapted:
            note = (
                f"{run} has adapters itself: its base {config.init_from} is taken; adapters with init_from {run} stand "
                f"on them"
            )
            return config, note
        note = f"init_from is {run}: the config is that run's, with use_lora turned on"
        return dataclasses.replace(config, init_from=run), note
    if config.init_from is None:
        raise UserError(
            "use_lora is True, and init_from names no run: adapters need trained weights, so add "
            f"{argument('init_from', 'RUN')}, or begin with the config of a run (RUN/config.yaml)"
        )
    return config, ""


def tokenizer_of(init_from: str) -> Path:
    """The tokenizer of the run that a new one has its weights from. Raises ValueError where it has none."""
    run = CheckpointRef.parse(init_from).run
    if (path := _tokenizer_in(run)) is None:
        raise UserError(
            f"init_from is {init_from}: {run} has no {TOKENIZER_FILE}, so text cannot become the tokens that it knows; "
            f"name another run, or train on shards"
        )
    return path


def _tokenizer_in(run: Path) -> Path | None:
    """What `Tokenizer.load` reads; of a folder of Hugging Face, the folder: other files name end-of-text."""
    if is_hf_folder(run):
        return run if any((run / name).is_file() for name in TOKENIZER_NAMES) else None
    run = local_run(run)
    return run / TOKENIZER_FILE if (run / TOKENIZER_FILE).exists() else None


def check_tokenizer(init_from: str, data: Roxxel) -> None:
    """Raises ValueError if the data was made with another tokenizer than the run that the weights come from."""
    path = _tokenizer_in(CheckpointRef.parse(init_from).run)
    if path is None or data.tokenizer_fingerprint is None:
        return
    known = Tokenizer.load(path).fingerprint
    if data.tokenizer_fingerprint != known:
        raise UserError(
            f"init_from is {init_from}, whose tokenizer is {known}, and the data was made with "
            f"{data.tokenizer_fingerprint}: build the data with {path}"
        )


def take_hf_shape(config: Any) -> Any:
    """The config with the shape of the model of Hugging Face that `init_from` names; else as it is.

    A field that has its default is taken from there. `max_context` may be set smaller: the weights do not depend on it.
    Raises ValueError where a field that is set says otherwise, or the Transformer cannot be that model.
    """
    folder = None if config.init_from is None else CheckpointRef.parse(config.init_from).run
    if folder is None or config.model is not None or not is_hf_folder(folder):
        return config
    try:
        fields, usual = fields_of(folder), type(config)()
    except ValueError as error:
        raise UserError(f"init_from is {config.init_from}: {error}") from error
    changed = {}
    for name, theirs in fields.items():
        mine = getattr(config, name)
        if mine == getattr(usual, name):
            changed[name] = theirs
        elif mine != theirs and not (name == "max_context" and mine < theirs):
            raise UserError(f"{name} is {mine!r}, and the model in {folder} has {theirs!r}: leave it out")
    return dataclasses.replace(config, **changed)
