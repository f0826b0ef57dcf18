"""Files of weights for other programs: msgpack, and folders of safetensors.

A model's parameters in one file:

    {"step": 300, "params": {"embedding.embedding": float32[512, 64], "blocks.0.attention.qkv.kernel": …}}

in flax's msgpack format: `flax.serialization.msgpack_restore(path.read_bytes())` gives it back, as NumPy arrays of the
type that the run trained in (bfloat16 stays bfloat16). The names are those of the checkpoint, and of
`train.train_state.split_module`.

Arrays by name in one file of safetensors, or in several that an index tells of, as Hugging Face has them:

    model.safetensors, or model-00001-of-00002.safetensors … and model.safetensors.index.json
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgpack
import numpy as np
from flax import serialization
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from roxxel_dist.cluster.durable import write_file

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STEP, PARAMS = "step", "params"
"""In what the files say about themselves."""
LIMIT = 2_000_000_000
"""Bytes that the parameters of one msgpack file stay below."""
HEAD = 64
"""Bytes at the beginning of a msgpack file that are enough to know the step."""


class TensorFiles:
    """The arrays of a folder, open for reading.

    Raises ValueError where there are none, or a file is damaged or missing. The message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes: int = 0
        """Of the files together."""
        self._file_of: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            for path in _paths(folder):
                file = opened.enter_context(_open(path))
                self._file_of |= dict.fromkeys(file.keys(), file)
                self.bytes += path.stat().st_size
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
        """Of every array, by its name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def step(self) -> int | None:
        """The step that `write_tensors` was told; None of others' files."""
        steps = {(file.metadata() or {}).get(STEP, "") for file in self._file_of.values()}
        text = steps.pop() if len(steps) == 1 else ""
        return int(text) if text.isdecimal() else None

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of an array, or all of it."""
        if not index:
            return self._file_of[name].get_tensor(name)
        return self._file_of[name].get_slice(name)[index]


def has_tensors(folder: Path) -> bool:
    """Whether a folder holds such files."""
    return (folder / WHOLE).is_file() or (folder / INDEX).is_file()


def _paths(folder: Path) -> list[Path]:
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(f"{folder} has no weights: put {WHOLE}, or all files and their {INDEX}, there")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors ({error!r}): put the right file back") from error
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}, which {INDEX} names: put all files of the model there")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of safetensors, or is damaged ({error}): put it back") from error


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
        save_file(dict(arrays), folder / WHOLE, metadata)
        return
    where = {}
    for i, names in enumerate(files):
        path = folder / f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(dict(next(arrays) for _ in names), path, metadata)
        where |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def write_weights(path: Path, step: int, params: Mapping[str, np.ndarray]) -> None:
    """Write parameters, of less than `LIMIT` bytes together, and the steps done in one instant.

    They are in memory about three times while it lasts. Raises OSError, and the file is as it was.
    """
    # In place: a copy of the tree would have its names sorted, and `step_of` reads the first.
    write_file(path, serialization.msgpack_serialize({STEP: step, PARAMS: dict(params)}, in_place=True))


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """(parameters by name, steps done) of a file that `write_weights` has written; the arrays are read-only.

    Raises OSError where it cannot be read, and ValueError where it is no such file.
    """
    try:
        tree: Any = serialization.msgpack_restore(path.read_bytes())
        return tree[PARAMS], tree[STEP]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"{path} holds no weights, or not all of them ({error!r}): put the right file back") from error


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
