"""The cross-entropy of states behind a head that makes their logits, of some tokens at a time, and its gradient.

For a token with the logits l and the target t the loss is s - l[t], s = log(sum(exp(l))), and its gradient
exp(l - s) - onehot(t). Where the gradient is that of a weighted sum whose weights are known before, it is made in the
forward pass, while the logits of a chunk are there: no logits are computed twice (Hsu et al., "Liger Kernel", 2024).
Decision 12.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.mesh import DATA, FSDP, TENSOR, TOKENS, device_type, row_axes, row_shards, token_shards
from roxxel_dist.cluster.parameter_sharding import FSDP_MIN_SIZE, has_all_axes
from roxxel_dist.cluster.step_parts import HEAD_AND_LOSS
from roxxel_dist.model.attention.mask import pad_tokens
from roxxel_dist.model.layers import Embedding, soft_cap, unrounded_product

Arrays = list[jax.Array]
Pull = Callable[[jax.Array], tuple[Any, jax.Array]]


class Losses(NamedTuple):
    """Losses of each token, float32[B, L]."""

    losses: jax.Array
    """The cross-entropies."""
    log_sums: jax.Array
    """The logarithms of the softmax's sums."""


class ProductHead:
    """The output layer of a `Transformer` as a function of its matrix: logits are products with it, within `cap`."""

    def __init__(self, *, tied: bool, cap: float | None) -> None:
        self._tied, self._cap = tied, cap

    @classmethod
    def of_output(cls, output: nnx.LinearGeneral | Embedding, cap: float | None) -> "tuple[ProductHead, Arrays]":
        """(the head, its arrays: one)."""
        tied = isinstance(output, Embedding)
        return cls(tied=tied, cap=cap), [output.embedding[...] if tied else output.kernel[...]]

    def cut(self, array: jax.Array) -> int:
        """The dimension along which fsdp cuts an array: that of the states' width."""
        return 1 if self._tied else 0

    def logits(self, arrays: Arrays, x_BxCxD: jax.Array) -> jax.Array:
        """float32[B, C, vocabulary]."""
        x_BxCxD, (matrix,) = self._promoted(arrays, x_BxCxD)
        return soft_cap(unrounded_product(x_BxCxD, matrix.T if self._tied else matrix), self._cap)

    def pull(self, arrays: Arrays, x_BxCxD: jax.Array) -> tuple[jax.Array, Pull]:
        """(the logits, a function of their gradient: the arrays' gradients, in float32 at least, and the states')."""
        x_BxCxD, (matrix,) = self._promoted(arrays, x_BxCxD)
        logits = self.logits(arrays, x_BxCxD)

        def back(gradient: jax.Array) -> tuple[Arrays, jax.Array]:
            if self._cap is not None:
                gradient = gradient * (1 - jnp.square(logits / self._cap))
            d = gradient.astype(x_BxCxD.dtype)  # as in any other layer; the product of it and x is not rounded
            wide = jnp.promote_types(d.dtype, jnp.float32)
            if self._tied and d.dtype == wide:  # a tenth of a step faster on CPUs, which cannot do it in bfloat16
                of_matrix = jnp.einsum("bcd,bcv->dv", x_BxCxD, d).T
            else:
                result = "bcv,bcd->vd" if self._tied else "bcv,bcd->dv"
                of_matrix = jnp.einsum(result, d, x_BxCxD, preferred_element_type=wide)
            return [of_matrix], jnp.dot(d, matrix if self._tied else matrix.T)

        return logits, back

    def _promoted(self, arrays: Arrays, x_BxCxD: jax.Array) -> tuple[jax.Array, Arrays]:
        dtype = jnp.promote_types(x_BxCxD.dtype, arrays[0].dtype)
        return x_BxCxD.astype(dtype), [arrays[0].astype(dtype)]


