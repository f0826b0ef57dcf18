"""Low-rank adapters (Hu et al., "LoRA", 2021): a matrix W that stays as it is, plus a product A B that is trained.

A is [in, r] and B is [r, out] with a small r, so that A B has a fraction of W's numbers. B begins as zeros: the first
step sees W alone. What is trained is told by its kind: where a model has any `LoRAParam`, it is these, and all other
parameters are frozen (see `train.parts`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import Dropout

LoRAParam = nnx.LoRAParam
"""The kind of an adapter's arrays."""
A, B = ".lora_a", ".lora_b"
"""How their names end."""
ADAPTER = "_adapter"
"""How an adapter is called that belongs to an array, and not to a layer: by the array's name and this."""
# Of variance 1 / (3 x in), as in the authors' program; the batch axes are those of experts.
INIT_A = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
INIT_A_OF_EXPERTS = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=0)


class LoRALinear(nnx.Linear):
    """A linear layer with an adapter: x W + scale (dropout(x) A) B, and a bias where it is asked for.

    Without the adapter it is an `nnx.Linear` whose `kernel`, and `bias`, have the same names.

    Args:
        in_features: the width of what comes in.
        out_features: of what goes out.
        rank: of the adapter.
        alpha: the adapter's scale is alpha / rank, so that a larger rank wants no other learning rate.
        dropout: the rate before the adapter, while training.
        use_bias: whether there is a bias; it is frozen as the kernel is.
        rngs: streams `params`, and `dropout` where the rate is above 0.
        more: what else `nnx.Linear` takes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **more)
        self.lora_a: LoRAParam[jax.Array] = LoRAParam(INIT_A(rngs.params(), (in_features, rank), self.param_dtype))
        self.lora_b: LoRAParam[jax.Array] = LoRAParam(jnp.zeros((rank, out_features), self.param_dtype))
        self.scale: float = alpha / rank
        self.dropout: Dropout | None = Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in] to [..., out]."""
        y = super().__call__(inputs, out_sharding)
        x = inputs if self.dropout is None else self.dropout(inputs)
        x, a, b = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        return y + self.scale * ((x @ a) @ b).astype(y.dtype)

    def merge_weights(self) -> jax.Array:
        """W + scale A B: the kernel of a plain layer that does the same, in the type of W."""
        return merged(self.kernel[...], self.lora_a[...], self.lora_b[...], self.scale)


class ExpertsAdapter(nnx.Module):
    """An adapter for each of some experts' matrices, which are one array [E, in, out].

    Args:
        shape: of the array.
        config: rank and alpha.
        rngs: stream `params`.
    """

    def __init__(self, shape: tuple[int, int, int], config: ModelConfig, rngs: nnx.Rngs) -> None:
        count, inputs, outputs = shape
        self.lora_a: LoRAParam[jax.Array] = LoRAParam(
            INIT_A_OF_EXPERTS(rngs.params(), (count, inputs, config.lora_rank))
        )
        self.lora_b: LoRAParam[jax.Array] = LoRAParam(jnp.zeros((count, config.lora_rank, outputs)))
        self.scale: float = config.lora_alpha / config.lora_rank

    def merged(self, kernel_ExIxO: jax.Array) -> jax.Array:
        """The experts' matrices with their adapters."""
        return merged(kernel_ExIxO, self.lora_a[...], self.lora_b[...], self.scale)


def linear(
    config: ModelConfig, part: Literal["attention", "mlp"], inputs: int, outputs: int, init: nnx.Initializer,
    rngs: nnx.Rngs,
) -> nnx.Linear:  # fmt: skip
    """A layer without a bias, with an adapter if the config wants one for this part of a block."""
    if not config.adapts(part):
        return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)
    return LoRALinear(
        inputs, outputs, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout,
        kernel_init=init, rngs=rngs,
    )  # fmt: skip


def kernel_of(layer: nnx.Linear) -> jax.Array:
    """The matrix that a layer multiplies with, its adapter merged; no dropout is in it."""
    return layer.merge_weights() if isinstance(layer, LoRALinear) else layer.kernel[...]


def merged(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """kernel + scale a b, computed in float32, in the type of the kernel. Further axes come first: [..., in, out]."""
    product = jnp.matmul(jnp.float32(a), jnp.float32(b), precision="highest")
    return (jnp.float32(kernel) + scale * product).astype(kernel.dtype)


def target_of(adapter: str) -> str:
    """The name of the array that an adapter is for: of "blocks.0.attention.qkv" it is its "kernel"."""
    return adapter.removesuffix(ADAPTER) if adapter.endswith(ADAPTER) else f"{adapter}.kernel"


def scales_of(model: nnx.Module) -> dict[str, float]:
    """Of every adapter of a model by its name, such as "blocks.0.attention.qkv": alpha / rank."""
    return {
        ".".join(map(str, path)): float(module.scale)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, LoRALinear | ExpertsAdapter)
    }


def merge_adapters(params: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of a plain model that does what a model with adapters does.

    Args:
        params: arrays by name, adapters among them.
        scales: of each adapter, by its name.

    Returns:
        Arrays by name, without adapters, in the types of the arrays that they stand on.
    """
    plain = {name: array for name, array in params.items() if not name.endswith((A, B))}
    for name, scale in scales.items():
        target = target_of(name)
        plain[target] = merged(plain[target], params[name + A], params[name + B], scale)
    return plain
