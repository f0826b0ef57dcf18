"""Devices of all processes as one mesh, and how arrays lie on it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CPU_DEVICES = "--xla_force_host_platform_device_count"


def make_mesh(n_devices: int = 0, axes: Sequence[str] = ("data",)) -> Mesh:
    """A mesh over the devices of all processes; every axis but the first has size 1.

    Args:
        n_devices: how many devices to use, 0 for all.
        axes: names of the axes; the first one takes all devices.

    Raises:
        ValueError: more devices are asked for than there are.
    """
    devices = jax.devices()
    if n_devices < 0 or n_devices > len(devices):
        raise ValueError(
            f"n_devices is {n_devices}, but {len(devices)} device(s) are here: use 0 for all, or launch more "
            f"(--nprocs, --devices-per-proc)"
        )
    count = n_devices or len(devices)
    shape = (count,) + (1,) * (len(axes) - 1)
    # Auto axes: with jax's newer default (Explicit) an ordinary model's gather raises ShardingTypeError.
    return Mesh(np.asarray(devices[:count]).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def simulate_devices(count: int) -> None:
    """Have jax make so many CPU devices and no others. It comes before jax makes its first device.

    Raises:
        ValueError: fewer than 1, or jax has made others already.
    """
    if count < 1:
        raise ValueError(f"devices is {count}: it must be at least 1")
    if not xla_bridge.backends_are_initialized():
        flags = os.environ.get("XLA_FLAGS", "").split()
        # Two ways to say how many there are, and jax takes the flag.
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(CPU_DEVICES))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        return
    here = jax.devices()
    if here[0].platform != "cpu" or len(here) != count:
        raise ValueError(
            f"devices is {count}, and jax has made {len(here)} {here[0].platform} device(s) already: leave it out, or "
            f"plan in a process of its own"
        )


def num_devices(mesh: Mesh) -> int:
    """How many devices the mesh spans, on all processes."""
    return mesh.size


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Every leaf of `tree` whole on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def scalars_on(mesh: Mesh, numbers: Mapping[str, float]) -> dict[str, jax.Array]:
    """Numbers as float32[] on every device of a mesh that other processes may share."""
    everywhere = NamedSharding(mesh, P())
    return {
        name: jax.make_array_from_callback((), everywhere, lambda _, value=value: np.float32(value))
        for name, value in numbers.items()
    }


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Every leaf cut along its first axis over the mesh's first axis.

    Raises:
        ValueError: the first axis does not divide by the devices.
    """
    size = mesh.shape[mesh.axis_names[0]]
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % size:
            raise ValueError(
                f"a batch of {leaf.shape[0]} rows does not divide by {size} devices: use a multiple of {size}"
            )
    return jax.device_put(batch, NamedSharding(mesh, P(mesh.axis_names[0])))


def fit_sharding(sharding: NamedSharding, shape: tuple[int, int]) -> NamedSharding:
    """The sharding that a (rows, tokens) batch gets: the asked one where it divides the shape.

    Otherwise the same mesh axes along the tokens, if those divide, and else a whole copy on every device.
    """
    if _divides(sharding, shape):
        return sharding
    names = [
        n for entry in sharding.spec if entry is not None for n in (entry if isinstance(entry, tuple) else (entry,))
    ]
    along_tokens = NamedSharding(sharding.mesh, P(None, tuple(names)))
    return along_tokens if _divides(along_tokens, shape) else NamedSharding(sharding.mesh, P())


def _divides(sharding: NamedSharding, shape: tuple[int, int]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True
