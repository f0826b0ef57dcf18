"""A model's parameters in one file, for programs that shall read no checkpoint.

    {"step": 300, "params": {"embedding.embedding": float32[512, 64], "blocks.0.attention.qkv.kernel": …}}

in flax's msgpack format: `flax.serialization.msgpack_restore(path.read_bytes())` gives it back, as NumPy arrays of the
type that the run trained in (bfloat16 stays bfloat16). The names are those of the checkpoint, and of
`train.state.take_apart`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from flax import serialization

from roxxel_dist.data.commit import sync_folder

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