class ModuleHead:
    """A function of a module and of states as one of the module's arrays: NNX objects do not cross jax's traces."""

    def __init__(self, function: Callable[[Any, jax.Array], jax.Array], graphdef: Any, tree: Any, all_: Arrays) -> None:
        self._function, self._graphdef, self._tree = function, graphdef, tree
        self._unused: dict[int, jax.ShapeDtypeStruct] = {}
        self._count = len(all_)

    @classmethod
    def of_function(
        cls, module: nnx.Module, function: Callable[[Any, jax.Array], jax.Array], x_BxLxD: jax.Array
    ) -> "tuple[ModuleHead, Arrays]":
        """(the head, the arrays of the module that its logits depend on)."""
        graphdef, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        head = cls(function, graphdef, tree, leaves)
        jaxpr = jax.make_jaxpr(head.logits)(leaves, x_BxLxD[:, :1]).jaxpr
        used = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars} | set(map(id, jaxpr.outvars))
        for i, (atom, leaf) in enumerate(zip(jaxpr.invars, leaves, strict=False)):
            # Left out, so that no loop sums zeros for them.
            if id(atom) not in used and _is_floating(leaf):
                head._unused[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return head, [leaf for i, leaf in enumerate(leaves) if i not in head._unused]

    def cut(self, array: jax.Array) -> int:
        """The dimension along which fsdp cuts an array: its largest one."""
        return max(range(array.ndim), key=lambda i: array.shape[i], default=0)

    def logits(self, arrays: Arrays, x_BxCxD: jax.Array) -> jax.Array:
        """[B, C, vocabulary], of a copy of the module: what the function changes of it is lost."""
        given = iter(arrays)
        leaves = [
            jnp.zeros(self._unused[i].shape, self._unused[i].dtype) if i in self._unused else next(given)
            for i in range(self._count)
        ]
        module = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves), copy=True)
        return self._function(module, x_BxCxD)

    def pull(self, arrays: Arrays, x_BxCxD: jax.Array) -> tuple[jax.Array, Pull]:
        """(logits, function of their gradient) as that of `ProductHead`; the gradient of an array that is no floating
        numbers is None."""

        def function(floating: dict[int, jax.Array], x_BxCxD: jax.Array) -> jax.Array:
            return self.logits([floating.get(i, array) for i, array in enumerate(arrays)], x_BxCxD)

        floating = {i: array for i, array in enumerate(arrays) if _is_floating(array)}
        logits, pull = jax.vjp(function, floating, x_BxCxD)

        def back(gradient: jax.Array) -> tuple[list[Any], jax.Array]:
            found, of_x = pull(gradient.astype(logits.dtype))
            return [_wide(found[i]) if i in found else None for i in range(len(arrays))], of_x

        return logits, back


Head = ProductHead | ModuleHead


@jax.named_scope(HEAD_AND_LOSS)
def cross_entropy(head: Head, arrays: Arrays, x_BxLxD: jax.Array, targets_BxL: jax.Array, chunks: int) -> Losses:
    """The losses of tokens, by the head and its arrays from states, with the targets, int32, to predict; each has a
    gradient.

    `chunks`: how many there are of the tokens that a device has of every row, of which the backward pass computes the
    logits again; 0 for all at once.
    """

    def local(arrays: Arrays, x_BxLxD: jax.Array, targets_BxL: jax.Array) -> Losses:
        def losses_of(piece: tuple[jax.Array, jax.Array]) -> Losses:
            own = [wide if wide is like else wide.astype(like.dtype) for wide, like in zip(arrays, narrow, strict=True)]
            return losses_of_logits(head.logits(own, piece[0]), piece[1])

        if not chunks:
            return losses_of((x_BxLxD, targets_BxL))
        cut = partial(_chunks, count=chunks)
        found = jax.lax.map(jax.checkpoint(losses_of), (cut(x_BxLxD), cut(targets_BxL)))
        return _joined(found, targets_BxL.shape[1])

    narrow = arrays
    if chunks:
        # The gradient is summed over the chunks in the dtype of the loop's inputs; bfloat16 would lose small terms.
        arrays = [_wide(array) if _is_floating(array) else array for array in arrays]
    return _on_devices(local, arrays, (x_BxLxD, targets_BxL))


@jax.named_scope(HEAD_AND_LOSS)
def losses_of_logits(logits: jax.Array, targets: jax.Array) -> Losses:
    """Losses of logits of any dtype: in bfloat16 the sum over a vocabulary loses its small terms."""
    return Losses(*_of_logits(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), targets))


