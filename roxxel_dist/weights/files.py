"""Files of weights for other programs: msgpack, and folders of safetensors.

A model's parameters in one file:

    {"step": 300, "params": {"embedding.embedding": float32[512, 64], "blocks.attention.qkv.kernel": …},
     "state": {"norm.mean": float32[64], …},
     "digests": {"embedding.embedding": "ac37…", "state:norm.mean": "5f02…", …}, "digest": "51e0…"}

in flax's msgpack format: `flax.serialization.msgpack_restore(path.read_bytes())` gives it back, as NumPy arrays of the
type that the run trained in (bfloat16 stays bfloat16). The names are those of the checkpoint, and of
`model.split.split_module`. "state" has what a model of the user's has beside its parameters, such as running
statistics, and its random keys as integers; it is left out where there is none.

Arrays by name in one file of safetensors, or in several that an index tells of, as Hugging Face has them:

    model.safetensors, or model-00001-of-00002.safetensors … and model.safetensors.index.json

The name of an array of the state begins with "state:" there.

Both carry digests (xxh3-128), which are compared when they are read: of each array, and of all of a msgpack file but
the last 32 bytes, which are that one.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import msgpack
import numpy as np
from flax import serialization
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from roxxel_dist.checkpoint.digests import LENGTH, digest, is_sealed, seal
from roxxel_dist.cluster.distributed import broadcast_from_primary, gather_to_primary, process_count, process_index
from roxxel_dist.process.durable import write_file
from roxxel_dist.process.exit_codes import UserError

NEWEST, BEST = "model_weights.msgpack", "best_model_weights.msgpack"
"""The files of a run that hold the weights of its newest and of its best checkpoint."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STEP, PARAMS, STATE, DIGESTS, DIGEST = "step", "params", "state", "digests", "digest"
"""In what the files say about themselves."""
OF_STATE = STATE + ":"
"""The prefix of the state's names where they stand beside those of parameters."""
LIMIT = 2_000_000_000
"""Bytes that the arrays of one msgpack file stay below."""
CHECK_LIMIT_S = 3600.0
"""Seconds that processes may differ in how long they read their shares."""
HEAD = 64
"""Bytes at the beginning of a msgpack file that are enough to know the step."""


class TensorFiles:
    """The arrays of a folder, open for reading. Raises ValueError where there are none, or a file is damaged or
    missing. The message names it."""

    def __init__(self, folder: Path) -> None:
        self.bytes: int = 0
        """Of the files together."""
        self._file_of: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        """Of the arrays, by name; empty of files that this program has not written."""
        self._folder: Path = folder
        with contextlib.ExitStack() as opened:
            paths, named = _paths(folder)
            for path in paths:
                file = opened.enter_context(_open(path))
                # A file may still have what the index names in another one, which has taken its place.
                own = [name for name in file.keys() if named.get(name, path.name) == path.name]  # noqa: SIM118
                if twice := self._file_of.keys() & set(own):
                    raise UserError(f"{folder}: {min(twice)} is in {path.name} and in another file: remove one of them")
                self._file_of |= dict.fromkeys(own, file)
                self.bytes += path.stat().st_size
                digests = _digests_in(path, file)
                self.digests |= {name: digests[name] for name in own if name in digests}
            if missing := named.keys() - self._file_of.keys():
                name = min(missing)
                raise UserError(f"{folder}: {named[name]} has no {name}, by {INDEX} it has: put the right files back")
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Let go of the files."""
        self._file_of = {}
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array, by its name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def kind_of(self, name: str) -> str:
        """The type of an array, as safetensors calls it: "F32", "BF16"."""
        return self._file_of[name].get_slice(name).get_dtype()

    def step(self) -> int | None:
        """The `step` that `write_tensors` wrote into the files; None for files of other programs."""
        steps = {(file.metadata() or {}).get(STEP, "") for file in self._file_of.values()}
        text = steps.pop() if len(steps) == 1 else ""
        return int(text) if text.isdecimal() else None

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of an array, or all of it, which is compared with its digest; ValueError where it does not agree."""
        if index:
            return self._file_of[name].get_slice(name)[index]
        array = self._file_of[name].get_tensor(name)
        if name in self.digests and digest(array) != self.digests[name]:
            raise UserError(f"{self._folder}: {name} does not agree with its digest: put the file back")
        return array

    def check_together(self) -> None:
        """Compare all arrays that have a digest with it; each process reads its share. All call it together. Raises
        ValueError, on all, where one does not agree."""
        problem = ""
        try:
            for name in sorted(self.digests)[process_index() :: process_count()]:
                self.read(name)
        except (ValueError, SafetensorError) as error:
            problem = str(error)
        problem = next(filter(None, gather_to_primary("weights", problem, CHECK_LIMIT_S)), "")
        if problem := broadcast_from_primary("weights", problem, CHECK_LIMIT_S):
            raise UserError(problem)


