"""The devices and processes that jax has, for code that asks jax for them and not the mesh."""

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
    functions: dict[str, Any] = {name: lambda *args, **options: list(own) for name in LISTS}
    with _replaced(functions | {name: lambda *args, **options: len(own) for name in COUNTS}):
        yield


@contextlib.contextmanager
def as_process(index: int, count: int) -> Iterator[None]:
    """Within, jax says that this process is the one of this index, of so many."""
    functions = {"process_index": lambda *args, **options: index, "process_count": lambda *args, **options: count}
    with _replaced(functions):
        yield


@contextlib.contextmanager
def _replaced(functions: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(jax, name) for name in functions}
    try:
        jax.__dict__.update(functions)
        yield
    finally:
        jax.__dict__.update(before)
