"""The parameters of a model by part."""

from collections.abc import Mapping
from typing import Protocol


class Sized(Protocol):
    """An array, or a description of one."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        ...


def count_by_module(params: Mapping[str, Sized]) -> dict[str, int]:
    """Parameters of each part of a model: of each attribute of its module, with all layers of a list together.

    Args:
        params: arrays by name, such as "blocks.0.attention.qkv.kernel".

    Returns:
        {"embedding": 131072, "blocks": 786432, "norm": 256, …}, in the order of the names.
    """
    parts: dict[str, int] = {}
    for name, leaf in params.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + leaf.size
    return parts
