"""All private parts of jax that the package needs, in one place, to be checked with each new version of jax.

Last checked: jax 0.10.2 and 0.12.0.1. None of them has a public equivalent.
"""

from typing import Any

from jax._src import distributed, xla_bridge


def backends_are_initialized() -> bool:
    """Whether jax has made its devices, so that XLA has read its flags. `jax.devices()` would make them."""
    return xla_bridge.backends_are_initialized()


def key_value_store() -> Any:
    """The client of jax's coordinator: keys that all processes see, barriers with a limit; None in a process alone.

    Keys are written once. A wait that times out costs the coordinator some 34 KB that it never gives back. Orbax uses
    the same object.
    """
    return distributed.global_state.client