def has_tensors(folder: Path) -> bool:
    """Whether a folder holds such files."""
    return (folder / WHOLE).is_file() or (folder / INDEX).is_file()


def _paths(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """(the files, in which of them each array is by their index)."""
    index, whole = folder / INDEX, folder / WHOLE
    if whole.is_file() and not index.is_file():
        return [whole], {}
    if not index.is_file():
        raise UserError(f"{folder} has no weights: put {WHOLE}, or all files and their {INDEX}, there")
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(places.values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is no index of safetensors ({error!r}): put the right file back") from error
    if whole.is_file() and names != [WHOLE]:
        raise UserError(f"{folder} has {WHOLE}, and {INDEX} names other files: remove the one that is not meant")
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}, which {INDEX} names: put all files of the model there")
    return [folder / name for name in names], places


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except SafetensorError as error:
        raise UserError(f"{path} is no file of safetensors, or is damaged ({error}): put it back") from error


def _digests_in(path: Path, file: Any) -> dict[str, str]:
    text = (file.metadata() or {}).get(DIGESTS)
    try:
        digests = {} if text is None else json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged: its digests cannot be read ({error}): put it back") from error
    if digests and digests.keys() != set(file.keys()):
        raise UserError(f"{path} is damaged: its digests are of other arrays: put it back")
    return digests


def write_tensors(
    folder: Path, arrays: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], limit: int, step: int
) -> None:
    """Write arrays into one file of an empty folder, or into several where they take more than `limit` bytes.

    The arrays come by name in the order of `sizes`, their bytes, and are made one by one, so that one file's are in
    memory at a time; one that is larger than `limit` has a file of its own. Each file says the step of the run.
    """
    files: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if files[-1] and taken + size > limit:
            files.append([])
            taken = 0
        files[-1].append(name)
        taken += size
    metadata = {"format": "pt", STEP: str(step)}  # the first: transformers refuses files that do not say it
    if len(files) == 1:
        _save(dict(arrays), folder / WHOLE, metadata)
        return
    where = {}
    for i, names in enumerate(files):
        path = folder / f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _save(dict(next(arrays) for _ in names), path, metadata)
        where |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _save(arrays: dict[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    digests = {name: digest(array) for name, array in arrays.items()}
    try:
        save_file(arrays, path, {**metadata, DIGESTS: json.dumps(digests)})
    except SafetensorError as error:  # it has no number of the system's, only its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_weights(
    path: Path, step: int, params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray] = MappingProxyType({})
) -> None:
    """Write parameters and state, of less than `LIMIT` bytes together, and the steps done in one instant. They are in
    memory about three times while it lasts. Raises OSError, and the file is as it was."""
    digests = {name: digest(np.asarray(array)) for name, array in join_state(params, state).items()}
    arrays = {PARAMS: dict(params), STATE: dict(state)} if state else {PARAMS: dict(params)}
    tree = {STEP: step, **arrays, DIGESTS: digests, DIGEST: "0" * LENGTH}
    # In place: a copy of the tree would have its names sorted, and `step_of` reads the first.
    write_file(path, seal(serialization.msgpack_serialize(tree, in_place=True)))


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """(parameters by name, steps done) of a file; see `read_model`."""
    params, _, step = read_model(path)
    return params, step


def join_state(params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters and state in one dictionary."""
    return {**params, **{OF_STATE + name: array for name, array in state.items()}}


def read_model(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """(parameters by name, state by name, steps done) of a file of `write_weights`; the arrays are read-only. Raises
    OSError where it cannot be read, and ValueError where it is no such file."""
    data = path.read_bytes()
    try:
        tree: Any = serialization.msgpack_restore(data)
        if is_sealed(data) is False:
            digests = tree.get(DIGESTS, {})
            arrays = join_state(tree[PARAMS], tree.get(STATE, {}))
            wrong = [name for name, array in arrays.items() if digest(array) != digests.get(name)]
            raise UserError(f"{', '.join(wrong[:3]) or 'the file'} does not agree with its digest")
        return tree[PARAMS], tree.get(STATE, {}), tree[STEP]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise UserError(f"{path} holds no weights, or not all of them ({error!r}): put the right file back") from error


def step_of(path: Path) -> int | None:
    """The step whose weights are in a file; None where there is no such file. Only its beginning is read."""
    try:
        with path.open("rb") as file:
            reader = msgpack.Unpacker(raw=False)
            reader.feed(file.read(HEAD))
        reader.read_map_header()
        name, step = reader.unpack(), reader.unpack()
    except (OSError, ValueError, msgpack.UnpackException):
        return None
    return step if name == STEP and isinstance(step, int) else None
