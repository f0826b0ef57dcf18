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


def lowering_details(lowered: Any) -> str | None:
    """What jax compiles a `jax.stages.Lowered` with beside its text, as text: which arguments are left of the
    function's, where they lie, options. None for a program that calls back into its process, or takes constants along.

    Two functions may have the same text and the same arguments, of which one uses the first and the other the second.
    """
    lowering = lowered._lowering
    args = lowering.compile_args
    if args["host_callbacks"] or args["keepalive"] or args["ordered_effects"] or args["unordered_effects"]:
        return None
    if lowering.const_args:
        return None
    names = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "tuple_args", "committed")
    parts = [sorted(args["kept_var_idx"]), *(args[name] for name in names)]
    parts += [lowering._donated_invars, lowering._compiler_options_kvs, lowering._platforms]
    return repr([*parts, lowering_devices(lowered)])


def lowering_devices(lowered: Any) -> list[int]:
    """The ids of the devices that a `jax.stages.Lowered` is for, in its order, which loading it needs."""
    return [device.id for device in lowered._lowering._device_list]
