"""Low-rank adapters (Hu et al., "LoRA", 2021): a matrix W that stays as it is, plus a product A B that is trained.

A is [in, r] and B is [r, out] with a small r, so that A B has a fraction of W's numbers. B begins as zeros: the first
step sees W alone. What is trained is told by its kind: where a model has any `LoRAParam`, it is these, and all other
parameters are frozen (see `train.parts`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.parameter_sharding import MESH_AXES, Axes
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import COLUMN_AXES, Dropout

LoRAParam = nnx.LoRAParam
"""The kind of an adapter's arrays."""
LORA_A_SUFFIX, LORA_B_SUFFIX = ".lora_a", ".lora_b"
"""How their names end."""
ADAPTER = "_adapter"
"""How an adapter is called that belongs to an array, and not to a layer: by the array's name and this."""
# Of variance 1 / (3 x in), as in the authors' program; the batch axes are those of experts.
INIT_A = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
INIT_A_OF_EXPERTS = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=0)


class LoRALinear(nnx.LinearGeneral):
    """A linear layer with an adapter: x W + scale (dropout(x) A) B, and a bias where it is asked for.

    Without the adapter it is an `nnx.Linear` whose `kernel`, and `bias`, have the same names, or an `nnx.LinearGeneral`
    where several dimensions go out.

    Args:
        in_features: the width of what comes in.
        out_features: of what goes out; several for as many dimensions.
        rank: of the adapter.
        alpha: the adapter's scale is alpha / rank, so that a larger rank wants no other learning rate.
        dropout: the rate before the adapter, while training.
        use_bias: whether there is a bias; it is frozen as the kernel is.
        rngs: streams `params`, and `dropout` where the rate is above 0.
        more: what else `nnx.LinearGeneral` takes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **more: Any,
    ) -> None:
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs, **more)
        _, *out = self.kernel.get_value().shape
        of_a, of_b = _metadata_beside(self.kernel)
        self.lora_a: LoRAParam[jax.Array] = LoRAParam(
            INIT_A(rngs.params(), (in_features, rank), self.param_dtype), **of_a
        )
        self.lora_b: LoRAParam[jax.Array] = LoRAParam(jnp.zeros((rank, *out), self.param_dtype), **of_b)
        self.scale: float = alpha / rank
        self.dropout: Dropout | None = Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[..., in] to [..., out]."""
        y = super().__call__(inputs, out_sharding)
        x = inputs if self.dropout is None else self.dropout(inputs)
        x, a, b = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        return y + self.scale * jnp.tensordot(x @ a, b, 1).astype(y.dtype)

    def merge_weights(self) -> jax.Array:
        """W + scale A B: the kernel of a plain layer that does the same, in the type of W."""
        return merged(self.kernel[...], self.lora_a[...], self.lora_b[...], self.scale)


class ExpertsAdapter(nnx.Module):
    """An adapter for each of some experts' matrices, which are one array [E, in, out, ...].

    Args:
        kernel: the array.
        config: rank and alpha.
        rngs: stream `params`.
    """

    def __init__(self, kernel: nnx.Param[jax.Array], config: ModelConfig, rngs: nnx.Rngs) -> None:
        count, inputs, *out = kernel.get_value().shape
        of_a, of_b = _metadata_beside(kernel)
        self.lora_a: LoRAParam[jax.Array] = LoRAParam(
            INIT_A_OF_EXPERTS(rngs.params(), (count, inputs, config.lora_rank)), **of_a
        )
        self.lora_b: LoRAParam[jax.Array] = LoRAParam(jnp.zeros((count, config.lora_rank, *out)), **of_b)
        self.scale: float = config.lora_alpha / config.lora_rank

    def merged(self, kernel_ExIxO: jax.Array) -> jax.Array:
        """The experts' matrices with their adapters."""
        return merged(kernel_ExIxO, self.lora_a[...], self.lora_b[...], self.scale)


