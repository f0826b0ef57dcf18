"""Where the blocks of arrays lie in the files that Orbax writes: an OCDBT database of zarr chunks, by tensorstore."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.train.checkpoint.digests import Bounds


class Place(NamedTuple):
    """Where the bytes of a block are."""

    file: str
    """Its path below the database."""
    offset: int
    size: int


def places(database: Path, shapes: Mapping[str, Sequence[int]]) -> dict[tuple[str, Bounds], Place]:
    """Of blocks that are stored as they are in memory, in C order, by the array's name (with dots) and their bounds.

    `shapes` are those of a block of each array, by the same names: rank 0 alone writes how an array is stored, as it
    does for all. Empty where the database is of another form; small blocks are in its index, and have no place.
    """
    try:
        store = ts.KvStore.open({"driver": "file", "path": f"{database}/"}).result()
        newest = ts.ocdbt.dump(store).result()["versions"][-1]
        if newest["root_height"]:  # an index of over 100 MB is in several nodes
            return {}
        entries = ts.ocdbt.dump(store, newest["root"]["location"]).result()["entries"]
        stored = {bytes(entry["key"]).decode(): entry for entry in entries}
        chunks: dict[str, Sequence[int]] = {**shapes} | {
            key.removesuffix("/.zarray"): _chunks(json.loads(bytes(entry["inline_value"])))
            for key, entry in stored.items()
            if key.endswith("/.zarray")
        }
        return {
            (name, _bounds(index, chunks[name])): _place(entry["indirect_value"])
            for key, entry in stored.items()
            for name, _, index in [key.rpartition("/")]
            if chunks.get(name) and "indirect_value" in entry
        }
    except (ValueError, KeyError, TypeError, IndexError):
        return {}


def _chunks(about: dict[str, Any]) -> list[int]:
    """The shape of a block of an array; empty where its bytes are not those in memory."""
    is_coded = about["compressor"] is not None or about["filters"] or about["order"] != "C" or ">" in about["dtype"]
    return [] if is_coded or about["zarr_format"] != 2 else about["chunks"]


def _bounds(index: str, chunks: Sequence[int]) -> Bounds:
    starts = [int(number) * size for number, size in zip(index.split("."), chunks, strict=True)]
    return tuple((start, start + size) for start, size in zip(starts, chunks, strict=True))


def _place(location: str) -> Place:
    """Of "value::d/FILE:OFFSET:BYTES"; behind the first colon another database would be named."""
    kind, other, file, offset, size = location.split(":")
    if kind != "value" or other:
        raise UserError(location)
    return Place(file, int(offset), int(size))
