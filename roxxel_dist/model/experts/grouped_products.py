"""Matrix products over groups of rows, of which each has a matrix of its own: those of the experts that tokens chose.

jax has `ragged_dot` for it. For GPUs XLA makes it one dense product for each group, over all rows; for TPUs it does so
with the gradient of the matrices. Kernels (Gale et al., "MegaBlocks", 2022) take each row once. Decision 13.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from roxxel_dist.cluster.mesh import device_type
from roxxel_dist.devices.program_cost import GROUPED_PRODUCT
from roxxel_dist.model.attention.kernels import compute_capability

TPU_ROWS = 128
"""The kernel for TPUs takes a multiple of these."""
WIDEST, DEEPEST_BYTES = 128, 128
"""Of a block of a GPU's kernel: numbers of a side, and bytes that are summed over at a time. Three stages of two such
blocks are the 96 KiB of shared memory that each card of compute capability 8.0 or above has."""
STAGES, WARPS = 3, 8


def missing_kernel(rows: int) -> str:
    """Why `grouped_product` cannot run for so many rows on the devices that a program is for; empty if it can."""
    mesh, device = jax.sharding.get_abstract_mesh(), device_type()
    alone = mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)
    if device.platform == "tpu":
        return "" if alone and rows % TPU_ROWS == 0 else f"the rows of each device are no multiple of {TPU_ROWS}"
    if device.platform != "gpu":
        return f"the devices are {device.platform}"
    if compute_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, and this is a {device.device_kind}"
    return "" if alone else "the devices do not divide the tokens, and XLA cannot cut a kernel"


@jax.custom_vjp
def grouped_product(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array) -> jax.Array:
    """[A, F]: each row times the matrix of its group, as `jax.lax.ragged_dot`, of which the product and both gradients
    cost each row one matrix.

    Rows are sorted by group, matrices are of the same type, and `count_E`, int32, are the rows of each group, A in all.
    """
    return _product(x_AxD, w_ExDxF, count_E)


def _forward(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x_AxD, w_ExDxF, count_E), (x_AxD, w_ExDxF, count_E)


def _backward(kept: Any, g_AxF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_AxD, w_ExDxF, count_E = kept
    gradient = matrix_gradient_tpu if device_type().platform == "tpu" else matrix_gradient_gpu
    dw_ExDxF = gradient(x_AxD, g_AxF, count_E)
    return _product(g_AxF, w_ExDxF, count_E, transposed=True), dw_ExDxF.astype(w_ExDxF.dtype), None


grouped_product.defvjp(_forward, _backward)


def _product(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    if device_type().platform == "gpu":
        return product_gpu(x_AxD, w_ExDxF, count_E, transposed=transposed)
    return jax.lax.ragged_dot(x_AxD, w_ExDxF.swapaxes(1, 2) if transposed else w_ExDxF, count_E)


def matrix_gradient_tpu(
    x_AxD: jax.Array, g_AxF: jax.Array, count_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """float32[E, D, F]: the sum over the rows a of each group of x[a] outer g[a].

    With `interpret` the kernel's steps run as they are written, on any device, for tests.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = tuple(_tile(size) for size in (x_AxD.shape[0], x_AxD.shape[1], g_AxF.shape[1]))
    return tgmm(x_AxD.swapaxes(0, 1), g_AxF, count_E, jnp.float32, tiles, interpret=interpret)


