"""How far the host may run ahead of the devices."""

from collections import deque

import jax
from jax.sharding import Mesh

ON_ACCELERATORS = 3
"""Steps that may wait: enough to keep the devices busy, few enough to stop soon."""


class InFlight:
    """The steps that were handed to the devices and are not known to be done.

    Args:
        mesh: their devices. On a CPU one step at a time: XLA's in-process collectives starve where several programs
            wait for them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.limit = 1 if mesh.devices.flat[0].platform == "cpu" else ON_ACCELERATORS
        self._waiting: deque[jax.Array] = deque()

    def add(self, result: jax.Array) -> None:
        """A step was handed over; `result` is one of its results, which no later step takes for its own."""
        self._waiting.append(result)

    def make_room(self) -> bool:
        """Wait until another step may be handed over; returns whether none is left to wait for."""
        while len(self._waiting) >= self.limit:
            jax.block_until_ready(self._waiting.popleft())
        return not self._waiting

    def settle(self) -> None:
        """Wait for all of them."""
        jax.block_until_ready(list(self._waiting))
        self._waiting.clear()