def _metadata_beside(kernel: nnx.Param[jax.Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of A and of B of an adapter: they lie on the mesh as the matrix beside them does, along in and along out."""
    columns, axes = kernel.get_metadata().get(COLUMN_AXES, 1), kernel.get_metadata().get(MESH_AXES)
    if axes is None:
        return {}, {COLUMN_AXES: columns}
    *batch, into = axes[:-columns]
    return {MESH_AXES: (*batch, into, None)}, {MESH_AXES: (*batch, None, *axes[-columns:]), COLUMN_AXES: columns}


def linear(
    config: ModelConfig, part: Literal["attention", "mlp"] | None, inputs: int, outputs: int | tuple[int, ...],
    axes: Axes, init: nnx.Initializer, rngs: nnx.Rngs,
) -> nnx.LinearGeneral:  # fmt: skip
    """A layer without a bias, with an adapter if the config wants one for this part of a block.

    Args:
        config: says which adapters there are.
        part: of a block; None for what is never adapted.
        inputs: width of what comes in.
        outputs: of what goes out.
        axes: of the mesh, that the kernel is cut over.
        init: of the kernel, as a matrix.
        rngs: stream `params`.
    """
    metadata = {MESH_AXES: axes, COLUMN_AXES: len(axes) - 1}
    options: Any = {"use_bias": False, "kernel_init": init, "kernel_metadata": metadata, "rngs": rngs}
    if part is None or not config.adapts(part):
        return nnx.LinearGeneral(inputs, outputs, **options)
    lora = {"rank": config.lora_rank, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
    return LoRALinear(inputs, outputs, **lora, **options)


def kernel_of(layer: nnx.LinearGeneral) -> jax.Array:
    """The matrix that a layer multiplies with, its adapter merged; no dropout is in it."""
    return layer.merge_weights() if isinstance(layer, LoRALinear) else layer.kernel[...]


def merged(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """kernel [..., in, *out] + scale a [..., in, r] b [..., r, *out], computed in float32, in the kernel's type."""
    flat = b.reshape(*b.shape[: a.ndim - 1], math.prod(b.shape[a.ndim - 1 :]))
    product = jnp.matmul(jnp.float32(a), jnp.float32(flat), precision="highest").reshape(kernel.shape)
    return (jnp.float32(kernel) + scale * product).astype(kernel.dtype)


def target_of(adapter: str) -> str:
    """The name of the array that an adapter is for: of "blocks.attention.qkv" it is its "kernel"."""
    return adapter.removesuffix(ADAPTER) if adapter.endswith(ADAPTER) else f"{adapter}.kernel"


def adapter_shapes(adapter: str, kernel: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B of the adapter of that name, beside a kernel."""
    batch = adapter.startswith("blocks.") + adapter.endswith(ADAPTER)  # layers, experts
    return (*kernel[: batch + 1], rank), (*kernel[:batch], rank, *kernel[batch + 1 :])


def stacked_scales(scales: Mapping[str, float], params: Mapping[str, Any]) -> dict[str, float]:
    """What each adapter counts, by the names of now; where blocks were apart, those of a block had names of their own.

    Args:
        scales: of each adapter, by its name.
        params: by their names, adapters or the arrays that they are for among them.
    """
    names = {}
    for name, scale in scales.items():
        whole = re.sub(r"\bblocks\.\d+\.", "blocks.", name).replace("feedforward.up", "feedforward.gate_up")
        names[name if name + LORA_A_SUFFIX in params or target_of(name) in params else whole] = scale
    return names


def scales_of(model: nnx.Module) -> dict[str, float]:
    """Of every adapter of a model by its name, such as "blocks.attention.qkv": alpha / rank."""
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
    plain = {name: array for name, array in params.items() if not name.endswith((LORA_A_SUFFIX, LORA_B_SUFFIX))}
    for name, scale in scales.items():
        target = target_of(name)
        plain[target] = merged(plain[target], params[name + LORA_A_SUFFIX], params[name + LORA_B_SUFFIX], scale)
    return plain
