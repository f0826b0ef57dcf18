"""From the parameters of a trial to the Config that it trains."""

from collections.abc import Collection, Mapping
from typing import Any

from roxxel_dist.config import FIELD_TYPES, SECTIONS, Config

HEADS = ("n_heads", "head_size")


def config_of(base: Mapping[str, Any], params: Mapping[str, Any], swept: Collection[str] | None = None) -> Any:
    """The checked `Config` of a trial.

    Where a sweep varies the width or the heads of a model, the `n_heads` and `head_size` of the base, which were chosen
    for its width, give way: those that the sweep does not give are derived, such that n_heads x head_size is dim and
    kv_heads divides n_heads. W&B's runs are written offline where the base does not say otherwise.

    Args:
        base: fields of a Config, flat or in sections; the others have their defaults.
        params: of the trial, fields too. A mapping for a field that holds one (`model_args`) goes into the base's.
        swept: the names of all parameters of the sweep; by default those of `params`.

    Raises:
        ValueError: no such field (names the nearest one), or a value breaks its rule (names field, value and rule).
    """
    known, told = flat(base), flat(params)
    names = set(told) if swept is None else {*told, *swept}
    if names & {"dim", "kv_heads", *HEADS}:
        known = {name: value for name, value in known.items() if name not in HEADS}
    for name, value in told.items():
        both = isinstance(value, Mapping) and isinstance(known.get(name), Mapping)
        known[name] = {**known[name], **value} if both else value
    config = Config.from_dict({"wandb": "offline", **known}, "parameters")
    config.validate()
    return config


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that stand in sections, and those beside them, by their names alone."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        section = name in SECTIONS and (isinstance(value, Mapping) or (value is None and name not in FIELD_TYPES))
        found |= {str(key): one for key, one in (value or {}).items()} if section else {str(name): value}
    return found