@jax.custom_jvp
def _of_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the losses, the logarithms of the sums)."""
    log_sums, of_targets = _reduced(logits, targets)
    return log_sums - of_targets, log_sums


@_of_logits.defjvp
def _of_logits_jvp(primals: Any, tangents: Any) -> Any:
    # The transposed of this is one kernel; that of a gather would be a scatter into an array as large as the logits.
    (logits, targets), (d_logits, _) = primals, tangents
    losses, log_sums = _of_logits(logits, targets)
    d_log_sums = (jnp.exp(logits - log_sums[..., None]) * d_logits).sum(-1)
    d_targets = jnp.where(_is_target(logits, targets), d_logits, 0).sum(-1)
    return (losses, log_sums), (d_log_sums - d_targets, d_log_sums)


@jax.named_scope(HEAD_AND_LOSS)
def weighted_cross_entropy(
    head: Head,
    arrays: Arrays,
    x_BxLxD: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
    chunks: int,
    *,
    z_loss: float = 0.0,
) -> tuple[jax.Array, Losses]:
    """(float32[], the sum of weight x (loss + z_loss x log_sum^2) over all tokens, the losses as constants).

    The gradient is that of the sum alone, and has no gradient in forward mode; see `cross_entropy` for the arguments.
    The weights, float32, are constants too.
    """
    weights_BxL = jax.lax.stop_gradient(weights_BxL)
    found: Any = _weighted((head, chunks, z_loss), arrays, x_BxLxD, targets_BxL, weights_BxL)
    total, losses = found
    return total, jax.lax.stop_gradient(losses)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(
    how: tuple[Head, int, float], arrays: Arrays, x_BxLxD: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array
) -> tuple[jax.Array, Losses]:
    head, chunks, z_loss = how
    found = cross_entropy(head, arrays, x_BxLxD, targets_BxL, chunks)
    return _total(found, weights_BxL, z_loss), found


def _total(found: Losses, weights_BxL: jax.Array, z_loss: float) -> jax.Array:
    losses = found.losses + z_loss * jnp.square(found.log_sums) if z_loss else found.losses
    return (weights_BxL * losses).sum()


def _weighted_forward(
    how: tuple[Head, int, float], arrays: Arrays, x_BxLxD: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array
) -> Any:
    head, chunks, z_loss = how

    def of_piece(arrays: Arrays, x_BxCxD: jax.Array, targets_BxC: jax.Array, weights_BxC: jax.Array) -> Any:
        """(the gradients of the arrays, those of the states, the losses)."""
        logits, pull = head.pull(arrays, x_BxCxD)
        logits = _wide(logits)
        log_sums, of_targets = _reduced(logits, targets_BxC)
        # d/dl of w (s - l[t] + z s^2), where ds/dl = exp(l - s).
        of_sums = weights_BxC * (1 + 2 * z_loss * log_sums) if z_loss else weights_BxC
        gradient = of_sums[..., None] * jnp.exp(logits - log_sums[..., None])
        gradient -= jnp.where(_is_target(logits, targets_BxC), weights_BxC[..., None], 0)
        of_arrays, of_x = pull(gradient)
        return of_arrays, of_x, Losses(log_sums - of_targets, log_sums)

    def of_device(arrays: Arrays, *tokens: jax.Array) -> Any:
        if not chunks:
            return of_piece(arrays, *tokens)
        pieces = tuple(_chunks(array, chunks) for array in tokens)

        def add(sums: Any, piece: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            more, *found = of_piece(arrays, *piece)
            return jax.tree.map(jnp.add, sums, more), found

        shapes = jax.eval_shape(lambda *piece: of_piece(arrays, *piece)[0], *(array[0] for array in pieces))
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
        sums, found = jax.lax.scan(add, zeros, pieces)
        return sums, *_joined(found, tokens[0].shape[1])

    of_arrays, of_x, found = _on_devices(of_device, arrays, (x_BxLxD, targets_BxL, weights_BxL), cut=head.cut)
    of_arrays = [None if of is None else of.astype(array.dtype) for of, array in zip(of_arrays, arrays, strict=True)]
    return (_total(found, weights_BxL, z_loss), found), (of_arrays, of_x)


def _weighted_backward(how: Any, gradients: Any, of_result: tuple[jax.Array, Losses]) -> Any:
    scaled = jax.tree.map(lambda gradient: (of_result[0] * gradient).astype(gradient.dtype), gradients)
    return *scaled, None, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _reduced(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the logarithms of the softmax's sums, the logits of the targets)."""
    mesh = jax.sharding.get_abstract_mesh()
    if device_type(mesh).platform != "gpu" or (not mesh.empty and mesh.shape.get(TENSOR, 1) > 1):
        of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1), of_targets
    # One pass through the logits in place of three: a sum is kept beside the greatest logit so far, and is scaled where
    # another is greater (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
    least = jnp.finfo(logits.dtype).min

    def merged(left: Any, right: Any) -> Any:
        (m, s, t), (n, r, u) = left, right
        most = jnp.maximum(m, n)
        return most, s * jnp.exp(m - most) + r * jnp.exp(n - most), t + u

    one = jnp.ones_like(logits), jnp.where(_is_target(logits, targets), logits, 0)
    start = tuple(jnp.asarray(value, logits.dtype) for value in (least, 0, 0))
    most, sums, of_targets = jax.lax.reduce((logits, *one), start, merged, (logits.ndim - 1,))
    return most + jnp.log(sums), of_targets


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def _on_devices(
    function: Callable[..., Any],
    arrays: Arrays,
    tokens: tuple[jax.Array, ...],
    *,
    cut: Callable[[jax.Array], int] | None = None,
) -> Any:
    """`function(arrays, *tokens)` of the rows and tokens of each device: arrays are gathered once, before any loop of
    it, and what it sums for them is sent once, behind that.

    Args:
        function: returns a tree of [B, L, ...]; with `cut` a tuple of (the sum for each array or None, such trees).
        arrays: as they lie.
        tokens: [B, L, ...] each.
        cut: the dimension that fsdp cuts an array along, and the sum for it as well.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone = not has_all_axes(mesh) or mesh.size == mesh.shape[TENSOR] or not row_axes(mesh)
    if alone or tokens[0].shape[0] % row_shards(mesh):
        return function(arrays, *tokens)
    shards, length = token_shards(mesh), tokens[0].shape[1]
    tokens = tuple(pad_tokens(array, -(-length // shards) * shards) for array in tokens)
    axes = tuple(axis for axis in mesh.axis_names if axis != TENSOR)
    # Devices of other rows share an array by fsdp; a phase may have made "tokens" of that axis.
    sharing = tuple(axis for axis in (FSDP, TOKENS) if mesh.shape.get(axis, 1) > 1) or (DATA,)
    count = math.prod(mesh.shape[axis] for axis in sharing)

    def place(array: jax.Array) -> int | None:
        """The dimension along which the sum for an array is cut."""
        at = cut(array) if cut and array.size >= FSDP_MIN_SIZE else None
        return None if at is None or array.shape[at] % count else at

    def summed(total: jax.Array | None, array: jax.Array) -> jax.Array | None:
        if total is None or (at := place(array)) is None:
            return None if total is None else jax.lax.psum(total, axes)
        share = jax.lax.psum_scatter(total, sharing, scatter_dimension=at, tiled=True)
        return jax.lax.psum(share, tuple(axis for axis in axes if axis not in sharing))

    def of_device(arrays: Arrays, *tokens: jax.Array) -> Any:
        found = function(arrays, *tokens)
        if cut is None:
            return found
        return [summed(*each) for each in zip(found[0], arrays, strict=True)], *found[1:]

    def spec(array: jax.Array) -> P | None:
        if not _is_floating(array):
            return None
        return P() if (at := place(array)) is None else P(*[None] * at, sharing)

    along = P(row_axes(mesh), TOKENS if shards > 1 else None)
    out = along if cut is None else (list(map(spec, arrays)), along, along)
    manual = set(axes) if mesh.shape[TENSOR] > 1 else set(mesh.axis_names)  # along "tensor" the head itself is cut
    mapped = jax.shard_map(
        of_device, in_specs=(P(), *[along] * len(tokens)), out_specs=out, axis_names=manual, check_vma=False
    )
    found = mapped(arrays, *tokens)
    own, of_tokens = ((), found) if cut is None else (found[:1], found[1:])
    of_tokens = jax.tree.map(lambda array: array[:, :length], of_tokens)
    return (*own, *of_tokens) if own else of_tokens


def _chunks(a_BxLx: jax.Array, count: int) -> jax.Array:
    """[B, L, ...] to [chunks, B, tokens of a chunk, ...], zeros at the end; at most `count` of them, and as few as hold
    all tokens: parts of equal size need little padding, and of one or two tokens each, many would be empty."""
    size = -(-a_BxLx.shape[1] // count)
    count = -(-a_BxLx.shape[1] // size)
    whole = pad_tokens(a_BxLx, count * size)
    return jnp.moveaxis(whole.reshape(whole.shape[0], count, size, *whole.shape[2:]), 1, 0)


def _joined(tree: Any, length: int) -> Any:
    """The [B, L, ...] of chunks."""

    def each(a_NxBxCx: jax.Array) -> jax.Array:
        count, batch, size = a_NxBxCx.shape[:3]
        return jnp.moveaxis(a_NxBxCx, 0, 1).reshape(batch, count * size, *a_NxBxCx.shape[3:])[:, :length]

    return jax.tree.map(each, tree)


def _is_floating(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
