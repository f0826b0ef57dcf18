"""Low-rank adapters (Hu et al., "LoRA", 2021): a frozen matrix W, plus a product A B that is trained.

A is [in, r] and B is [r, out] with a small r, so that A B has a fraction of W's numbers. B begins as zeros: the first
step uses W alone. If a model has any `LoRAParam`, only these are trained, and all other parameters are frozen (see
`model.split.split_module`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from roxxel_dist.cluster.parameter_sharding import MESH_AXES, Axes
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import COLUMN_AXES, STACKED, Dropout

LoRAParam = nnx.LoRAParam
"""The variable type of an adapter's arrays."""
LORA_A_SUFFIX, LORA_B_SUFFIX = ".lora_a", ".lora_b"
"""The suffixes of their names."""
ADAPTER = "_adapter"
"""The suffix of an adapter for an array, not a layer: its name is the array's name and this."""
# Variance 1 / (3 x in), as in the authors' program; the batch axes are the experts.
INIT_A = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
INIT_A_OF_EXPERTS = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=0)


class LoRALinear(nnx.LinearGeneral):
    """A linear layer with an adapter: x W + scale (dropout(x) A) B, and an optional bias.

    Without the adapter it is an `nnx.Linear` with the same names `kernel` and `bias`, or an `nnx.LinearGeneral` with
    several output dimensions.

    Args:
        in_features: the input width.
        out_features: the output width; a tuple for several output dimensions.
        rank: of the adapter.
        alpha: the adapter's scale is alpha / rank, so that the same learning rate suits every rank.
        dropout: the rate before the adapter, while training.
        use_bias: whether there is a bias; it is frozen like the kernel.
        rngs: streams `params`, and `dropout` if the rate is above 0.
        more: other arguments of `nnx.LinearGeneral`.
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
        """W + scale A B: the kernel of an equivalent plain layer, in the dtype of W."""
        return merge_adapter(self.kernel[...], self.lora_a[...], self.lora_b[...], self.scale)


class ExpertsAdapter(nnx.Module):
    """Adapters of the matrices of all experts, which are one array `kernel`, [E, in, out, ...]."""

    def __init__(self, kernel: nnx.Param[jax.Array], config: ModelConfig, rngs: nnx.Rngs) -> None:
        count, inputs, *out = kernel.get_value().shape
        of_a, of_b = _metadata_beside(kernel)
        self.lora_a: LoRAParam[jax.Array] = LoRAParam(
            INIT_A_OF_EXPERTS(rngs.params(), (count, inputs, config.lora_rank)), **of_a
        )
        self.lora_b: LoRAParam[jax.Array] = LoRAParam(jnp.zeros((count, config.lora_rank, *out)), **of_b)
        self.scale: float = config.lora_alpha / config.lora_rank

    def merge_adapter(self, kernel_ExIxO: jax.Array) -> jax.Array:
        """The experts' matrices with their adapters."""
        return merge_adapter(kernel_ExIxO, self.lora_a[...], self.lora_b[...], self.scale)


def _metadata_beside(kernel: nnx.Param[jax.Array]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata of A and B of an adapter: A is sharded like the matrix along in, B along out; both are as many."""
    metadata = kernel.get_metadata()
    columns, axes = metadata.get(COLUMN_AXES, 1), metadata.get(MESH_AXES)
    both = {STACKED: metadata[STACKED]} if STACKED in metadata else {}
    if axes is None:
        return both, {COLUMN_AXES: columns, **both}
    *batch, into = axes[:-columns]
    of_b = {MESH_AXES: (*batch, None, *axes[-columns:]), COLUMN_AXES: columns}
    return {MESH_AXES: (*batch, into, None), **both}, {**of_b, **both}


def linear(
    config: ModelConfig,
    part: Literal["attention", "mlp"] | None,
    inputs: int,
    outputs: int | tuple[int, ...],
    axes: Axes,
    init: nnx.Initializer,
    rngs: nnx.Rngs,
    *,
    use_bias: bool = False,
) -> nnx.LinearGeneral:
    """A layer with an adapter if the config has one for this part of a block; `part` is None for one that never has.

    The kernel, a matrix that `init` makes, is cut over the mesh `axes`; a bias starts as zeros.
    """
    metadata = {MESH_AXES: axes, COLUMN_AXES: len(axes) - 1}
    options: Any = {"use_bias": use_bias, "kernel_init": init, "kernel_metadata": metadata, "rngs": rngs}
    if use_bias:
        options["bias_metadata"] = {MESH_AXES: axes[1:], COLUMN_AXES: len(axes) - 1}
    if part is None or not config.adapts(part):
        return nnx.LinearGeneral(inputs, outputs, **options)
    lora = {"rank": config.lora_rank, "alpha": config.lora_alpha, "dropout": config.lora_dropout}
    return LoRALinear(inputs, outputs, **lora, **options)


def kernel_of(layer: nnx.LinearGeneral) -> jax.Array:
    """The matrix of a layer with its adapter merged, without dropout."""
    return layer.merge_weights() if isinstance(layer, LoRALinear) else layer.kernel[...]


def merge_adapter(kernel: Any, a: Any, b: Any, scale: float) -> Any:
    """kernel [..., in, *out] + scale a [..., in, r] b [..., r, *out], computed in float32, in the kernel's dtype."""
    flat = b.reshape(*b.shape[: a.ndim - 1], math.prod(b.shape[a.ndim - 1 :]))
    product = jnp.matmul(jnp.float32(a), jnp.float32(flat), precision="highest").reshape(kernel.shape)
    return (jnp.float32(kernel) + scale * product).astype(kernel.dtype)


def target_of(adapter: str) -> str:
    """The name of the array that an adapter is for: for "blocks.attention.qkv" it is its "kernel"."""
    return adapter.removesuffix(ADAPTER) if adapter.endswith(ADAPTER) else f"{adapter}.kernel"


def adapter_shapes(adapter: str, kernel: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and B of the named adapter, for a kernel."""
    batch = adapter.startswith("blocks.") + adapter.endswith(ADAPTER)  # layers, experts
    return (*kernel[: batch + 1], rank), (*kernel[:batch], rank, *kernel[batch + 1 :])


def scales_of(model: nnx.Module) -> dict[str, float]:
    """The scale of every adapter of a model, alpha / rank, by its name, such as "blocks.attention.qkv"."""
    return {
        ".".join(map(str, path)): float(module.scale)
        for path, module in nnx.iter_graph(model)
        if isinstance(module, LoRALinear | ExpertsAdapter)
    }


def merge_adapters(params: Mapping[str, Any], scales: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of a plain model that is equivalent to one with adapters, by name, in the dtypes of the base
    arrays; `scales` are those of each adapter, by its name."""
    plain = {name: array for name, array in params.items() if not name.endswith((LORA_A_SUFFIX, LORA_B_SUFFIX))}
    for name, scale in scales.items():
        target = target_of(name)
        plain[target] = merge_adapter(plain[target], params[name + LORA_A_SUFFIX], params[name + LORA_B_SUFFIX], scale)
    return plain
