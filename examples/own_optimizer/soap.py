"""SOAP, Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321), as an optimizer of
one's own for the built-in Transformer:

    roxxel-dist train --optimizer soap:build --model_args '{every: 10}' --lr 3e-3 ...

optax has no SOAP. Embeddings, norms, experts and matrices with a side above `largest` have AdamW, by `optax.partition`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def build(config: Any, learning_rate: jax.Array) -> optax.GradientTransformation:
    """The transformation of one step at this step's rate; `config.model_args` may have every, beta and largest.

    Parameters come as a dictionary from names such as "blocks.attention.qkv.kernel" to arrays.
    """
    arguments = {"every": 10, "beta": 0.95, "largest": 4096} | config.model_args
    if arguments["every"] < 1:
        raise ValueError(f"model_args.every is {arguments['every']}: it must be at least 1")
    beta2 = 0.95 if config.beta2 is None else config.beta2

    def label(path: Any, leaf: jax.Array) -> str:
        name = path[-1].key
        is_expert = config.use_moe and name in ("blocks.feedforward.gate_up", "blocks.feedforward.down")
        if is_expert or not (name.startswith("blocks.") and leaf.ndim >= 3):
            return "adamw"
        return "soap" if max(as_matrices(leaf).shape[1:]) <= arguments["largest"] else "adamw"

    def decayed(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, leaf: leaf.ndim >= 2 and not path[-1].key.endswith("scale"), params)

    first = {
        "soap": scale_by_soap(config.beta1, beta2, arguments["beta"], arguments["every"]),
        "adamw": optax.scale_by_adam(config.beta1, beta2),
    }
    return optax.chain(
        optax.partition(first, lambda params: jax.tree.map_with_path(label, params)),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate),
    )


def as_matrices(leaf: jax.Array) -> jax.Array:
    """[blocks, rows, columns] of an array whose first axis is the block, and whose second is the rows."""
    return leaf.reshape(*leaf.shape[:2], -1)


class SoapState(NamedTuple):
    """Of arrays seen as [blocks, rows, columns], each a tree as the parameters."""

    count: jax.Array
    """int32[]: steps done."""
    mean: Any
    """Of the gradients, in their own basis."""
    square: Any
    """Mean of squared gradients, in the eigenbasis."""
    sides: Any
    """A pair for each array: the means of G G^T and G^T G."""
    bases: Any
    """A pair for each array: their eigenvectors, as columns."""


def scale_by_soap(b1: float, b2: float, beta: float, every: int, eps: float = 1e-8) -> optax.GradientTransformation:
    """The directions of SOAP; the eigenbasis is refreshed each `every` steps by a step of power iteration and a QR."""

    def init(params: Any) -> SoapState:
        views = jax.tree.map(as_matrices, params)
        zeros = jax.tree.map(jnp.zeros_like, views)
        pairs = jax.tree.map(lambda g: tuple(jnp.zeros((g.shape[0], n, n), g.dtype) for n in g.shape[1:]), views)
        return SoapState(jnp.int32(0), zeros, zeros, pairs, pairs)

    def update(updates: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        del params
        count = state.count + 1
        rate1, rate2 = 1 - b1**count, 1 - b2**count

        def one(gradient: jax.Array, mean: jax.Array, square: jax.Array, sides: Any, bases: Any) -> Any:
            g = as_matrices(gradient)
            left, right = jnp.einsum("bij,bkj->bik", g, g), jnp.einsum("bij,bik->bjk", g, g)
            sides = tuple(beta * old + (1 - beta) * new for old, new in zip(sides, (left, right), strict=True))

            def begin() -> Any:
                return tuple(jnp.linalg.eigh(side)[1][..., ::-1] for side in sides), square

            def refresh() -> Any:
                """In the order of the eigenvalues, the largest first: power iteration takes any other one there."""
                sizes = (jnp.einsum("bij,bik,bkj->bj", q, side, q) for side, q in zip(sides, bases, strict=True))
                u, v = (jnp.argsort(size, -1, descending=True) for size in sizes)
                ordered = (jnp.take_along_axis(q, o[:, None], 2) for q, o in zip(bases, (u, v), strict=True))
                new = tuple(jnp.linalg.qr(side @ q)[0] for side, q in zip(sides, ordered, strict=True))
                return new, jnp.take_along_axis(jnp.take_along_axis(square, u[..., None], 1), v[:, None], 2)

            which = jnp.where(count == 1, 2, jnp.where(count % every == 0, 1, 0))
            (u, v), square = jax.lax.switch(which, [lambda: (bases, square), refresh, begin])
            mean = b1 * mean + (1 - b1) * g
            rotated, direction = (jnp.einsum("bij,bik,bjl->bkl", x, u, v) for x in (g, mean))
            square = b2 * square + (1 - b2) * rotated**2
            step = (direction / rate1) / (jnp.sqrt(square / rate2) + eps)
            return jnp.einsum("bkl,bik,bjl->bij", step, u, v).reshape(gradient.shape), mean, square, sides, (u, v)

        leaves, tree = jax.tree.flatten(updates)
        parts = (tree.flatten_up_to(part) for part in (state.mean, state.square, state.sides, state.bases))
        made = [one(*args) for args in zip(leaves, *parts, strict=True)]
        steps, *rest = (jax.tree.unflatten(tree, part) for part in zip(*made, strict=True))
        return steps, SoapState(count, *rest)

    return optax.GradientTransformation(init, update)
