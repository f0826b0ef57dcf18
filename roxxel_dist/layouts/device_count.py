"""The devices that jax has, for code that asks jax for them and not the mesh."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

LISTS, COUNTS = ("devices", "local_devices"), ("device_count", "local_device_count")
"""Functions of jax that list devices, or count them."""


@contextlib.contextmanager
def devices_of(mesh: Mesh) -> Iterator[None]:
    """Within, jax lists and counts the devices of the mesh alone, as in a process that has no others.

    Else a loss that is divided by `jax.device_count()` would be so on one device too, and no layout would differ.
    """
    own = list(mesh.devices.flat)
    if len(own) == jax.device_count():
        yield
        return
    before = {name: getattr(jax, name) for name in (*LISTS, *COUNTS)}
    after: dict[str, Any] = {name: lambda *args, **options: list(own) for name in LISTS}
    after |= {name: lambda *args, **options: len(own) for name in COUNTS}
    try:
        _set(after)
        yield
    finally:
        _set(before)


def _set(functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        setattr(jax, name, function)
