"""Weights in our format and in that of Hugging Face, in both directions.

Pure functions: for each of our arrays the Hugging Face tensors that it consists of (`tensors_of`). There a matrix is
[outputs, inputs], and each projection, expert and layer has its own tensor; here it is [inputs, *outputs], and matrices
that are multiplied together are one array. The families and their configs are `model/families.py`.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.families import FAMILIES, family_of
from roxxel_dist.model.mlp import hidden_sizes

NORMS = {
    "before": {"attention_norm": "input_layernorm", "feedforward_norm": "post_attention_layernorm"},
    "after": {"post_attention_norm": "post_attention_layernorm", "post_feedforward_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "feedforward_norm": "pre_feedforward_layernorm", "post_feedforward_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
"""The norms of a block, by `norm_position`: our names to theirs."""


class Tensors(NamedTuple):
    """The Hugging Face tensors of one of our arrays: for each layer and each expert, some tensors, concatenated."""

    names: tuple[str, ...]
    """With {i} for the layer and {e} for the expert."""
    pieces: tuple[tuple[int, ...], ...]
    """The shape of each tensor's part in our array; the tensor itself is [outputs, inputs], or a vector."""
    axis: int = 0
    """The axis of the pieces along which they are concatenated."""
    stack: tuple[int, ...] = ()
    """The first axes of our array: the number of layers, and of experts."""
    transposed: bool = True
    fused: bool = False
    """The pieces are the rows of one tensor, one piece after the other."""
    bias: bool = False
    """The tensors are vectors, of the outputs alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of our array."""
        inner = list(self.pieces[0])
        inner[self.axis] = sum(piece[self.axis] for piece in self.pieces)
        return (*self.stack, *inner)

    def named(self, *index: int) -> list[str]:
        """The tensor names for one layer and expert."""
        layer, expert = (*index, 0, 0)[:2]
        return [name.format(i=layer, e=expert) for name in self.names]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The shape of each piece as [outputs, inputs], or [outputs]; unchanged where it is not transposed."""
        if self.bias:
            return [(math.prod(piece),) for piece in self.pieces]
        if self.transposed:
            return [(math.prod(piece[1:]), piece[0]) for piece in self.pieces]
        return list(self.pieces)


def tensors_of(config: ModelConfig, family: str | None = None) -> dict[str, Tensors]:
    """The tensors of every array of a Transformer, by the array's name. For configs that `hf_config` accepts.

    `family` is their `model_type`; by default the one that the config is exported as.
    """
    family = family or family_of(config)
    heads, groups, size = config.heads()
    dim, hidden, vocab, experts = config.dim, hidden_sizes(config)[1], config.vocab_size or 0, config.n_experts
    layers, block = (config.num_blocks,), "model.layers.{i}."
    queries, shared = (dim, groups, heads // groups, size), (dim, groups, 1, size)
    fused = FAMILIES[family].fused
    attention, qkv = f"{block}self_attn.", ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    table = {
        "embedding.embedding": Tensors(("model.embed_tokens.weight",), ((vocab, dim),), transposed=False),
        "blocks.attention.qkv.kernel": Tensors(
            tuple(f"{attention}{name}.weight" for name in qkv), (queries, shared, shared), 2, layers, fused=fused
        ),
        "blocks.attention.out.kernel": Tensors((f"{attention}o_proj.weight",), ((heads * size, dim),), 0, layers),
        "norm.scale": Tensors(("model.norm.weight",), ((dim,),), transposed=False),
    }
    for ours, theirs in NORMS[config.norm_position].items():
        table[f"blocks.{ours}.scale"] = Tensors((f"{block}{theirs}.weight",), ((dim,),), 0, layers, False)
    if config.qkv_bias:
        names = tuple(f"{attention}{name}.bias" for name in qkv)
        pieces = queries[1:], shared[1:], shared[1:]
        table["blocks.attention.qkv.bias"] = Tensors(names, pieces, 1, layers, False, bias=True)
    if config.qk_norm != "none":
        of_q, of_k = (1, 1) if config.qk_norm == "head" else (heads, groups)
        for name, count in (("q_norm", of_q), ("k_norm", of_k)):
            vector = ((count * size,),)
            table[f"blocks.attention.{name}.scale"] = Tensors((f"{attention}{name}.weight",), vector, 0, layers, False)
    first, second = ((dim, 1, hidden),) * 2, ((hidden, dim),)
    if config.use_moe:
        layer, gate, up, down = FAMILIES[family].expert_tensors
        moe, stack = f"{block}{layer}.", (*layers, experts)
        one = f"{moe}experts.{{e}}."
        table |= {
            "blocks.feedforward.router.kernel": Tensors((f"{moe}gate.weight",), ((dim, experts),), 0, layers),
            "blocks.feedforward.gate_up": Tensors((f"{one}{gate}.weight", f"{one}{up}.weight"), first, 1, stack),
            "blocks.feedforward.down": Tensors((f"{one}{down}.weight",), second, 0, stack),
        }
    else:
        mlp = f"{block}mlp."
        both = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        names = tuple(f"{mlp}{name}.weight" for name in both)
        table |= {
            "blocks.feedforward.gate_up.kernel": Tensors(names, first, 1, layers, fused=fused),
            "blocks.feedforward.down.kernel": Tensors((f"{mlp}down_proj.weight",), second, 0, layers),
        }
    if not config.weight_tying:
        table["head.kernel"] = Tensors(("lm_head.weight",), ((dim, vocab),))
    return table


def their_shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of one of our arrays."""
    shapes = tensors.rows
    if tensors.fused:
        shapes = [(sum(rows for rows, _ in shapes), shapes[0][1])]
    return {
        name: shape
        for index in np.ndindex(tensors.stack)
        for name, shape in zip(tensors.named(*index), shapes, strict=True)
    }


