"""Fields of a config that do nothing, because another field turns off what they set.

Neither a run nor a sweep accepts a setting that changes nothing: the numbers would look like its effect.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from roxxel_dist.model.user_code import is_function
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import FIELD_TYPES, Config

SAVED_SHARE = 2 / 3
"""A file with at least this share of all fields was written by `Config.save_yaml`, and not by a person."""


class NoEffect(NamedTuple):
    """Fields that do nothing, and when; not those that a component then refuses itself, such as decay_steps."""

    fields: tuple[str, ...]
    applies: Callable[[Mapping[str, Any]], bool]
    """Whether they do nothing, for the values of all fields. With a model of the user's own, which may read any field
    of a model, no rule about those applies."""
    why: str
    """The reason and the fix."""


def _unless(switch: str, fields: str) -> NoEffect:
    """The rule of fields of the Transformer that do nothing while a switch is off."""
    why = f"{switch} is False: leave it out, or set {switch}"
    return NoEffect(tuple(fields.split()), lambda v: v["model"] is None and not v[switch], why)


def _of_transformer(fields: str, applies: Callable[[Mapping[str, Any]], bool], why: str) -> NoEffect:
    return NoEffect(tuple(fields.split()), lambda v: v["model"] is None and applies(v), why)


RULES = (
    NoEffect(("epochs", "batch_size"), lambda v: bool(v["phases"]), "phases are given: change it in each phase"),
    _unless("use_moe", "n_experts top_k_mlp norm_topk_prob alpha_balance expert_capacity_factor expert_devices"),
    _unless("use_lora", "lora_rank lora_alpha lora_dropout lora_targets"),
    _unless("mla", "down_dim_q down_dim_kv rope_dim inference"),
    _unless("sliding_window", "context_window sliding_window_pattern"),
    _of_transformer(
        "rope_local_theta",
        lambda v: not v["sliding_window"] or v["sliding_window_pattern"] is None,
        "all layers are of one kind: set rope_theta, or sliding_window and sliding_window_pattern",
    ),
    _of_transformer(
        "rope_theta rope_scale_factor rope_trained_context rope_dim rope_local_theta partial_rotary_factor "
        "no_rope_layer_interval",
        lambda v: v["pos_encoding"] != "rotary",
        "pos_encoding is not rotary: leave it out, or set pos_encoding to rotary",
    ),
    _of_transformer(
        "rope_trained_context",
        lambda v: v["rope_scale_factor"] == 1,
        "rope_scale_factor is 1, which changes nothing: leave it out, or set rope_scale_factor",
    ),
    _of_transformer(
        "expansion", lambda v: v["hidden_dim"] is not None, "hidden_dim is given: leave one of the two out"
    ),
    NoEffect(
        ("base_widths",),
        lambda v: v["parametrization"] != "mup",
        "parametrization is standard: leave it out, or set parametrization to mup",
    ),
    _of_transformer(
        "model_args",
        lambda v: not is_function(v["optimizer"]),
        "neither model nor optimizer is a function of yours: leave it out, or name one",
    ),
    NoEffect(
        ("momentum",),
        lambda v: v["optimizer"] not in ("sgd", "muon") and not is_function(v["optimizer"]),
        "only the optimizers sgd and muon have it: leave it out, or change optimizer",
    ),
    NoEffect(
        ("beta1", "beta2"),
        lambda v: v["optimizer"] in ("sgd", "adafactor"),
        "the optimizers sgd and adafactor do not have it: leave it out, or change optimizer",
    ),
    NoEffect(
        ("lr_scaling",),
        lambda v: not v["phases"],
        "there are no phases, so all batches have the same size: leave it out, or give phases",
    ),
    NoEffect(
        ("max_rewinds",),
        lambda v: v["on_bad_step"] != "rewind",
        "on_bad_step is not rewind: leave it out, or set on_bad_step to rewind",
    ),
    NoEffect(("fsdp_devices",), lambda v: not v["fsdp"], "fsdp is False: leave it out, or set fsdp"),
    NoEffect(
        ("memory_replicas",),
        lambda v: v["memory_checkpoint_every"] == 0,
        "memory_checkpoint_every is 0: leave it out, or change memory_checkpoint_every",
    ),
    NoEffect(
        ("val_fraction",),
        lambda v: bool(v["validation"]),
        "validation names the data to validate on: leave one of the two out",
    ),
    NoEffect(("sample_prompt",), lambda v: v["sample"] == "off", "sample is off: leave it out, or change sample"),
    NoEffect(
        ("wandb_project",),
        lambda v: v["wandb"] == "off",
        "wandb is off: leave it out, or set wandb to online or offline",
    ),
)


def without_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """The fields that do nothing, each with the reason and the fix, for the values of all fields, valid or not."""
    reasons: dict[str, str] = {}
    for rule in RULES:
        if rule.applies(values):
            for name in rule.fields:
                reasons.setdefault(name, rule.why)
    return reasons


def chosen(config: Config) -> set[str]:
    """The fields that somebody has given another value than the default.

    None of a config with all fields: `Config.save_yaml` has written it.
    """
    if len(config.given) >= SAVED_SHARE * len(FIELD_TYPES):
        return set()
    values, defaults = config.to_dict(), Config().to_dict()
    return {name for name in config.given if values[name] != defaults[name]}


def check_effect(config: Config, names: Collection[str], flags: Collection[str] = ()) -> None:
    """Raises UserError for the first of some fields of a config that does nothing; `flags` are flags in messages."""
    reasons = without_effect(config.to_dict())
    for name in sorted(set(names) & reasons.keys()):
        raise UserError(f"{'--' if name in flags else ''}{name} does nothing here, because {reasons[name]}")
