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


def assume_compute_capability(capability: tuple[int, int]) -> None:
    """Have attention by cuDNN traced for GPUs of this capability: jax asks a GPU of this process, and there is none.

    Only for a process that compiles for GPUs that are elsewhere.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    def reached(needed: str) -> bool:
        return capability >= tuple(int(part) for part in needed.split("."))

    attention.check_compute_capability = reached
