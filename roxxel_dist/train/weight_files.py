"""A model's parameters in one file, for programs that shall read no checkpoint.

    {"step": 300, "params": {"embedding.embedding": float32[512, 64], "blocks.0.attention.qkv.kernel": …}}

in flax's msgpack format: `flax.serialization.msgpack_restore(path.read_bytes())` gives it back, as NumPy arrays of the
type that the run trained in (bfloat16 stays bfloat16). The names are those of the checkpoint, and of
`train.state.take_apart`.

Folders of safetensors: arrays by name in one file, or in several that an index tells of.

    model.safetensors, or model-00001-of-00002.safetensors … and model.safetensors.index.json

as Hugging Face has them. Arrays are read slice by slice, where they are wanted.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from flax import serialization
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from roxxel_dist.data.commit import sync_folder, write_file

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STEP = "step"
"""In what the files say about themselves."""


class TensorFiles:
    """The arrays of a folder, open for reading.

    Raises:
        ValueError: there are none, or a file is damaged or missing. The message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = contextlib.ExitStack()
        self._of: dict[str, Any] = {}
        try:
            for path in _paths(folder):
                file: Any = self._open.enter_context(_opened(path))
                self._of |= dict.fromkeys(file.keys(), file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the files."""
        self._of = {}
        self._open.close()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every array, by its name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._of.items()}

    def step(self) -> int | None:
        """The step that `write_tensors` was told; None of others' files."""
        steps = {(file.metadata() or {}).get(STEP, "") for file in self._of.values()}
        text = steps.pop() if len(steps) == 1 else ""
        return int(text) if text.isdecimal() else None

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A part of an array, or all of it."""
        if not index:
            return self._of[name].get_tensor(name)
        return self._of[name].get_slice(name)[index]


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


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of safetensors, or is damaged ({error}): put it back") from error


def write_tensors(
    folder: Path, arrays: Iterator[tuple[str, np.ndarray]], sizes: Mapping[str, int], limit: int, step: int
) -> None:
    """Write arrays into one file, or into several where they take more than `limit` bytes.

    Args:
        folder: an empty one.
        arrays: (name, array), in the order of `sizes`; made one by one, so that one file's are in memory at a time.
        sizes: bytes of each.
        limit: bytes a file; an array that is larger has a file of its own.
        step: of the run, to be written into each.
    """
    files: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if files[-1] and taken + size > limit:
            files.append([])
            taken = 0
        files[-1].append(name)
        taken += size
    about = {"format": "pt", STEP: str(step)}  # the first: transformers refuses files that do not say it
    if len(files) == 1:
        save_file(dict(arrays), folder / WHOLE, about)
        return
    where = {}
    for i, names in enumerate(files):
        path = folder / f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        save_file(dict(next(arrays) for _ in names), path, about)
        where |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


STEP, PARAMS = "step", "params"
LIMIT = 2_000_000_000
"""Bytes that the parameters of one file stay below; msgpack cannot hold an array of 2 GiB."""
HEAD = 64
"""Bytes at the beginning that are enough to know the step."""
BIN_32, EXT_32, ARRAY_OF_3, NDARRAY = b"\xc6", b"\xc9", b"\x93", b"\x01"


def write_weights(path: Path, step: int, params: Mapping[str, np.ndarray]) -> None:
    """Write parameters in one instant: under a temporary name, fsynced, renamed.

    Array by array, straight from its memory: flax's own function holds the interpreter for as long as it copies.

    Args:
        path: the file; what it holds is replaced.
        step: optimizer steps done.
        params: arrays by name, of less than `LIMIT` bytes together.

    Raises:
        OSError: the file is as it was.
    """
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(step, params):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def link_weights(source: Path, path: Path) -> None:
    """Have `path` hold what `source` holds, without a second copy. Either may be replaced later without the other.

    Raises:
        OSError: `path` is as it was; a file system without hard links, perhaps.
    """
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def read_weights(path: Path) -> tuple[dict[str, np.ndarray], int]:
    """(parameters by name, steps done) of a file that `write_weights` has written; the arrays are read-only.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    try:
        found: Any = serialization.msgpack_restore(path.read_bytes())
        return found[PARAMS], found[STEP]
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


def temporary_of(path: Path) -> Path:
    """What a file is called until it is complete."""
    return path.with_name(f".{path.name}.tmp")


def _pieces(step: int, params: Mapping[str, np.ndarray]) -> Iterator[Any]:
    packer = msgpack.Packer()
    yield packer.pack_map_header(2) + packer.pack(STEP) + packer.pack(step)
    yield packer.pack(PARAMS) + packer.pack_map_header(len(params))
    for name, array in params.items():
        # As flax has it: an extension that holds the shape, the type's name and the bytes.
        about = ARRAY_OF_3 + packer.pack(array.shape) + packer.pack(array.dtype.name) + BIN_32 + _size(array.nbytes)
        yield packer.pack(name) + EXT_32 + _size(len(about) + array.nbytes) + NDARRAY + about
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _size(number: int) -> bytes:
    return number.to_bytes(4, "big")
