"""The run whose weights another one begins with or, with adapters, stands on.

A checkpoint of adapters holds nothing of what they stand on: it names the run and the step, and keeps a fingerprint of
the weights, by which they are known again wherever the run has been moved to.
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.distributed import broadcast_from_primary, is_primary
from roxxel_dist.model.lora import A, B, merged, target_of
from roxxel_dist.train import scan_layers as restack
from roxxel_dist.train.checkpoint import files
from roxxel_dist.train.checkpoint.manager import NEWEST
from roxxel_dist.train.checkpoint.metadata import CheckpointRef
from roxxel_dist.train.checkpoint.store import CheckpointStore
from roxxel_dist.train.hf_folder import HfFolder, is_hf_folder
from roxxel_dist.train.train_state import Leaves
from roxxel_dist.train.weight_files import has_tensors

BASE, SCALES = "base", "scales"
"""What a checkpoint of adapters says beside its arrays: what they stand on, and what each of them counts."""
READ_AT_ONCE = 1 << 28
"""Bytes of weights in memory, as a rule, while their fingerprint is taken."""
READ_LIMIT_S = 3600.0


class Base(NamedTuple):
    """Weights of another run."""

    run: Path
    step: int
    """0 for a folder of Hugging Face, which has none."""
    asked: str
    """The `init_from` that named it."""
    fingerprint: str = ""
    """Of its weights; empty where nobody needs to know them again."""

    @property
    def place(self) -> CheckpointRef:
        """The run and the step."""
        return CheckpointRef(self.run, self.step or None)

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "run": str(self.run.absolute())}

    @classmethod
    def of(cls, saved: Mapping[str, Any], init_from: str | None = None) -> "Base":
        """From what a checkpoint keeps.

        Args:
            saved: its `state()`.
            init_from: where the run looks for it now; another text than then names its new place, as the same one does
                where the base is no longer at its old one.
        """
        base = cls(**{**saved, "run": Path(saved["run"])})
        same = init_from is None or os.path.abspath(init_from) == os.path.abspath(base.asked)
        if init_from is None or (same and base.run.exists()):
            return base
        moved = CheckpointRef.parse(init_from)
        return base._replace(run=moved.run, step=base.step if moved.step is None else moved.step, asked=init_from)


@contextlib.contextmanager
def open_checkpoint(what: str, wanted: CheckpointRef) -> Iterator[tuple[CheckpointStore, int]]:
    """The checkpoints of a run that is only read, and the step meant: the newest where none is named.

    Args:
        what: what wants it, for messages.
        wanted: the checkpoint.

    Raises:
        ValueError: there is no such checkpoint.
    """
    store = CheckpointStore(wanted.run / "checkpoints", read_only=True)
    try:
        kept = store.steps()
        if not kept:
            raise ValueError(f"{what} is {wanted}: {wanted.run} has no checkpoint; {_instead(wanted.run)}")
        step = kept[-1] if wanted.step is None else wanted.step
        if step not in kept:
            raise ValueError(
                f"{what} is {wanted}: {wanted.run} has no checkpoint of step {step}; kept are "
                f"{', '.join(map(str, kept))} (a run keeps more with keep_every, keep_steps or max_to_keep)"
            )
        yield store, step
    finally:
        store.close()


def _instead(run: Path) -> str:
    if (run / NEWEST).is_file() or has_tensors(run):
        return (
            "it has weights alone, as an export; name the run that it is from, or what `roxxel-dist export RUN "
            "--format hf --out DIR` makes of that"
        )
    return "name the folder of a run that has"


def find_checkpoint(init_from: str) -> CheckpointRef:
    """The checkpoint that a run has its weights from; a folder of Hugging Face has no step.

    Raises:
        ValueError: there is none such.
    """
    if is_hf_folder(CheckpointRef.parse(init_from).run):
        return CheckpointRef.parse(init_from)
    with open_checkpoint("init_from", CheckpointRef.parse(init_from)) as (_, step):
        return CheckpointRef(CheckpointRef.parse(init_from).run, step)


@contextlib.contextmanager
def _errors_of(wanted: CheckpointRef) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"init_from is {wanted}: {error}") from error


def check_weights(wanted: CheckpointRef, like: dict[str, Any]) -> None:
    """Raises ValueError where the parameters `like`, or their shapes, are of another model than the checkpoint."""
    if is_hf_folder(wanted.run):
        with _errors_of(wanted), HfFolder(wanted.run) as folder:
            return folder.check_params(like)
    with open_checkpoint("init_from", wanted) as (store, step), _errors_of(wanted):
        base = _stands_on(wanted.run, store.meta(step))
        if base is None:
            restack.check_params(store, step, like)
            return None
    return check_weights(base.place, like)


def params_loader(wanted: CheckpointRef) -> Callable[[Leaves], Leaves]:
    """What gives the parameters of a checkpoint, placed as those that it is shown; ValueError if of another model.

    Of a run of adapters they are the merged ones.
    """

    def load(like: Leaves) -> Leaves:
        if is_hf_folder(wanted.run):
            with _errors_of(wanted), HfFolder(wanted.run) as folder:
                return folder.restore_params(like)
        with open_checkpoint("init_from", wanted) as (store, step), _errors_of(wanted):
            saved = store.meta(step)
            base = _stands_on(wanted.run, saved)
            if base is None:
                return restack.restore_params(store, step, like)
            plain = base_params_loader(base)(like)
            names = [name + end for name in saved[SCALES] for end in (A, B)]
            wanted_shapes = store.param_shapes(step)
            whole = {name: _whole(wanted_shapes[name], like) for name in names}
            return _merged(plain, *restack.adapters(store.restore_params(step, whole), saved[SCALES], like))

    return load


def base_of(run: Path, saved: Mapping[str, Any]) -> Base:
    """What the adapters of a checkpoint stand on: where the config of their run says that it is now.

    Args:
        run: the run directory; a run of a bare Trainer has no config.
        saved: the `Base.state()` that the checkpoint keeps.
    """
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Base.of(saved)
    return Base.of(saved, (config or {}).get("init_from"))


def _stands_on(run: Path, saved: Mapping[str, Any]) -> Base | None:
    """What the weights of a checkpoint of a run stand on; None where it holds all of them.

    Raises:
        ValueError: they stand on what a function of the user's makes.
    """
    if SCALES not in saved:
        return None
    if BASE not in saved:
        raise ValueError("it holds adapters alone, for weights that are in no run: name a run that holds all weights")
    return base_of(run, saved[BASE])


def _whole(shape: jax.ShapeDtypeStruct, like: Leaves) -> Any:
    """The shape, all of it wherever `like` is."""
    place = next(iter(like.values())).sharding
    place = NamedSharding(place.mesh, P()) if isinstance(place, NamedSharding) else place
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _merged(plain: Leaves, adapters: Leaves, scales: Mapping[str, float]) -> Leaves:
    """`merge_adapters`, each kernel where it lies."""
    result = dict(plain)
    for name, scale in scales.items():
        target = target_of(name)
        add = jax.jit(merged, out_shardings=plain[target].sharding, static_argnums=3)
        result[target] = add(plain[target], adapters[name + A], adapters[name + B], scale)
    return result


def below(saved: Mapping[str, Any], init_from: str | None) -> Callable[[Leaves], Leaves] | None:
    """What gives the weights that the adapters of a checkpoint stand on; None where it holds all weights.

    Args:
        saved: what the checkpoint says beside its arrays.
        init_from: of the run, now.
    """
    return base_params_loader(Base.of(saved[BASE], init_from)) if BASE in saved else None


def base_params_loader(base: Base) -> Callable[[Leaves], Leaves]:
    """What gives the weights that adapters stand on, as `params_loader` does; it asks for them when it is called.

    Raises, then:
        ValueError: they are gone, or others.
    """

    def load(like: Leaves) -> Leaves:
        check_base(base)
        return params_loader(base.place)(like)

    return load


def check_base(base: Base) -> None:
    """Raises ValueError where the weights that adapters stand on are gone, or others."""
    cure = f"put {base.place} back or, if it was moved, name its new place: resume with init_from=NEW_PLACE"
    try:
        found = fingerprint(base.place)
    except ValueError as error:
        raise ValueError(f"the weights that the adapters stand on are gone: {error}; {cure}") from error
    if base.fingerprint and found != base.fingerprint:
        raise ValueError(
            f"init_from is {base.place}: its weights are not those that the adapters were trained for "
            f"({base.fingerprint}, now {found}): {cure}"
        )


def fingerprint(wanted: CheckpointRef) -> str:
    """Of the weights of a checkpoint: 16 letters, the same on every rank. Rank 0 reads them.

    Raises:
        ValueError: there is no such checkpoint, or it cannot be read.
    """
    if is_hf_folder(wanted.run):
        return _agreed(wanted, _of_hugging_face(wanted.run))
    with open_checkpoint("init_from", wanted) as (store, step):  # by all ranks: a store asks for each of them
        with _errors_of(wanted):
            shapes = store.param_shapes(step)
        return _agreed(wanted, _of_checkpoint(store.folder / str(step), shapes))


def _agreed(wanted: CheckpointRef, parcels: Iterator[Mapping[str, np.ndarray]]) -> str:
    """The digest of what rank 0 reads, on all ranks."""
    text = ""
    if is_primary():
        try:
            text = "=" + _digest(parcels)
        except Exception as error:  # Orbax has no error of its own; the other ranks must hear of any
            text = files.cause(error)
    text = broadcast_from_primary("fingerprint of the base", text, READ_LIMIT_S)
    if not text.startswith("="):
        raise ValueError(f"init_from is {wanted}: its weights cannot be read ({text})")
    return text[1:]


def _of_hugging_face(run: Path) -> Iterator[Mapping[str, np.ndarray]]:
    with HfFolder(run) as folder:
        for name in sorted(folder.tensors):
            yield {name: folder.read(name)}


def _of_checkpoint(folder: Path, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[Mapping[str, np.ndarray]]:
    """Parameters by name, in the order of their names, not all of them at once."""
    sizes = itertools.accumulate(math.prod(shapes[name].shape) * shapes[name].dtype.itemsize for name in sorted(shapes))
    parcels = itertools.groupby(zip(sorted(shapes), sizes, strict=True), key=lambda one: one[1] // READ_AT_ONCE)
    for _, names in parcels:
        yield files.read_params(folder, {name: shapes[name] for name, _ in names})


def _digest(parcels: Iterator[Mapping[str, np.ndarray]]) -> str:
    """The SHA-256, cut, of the names, shapes, types and bytes of parameters."""
    digest = hashlib.sha256()
    for arrays in parcels:
        for name in sorted(arrays):
            array = np.ascontiguousarray(arrays[name])
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]