def _tile(size: int) -> int:
    """The size of a TPU kernel's blocks with the least padding, of those the largest."""
    return min((512, 256, 128), key=lambda tile: -(-size // tile) * tile)


class RowBlocks(NamedTuple):
    """Which rows a GPU's kernel takes at a time: none of two groups. There are as many as any counts may need."""

    group_T: jax.Array
    """int32: the group of each block."""
    first_T: jax.Array
    """int32: its first row."""
    end_T: jax.Array
    """int32: the row after its last; of the blocks that these counts do not need, the first row."""

    @classmethod
    def of_counts(cls, count_E: jax.Array, rows: int, size: int) -> "RowBlocks":
        """Blocks of up to `size` rows, for groups of `count_E` that are `rows` in all."""
        blocks_E = -(-count_E // size)
        last_E, end_E = jnp.cumsum(blocks_E), jnp.cumsum(count_E)
        block_T = jnp.arange(rows // size + count_E.size, dtype=jnp.int32)
        group_T = (block_T[:, None] >= last_E).sum(1, dtype=jnp.int32)
        group_T, needed_T = jnp.minimum(group_T, count_E.size - 1), group_T < count_E.size
        place_T = block_T - (last_E - blocks_E)[group_T]
        first_T = jnp.where(needed_T, (end_E - count_E)[group_T] + place_T * size, 0)
        end_T = jnp.where(needed_T, jnp.minimum(first_T + size, end_E[group_T]), 0)
        return cls(group_T, first_T.astype(jnp.int32), end_T.astype(jnp.int32))


def row_block(rows: int, groups: int) -> int:
    """Rows of a block: fewer where groups are small, as the last block of each is half empty."""
    return _power(rows // groups // 4, WIDEST)


def _power(size: int, most: int) -> int:
    """The next power of two, from 16, which is what tensor cores take at least, up to `most`."""
    return min(most, 1 << max(4, (max(size, 1) - 1).bit_length()))


def product_gpu(x_AxD: jax.Array, w_ExDxF: jax.Array, count_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """[A, F]: each row times the matrix of its group, summed in float32; `transposed`: w is [E, F, D]."""
    (rows, depth), groups, width = x_AxD.shape, len(w_ExDxF), w_ExDxF.shape[1 if transposed else 2]
    size_m, size_n, size_k = row_block(rows, groups), _power(width, WIDEST), _deepest(depth, x_AxD.dtype)
    blocks, across = RowBlocks.of_counts(count_E, rows, size_m), -(-width // size_n)

    def kernel(group_T: Any, first_T: Any, end_T: Any, x_AxD: Any, w_ExDxF: Any, y_AxF: Any) -> None:
        pl, triton = _pallas()
        block, column = jnp.divmod(pl.program_id(0), across)
        group, first, end = group_T[block], first_T[block], end_T[block]
        rows_M = first + jnp.arange(size_m)
        columns_N, within_M = column * size_n + jnp.arange(size_n), rows_M < end

        def add(turn: Any, sum_MxN: jax.Array) -> jax.Array:
            depth_K = turn * size_k + jnp.arange(size_k)
            x_MxK = _load(x_AxD, (), rows_M, depth_K, within_M, depth_K < depth)
            if transposed:
                w = _load(w_ExDxF, (group,), columns_N, depth_K, columns_N < width, depth_K < depth)
            else:
                w = _load(w_ExDxF, (group,), depth_K, columns_N, depth_K < depth, columns_N < width)
            return sum_MxN + _dot(x_MxK, w, trans_b=transposed)

        turns = jnp.where(first < end, jnp.int32(-(-depth // size_k)), jnp.int32(0))
        sum_MxN = jax.lax.fori_loop(0, turns, add, jnp.zeros((size_m, size_n), jnp.float32))
        place = y_AxF.at[rows_M[:, None], columns_N[None, :]]
        mask = within_M[:, None] & (columns_N < width)[None, :]
        triton.store(place, sum_MxN.astype(y_AxF.dtype), mask=mask)

    flops = 2 * rows * depth * width
    return _call(kernel, (rows, width), len(blocks.group_T) * across, flops, *blocks, x_AxD, w_ExDxF)


def matrix_gradient_gpu(x_AxD: jax.Array, g_AxF: jax.Array, count_E: jax.Array) -> jax.Array:
    """[E, D, F]: the sum over the rows a of each group of x[a] outer g[a], summed in float32."""
    (rows, depth), width, groups = x_AxD.shape, g_AxF.shape[1], count_E.size
    size_m, size_n, size_k = _power(depth, WIDEST), _power(width, WIDEST), _deepest(rows, x_AxD.dtype)
    down, across = -(-depth // size_m), -(-width // size_n)
    end_E = jnp.cumsum(count_E).astype(jnp.int32)

    def kernel(first_E: Any, end_E: Any, x_AxD: Any, g_AxF: Any, dw_ExDxF: Any) -> None:
        pl, triton = _pallas()
        block, column = jnp.divmod(pl.program_id(0), across)
        group, row = jnp.divmod(block, down)
        first, end = first_E[group], end_E[group]
        rows_M, columns_N = row * size_m + jnp.arange(size_m), column * size_n + jnp.arange(size_n)

        def add(turn: Any, sum_MxN: jax.Array) -> jax.Array:
            rows_K = first + turn * size_k + jnp.arange(size_k)
            x_KxM = _load(x_AxD, (), rows_K, rows_M, rows_K < end, rows_M < depth)
            g_KxN = _load(g_AxF, (), rows_K, columns_N, rows_K < end, columns_N < width)
            return sum_MxN + _dot(x_KxM, g_KxN, trans_a=True)

        turns = (end - first + size_k - 1) // size_k
        sum_MxN = jax.lax.fori_loop(0, turns, add, jnp.zeros((size_m, size_n), jnp.float32))
        place = dw_ExDxF.at[group, rows_M[:, None], columns_N[None, :]]
        mask = (rows_M < depth)[:, None] & (columns_N < width)[None, :]
        triton.store(place, sum_MxN.astype(dw_ExDxF.dtype), mask=mask)

    shape, flops = (groups, depth, width), 2 * rows * depth * width
    return _call(kernel, shape, groups * down * across, flops, end_E - count_E, end_E, x_AxD, g_AxF)


def _pallas() -> tuple[Any, Any]:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton


def _deepest(size: int, dtype: Any) -> int:
    return _power(size, DEEPEST_BYTES // jnp.dtype(dtype).itemsize)


def _load(ref: Any, at: tuple[Any, ...], rows: Any, columns: Any, wanted_rows: Any, wanted_columns: Any) -> jax.Array:
    mask = wanted_rows[:, None] & wanted_columns[None, :]
    return _pallas()[1].load(ref.at[(*at, rows[:, None], columns[None, :])], mask=mask, other=0)


def _dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    """float32; of float32 without rounding them to TensorFloat-32."""
    return _pallas()[1].dot(a, b, precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None, **transposed)


def _call(
    kernel: Callable[..., None], shape: tuple[int, ...], programs: int, flops: int, *args: jax.Array
) -> jax.Array:
    """The result of a kernel, [shape] in the type of its last argument."""
    pl, triton = _pallas()
    byte_count = sum(array.size * array.dtype.itemsize for array in args) + math.prod(shape) * args[-1].dtype.itemsize
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, args[-1].dtype),
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=byte_count, transcendentals=0),
        name=GROUPED_PRODUCT,
    )(*args)
