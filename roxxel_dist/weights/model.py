"""The model of a Config, by the kernel for its devices. Nothing is on a device yet."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.model.attention.kernels import Situation, broken_rule, kernel_for, native_kernel, score_traffic
from roxxel_dist.model.attention.mask import key_size
from roxxel_dist.model.config import AttentionKernel, ModelConfig
from roxxel_dist.model.parametrization import Width, rescale_to, widths
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.model.user_code import call_function, import_function
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.settings.config import Config
from roxxel_dist.utils.display import size


def attention_kernel(
    config: Config,
    shapes: Sequence[Shape],
    begun_with: AttentionKernel | None = None,
    devices: Sequence[Any] | None = None,
) -> AttentionKernel:
    """The attention kernel of a run with batches of these shapes, on these devices, or on those of all processes.

    auto keeps the kernel `begun_with`. Raises ValueError if the named or kept kernel cannot run here.
    """
    if config.model is not None:
        return config.attention
    keeps = config.attention == "auto" and begun_with is not None
    kernel = begun_with if begun_with is not None and keeps else config.attention
    return kernel_for(kernel, _situation(config, shapes, devices), begun=keeps)


def _situation(config: Config, shapes: Sequence[Shape], devices: Sequence[Any] | None) -> Situation:
    """What attention computes in a run with whole rows."""
    return Situation(
        device=(devices or jax.devices())[0],
        key_size=key_size(config.part(ModelConfig)),
        bf16=config.use_bf16 or config.bf16_compute,
        packed=any(shape.packing == "documents" for shape in shapes),
        capped=config.attn_softcap is not None,
    )


def slower_attention(
    config: Config, shapes: Sequence[Shape], kernel: AttentionKernel, devices: Sequence[Any] | None = None
) -> str:
    """The line of a run on devices whose own kernel does not take its attention: why, and what XLA's costs; or ""."""
    if config.model is not None or kernel != "xla" or config.attention != "auto":
        return ""
    situation, model = _situation(config, shapes, devices), config.part(ModelConfig)
    native = native_kernel(situation.device)
    broken = broken_rule(native, situation)
    if broken is None:
        return ""
    length = max(shape.seq_len for shape in shapes) - 1
    moved = size(score_traffic(model.heads()[0], length, model.window if model.pattern is None else None))
    return (
        f"attention is computed by XLA, as {broken[0]}: for each row of {length:,} inputs a layer reads and writes "
        f"about {moved} of scores, which {native} keeps on the chip"
    )


def model_builder(config: Config, kernel: AttentionKernel = "auto") -> Callable[[], nnx.Module]:
    """A function that makes the model of a config whose `vocab_size` is known, with the same weights each time.

    `kernel` is the attention kernel and overrides the config: a model may be used on other devices than in training.
    """
    rngs = {"params": config.seed, "dropout": config.seed + 1}
    if config.model is None:
        shape = dataclasses.replace(config.part(ModelConfig), attention=kernel)
        return TransformerBuilder(shape, **rngs)
    make = import_function("model", config.model)

    def build() -> nnx.Module:
        own = copy.deepcopy(config)  # the user's function may change it
        own.model_args = own.model_args or {}
        streams = nnx.Rngs(config.seed + 2, **rngs)
        model = call_function("model", str(config.model), make, "def build(config, rngs)", own, streams)
        if not isinstance(model, nnx.Module):
            raise UserError(
                f"model is {config.model!r}: it returned a {type(model).__name__}, and must return an nnx.Module"
            )
        return model

    if config.parametrization == "standard":
        return build
    build_base = model_builder(_at_base_width(config))

    def build_scaled() -> nnx.Module:
        model = build()
        rescale_to(model, build_base())
        return model

    return build_scaled


def _at_base_width(config: Config) -> Config:
    """The config of the same model at its base width, with the standard parametrization."""
    fields: dict[str, Any] = {"dim": config.base_dim}
    if config.base_widths is not None:
        fields = dict(import_function("base_widths", config.base_widths)(copy.deepcopy(config)))
        if unfit := sorted(set(fields) - set(config.to_dict())):
            raise UserError(
                f"base_widths is {config.base_widths!r}: it returned {unfit[0]!r}, and must return fields of the config"
            )
    elif config.base_dim is None:
        raise UserError("parametrization is mup: set base_dim to the dim for which lr was searched, or base_widths")
    return dataclasses.replace(config, **fields, parametrization="standard", base_dim=None, base_widths=None)


def parameter_widths(config: Config, build: Callable[[], nnx.Module]) -> dict[str, Width]:
    """With mup, how much wider each parameter of a model is than at its base width; otherwise empty."""
    if config.parametrization == "standard":
        return {}
    return widths(*(nnx.eval_shape(make) for make in (build, model_builder(_at_base_width(config)))))
