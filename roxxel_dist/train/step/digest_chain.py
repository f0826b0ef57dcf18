"""The running digest: a chain over the rows and the loss of every step since the first, carried on a device.

Two runs have the same digest after a step where all their steps so far have read the same rows and had the same losses,
to the bit. Once it differs it stays so: each step puts 160 bits in by a permutation of the 128 that there are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from roxxel_dist.curriculum.plan import Rows
from roxxel_dist.train.step.compile import AotCompiler

CONSTANTS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
"""Of the rounds: the digits of pi behind the point. Without them zeros would stay zeros."""


class DigestChain:
    """Continues from the `digest` of the checkpoint of `step`; if that has none, a new chain begins at `step`."""

    def __init__(self, compiler: AotCompiler, digest: str, step: int) -> None:
        begin = bytes.fromhex(digest) if digest else np.array([step, 0, 0, 0], "<u4").tobytes()
        self._compiler = compiler
        self._device = jax.sharding.SingleDeviceSharding(compiler.mesh.local_devices[0])
        self._lanes: np.ndarray | jax.Array = np.frombuffer(begin, "<u4")
        self._advance: Any = None
        lanes, loss = (jax.ShapeDtypeStruct(s, d, sharding=self._device) for s, d in (((4,), "u4"), ((), "f4")))
        compiler.prepare(absorb, jax.jit(absorb), lanes, lanes, loss, on_mesh=False)

    def add(self, rows: Rows, loss: jax.Array) -> jax.Array:
        """The digest after a step, uint32[4] on this process's first device, from the rows of the global batch and the
        loss, float32[], which all devices have; the host waits for nothing."""
        lanes = jax.device_put(self._lanes, self._device) if isinstance(self._lanes, np.ndarray) else self._lanes
        if self._advance is None:
            self._advance = self._compiler.get(absorb)
        after: jax.Array = self._advance(lanes, rows_digest(rows), loss.addressable_data(0))
        self._lanes = after
        return after


def rows_digest(rows: Rows) -> np.ndarray:
    """uint32[4]: of the data set, first token and length of every row of a batch, in order."""
    state = xxhash.xxh3_128(f"{rows.seq_len} {rows.packed}".encode())
    state.update(np.ascontiguousarray(rows.dataset, "<i4").data)
    state.update(np.ascontiguousarray(rows.offset, "<i8").data)
    return np.frombuffer(state.digest(), "<u4")


def absorb(lanes: jax.Array, rows: jax.Array, loss: jax.Array) -> jax.Array:
    """The next digest: uint32[4] from that before, uint32[4] of `rows_digest`, float32[] loss."""
    bits = jax.lax.bitcast_convert_type(loss.astype(jnp.float32), jnp.uint32)
    a, *others = _permute(*(lanes ^ rows))
    return jnp.stack(_permute(a ^ bits, *others))


def _permute(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> list[jax.Array]:
    """A permutation of 128 bits in which each depends on all: rounds as those of ChaCha, within one column."""
    for constant in CONSTANTS:
        for first, second in ((16, 12), (8, 7)):
            a = a + b
            d = _rotate(d ^ a, first)
            c = c + d
            b = _rotate(b ^ c, second)
        a = a ^ jnp.uint32(constant)
    return [a, b, c, d]


def _rotate(lane: jax.Array, by: int) -> jax.Array:
    return (lane << by) | (lane >> (32 - by))


def hex_digest(lanes: np.ndarray | jax.Array) -> str:
    """A digest as logs and checkpoints have it: 32 hexadecimal digits."""
    return np.asarray(lanes, "<u4").tobytes().hex()