def take_out(array: np.ndarray, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of all tensors of one of our arrays."""
    cuts = np.cumsum([piece[tensors.axis] for piece in tensors.pieces])[:-1]
    for index in np.ndindex(tensors.stack):
        pieces = np.split(array[index], cuts, tensors.axis)
        if tensors.transposed:
            pieces = [piece.reshape(len(piece), -1).T for piece in pieces]
        elif tensors.bias:
            pieces = [piece.reshape(-1) for piece in pieces]
        if tensors.fused:
            pieces = [np.concatenate(pieces)]
        for name, piece in zip(tensors.named(*index), pieces, strict=True):
            yield name, np.ascontiguousarray(piece)


def put_together(
    tensors: Tensors, index: tuple[slice, ...], read: Callable[[str, tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """A part of one of our arrays: `index` has a slice without step for each axis.

    `read` gives (name, slices) that part of a tensor: slices of the inputs, and of the first axis of the outputs.
    """
    whole = [range(*one.indices(size)) for one, size in zip(index, tensors.shape, strict=True)]
    layers, inner = whole[: len(tensors.stack)], index[len(tensors.stack) :]
    stack = tuple(len(each) for each in layers)
    parts = [_inner(tensors, place, inner, read) for place in itertools.product(*layers)]
    return np.stack(parts).reshape(*stack, *parts[0].shape) if stack else parts[0]


def _inner(tensors: Tensors, place: tuple[int, ...], index: tuple[slice, ...], read: Any) -> np.ndarray:
    """The part for one layer and expert."""
    if not tensors.transposed and not tensors.bias:
        return read(tensors.named(*place)[0], index)
    # The axis of outputs by which rows are read: not the axis of gate and up.
    cut = 0 if tensors.bias else 2 if tensors.axis == 1 else 1
    pieces, first = [], 0
    names = tensors.named(*place) * (len(tensors.pieces) if tensors.fused else 1)
    for name, piece, rows in zip(names, tensors.pieces, tensors.rows, strict=True):
        begin, end, _ = index[cut].indices(piece[cut])
        below = math.prod(piece[cut + 1 :])
        span = slice(first + begin * below, first + end * below)
        first += rows[0] if tensors.fused else 0
        if tensors.bias:
            pieces.append(read(name, (span,)).reshape(end - begin, *piece[1:]))
            continue
        part = read(name, (span, index[0])).T
        pieces.append(part.reshape(len(part), *piece[1:cut], end - begin, *piece[cut + 1 :]))
    rest = [slice(None) if axis in (0, cut) else one for axis, one in enumerate(index)]
    return np.concatenate(pieces, axis=tensors.axis)[tuple(rest)]
