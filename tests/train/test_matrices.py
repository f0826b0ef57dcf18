"""A matrix is what its metadata says, whatever axes are stacked before it: which optimizer updates what, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.layers import COLUMN_AXES, STACKED
from roxxel_dist.model.split import Matrix, split_module
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.training import OPTIMIZERS, OptimizerConfig
from roxxel_dist.train.step.by_parameter import decay_mask, groups_of
from roxxel_dist.train.step.optimizer import NamedOptimizer

SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": 40, "head_size": 8, "kv_heads": 2, "n_heads": 4}
BLOCK = {"attention.qkv.kernel": 2, "attention.out.kernel": 2}
DENSE = {**BLOCK, "feedforward.gate_up.kernel": 2, "feedforward.down.kernel": 2}
EXPERTS = {**BLOCK, "feedforward.router.kernel": 2, "feedforward.gate_up": 2 * 4, "feedforward.down": 2 * 4}
ADAPTERS_OF_ATTENTION = {f"attention.{name}.lora_{side}": 2 for name in ("qkv", "out") for side in "ab"}
ADAPTERS = ADAPTERS_OF_ATTENTION | {
    f"feedforward.{name}_adapter.lora_{side}": 8 for name in ("gate_up", "down") for side in "ab"
}
MLA = {f"attention.{name}.kernel": 2 for name in ("down_kv", "down_q", "up_k", "up_q", "up_v", "out")} | {
    name: count for name, count in DENSE.items() if name.startswith("feedforward.")
}
TABLES = {"embedding.embedding"}
MODELS = {
    "tied": ({}, DENSE, TABLES),
    "untied": ({"weight_tying": False}, DENSE, {*TABLES, "head.kernel"}),
    "biases": ({"qkv_bias": True}, DENSE, TABLES),
    "norms of queries": ({"qk_norm": "head"}, DENSE, TABLES),
    "layernorm": ({"norm_type": "layernorm"}, DENSE, TABLES),
    "absolute positions": ({"pos_encoding": "absolute"}, DENSE, TABLES),
    "learned positions": ({"pos_encoding": "learned", "max_context": 8}, DENSE, {*TABLES, "position.embedding"}),
    "gated attention": ({"no_sink": True}, {**DENSE, "attention.gate.score.kernel": 2}, TABLES),
    "mla": ({"mla": True, "kv_heads": None, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 4}, MLA, TABLES),
    "experts": ({"use_moe": True, "n_experts": 4}, EXPERTS, TABLES),
    "adapters": ({"use_lora": True, "lora_rank": 2}, ADAPTERS_OF_ATTENTION, set()),
    "adapters of experts": (
        {"use_moe": True, "n_experts": 4, "use_lora": True, "lora_rank": 2, "lora_targets": "all"}, ADAPTERS, set(),
    ),
}  # fmt: skip


def abstract(fields):
    split, params, _, hparams = split_module(
        nnx.eval_shape(lambda: Transformer(ModelConfig(**SMALL | fields), nnx.Rngs(0)))
    )
    return split.params.matrices, params, {name: hparams[name] for name in split.frozen.names}


@pytest.mark.parametrize("name", MODELS)
def test_which_optimizer_updates_what(name):
    fields, inner, tables = MODELS[name]
    matrices, params, frozen = abstract(fields)
    for optimizer in OPTIMIZERS:
        check_groups(optimizer, params, matrices, frozen, inner, tables)


def check_groups(optimizer, params, matrices, frozen, inner, tables):
    """What the optimizer updates, and how, is what the table of this file says."""
    groups = groups_of(optimizer, params, matrices, frozen)
    assert sorted(name for group in groups for name in group.arrays) == sorted({**params, **frozen})
    assert sum(group.parameters for group in groups) == sum(leaf.size for leaf in {**params, **frozen}.values())
    inside = {f"blocks.{array}": count for array, count in inner.items()}
    found = {(group.optimizer, group.weight_decay, group.matrices): set(group.arrays) for group in groups}
    rest = set(params) - set(inside) - tables
    assert all(array.endswith(("scale", "bias")) for array in rest), rest
    expected = {("none", False, 0): set(frozen)} if frozen else {}
    if optimizer == "muon":
        expected["muon", True, sum(inside.values())] = set(inside)
        expected |= {("adamw", True, len(tables)): tables} if tables else {}
    else:
        expected[optimizer, True, sum(inside.values()) + len(tables)] = set(inside) | tables
    if rest:
        expected["adamw" if optimizer == "muon" else optimizer, False, 0] = rest
    assert found == expected, optimizer


def test_what_is_not_known_of_an_optimizer_and_a_model_of_ones_own():
    """A convolution has axes that nothing explains: it is no matrix, and is decayed. Stacked vectors are not; nor are
    biases with two axes, as Flax's attention has."""

    class Net(nnx.Module):
        def __init__(self):
            self.conv = nnx.Param(np.zeros((3, 3, 4, 4)))
            self.gains = nnx.Param(np.ones((5, 4)), **{STACKED: 1})
            self.key_bias = nnx.Param(np.zeros((2, 4)))
            self.heads = nnx.Param(np.zeros((5, 4, 2, 3)), **{STACKED: 1, COLUMN_AXES: 2})

    split, params, _, _ = split_module(Net())
    by_name = {
        array: (group.optimizer, group.weight_decay, group.matrices)
        for group in groups_of("muon", params, split.params.matrices, {}) for array in group.arrays
    }  # fmt: skip
    not_decayed = {"gains": ("adamw", False, 0), "key_bias": ("adamw", False, 0)}
    assert by_name == {"conv": ("adamw", True, 0), "heads": ("muon", True, 5), **not_decayed}
    decays = {"conv": True, "gains": False, "heads": True, "key_bias": False}
    assert decay_mask(params, split.params.matrices) == decays
    (own,) = groups_of("module:build", params, {}, {})
    assert (own.optimizer, own.weight_decay, len(own.arrays)) == ("module:build", None, 4)


LAYERS, COUNT, DIM, HIDDEN = 2, 3, 16, 5
SHAPES = {"gate_up": (LAYERS, COUNT, DIM, 2, HIDDEN), "down": (LAYERS, COUNT, HIDDEN, DIM)}
STACKS = {"gate_up": Matrix(stacked=2, columns=2), "down": Matrix(stacked=2)}


def arrays(seed, shapes):
    rng = np.random.default_rng(seed)
    # Of very different sizes: a norm of several experts together would be another one.
    return {
        name: (rng.standard_normal(shape) * 4.0 ** rng.integers(-3, 4, (*shape[:2], *[1] * (len(shape) - 2)))).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def update(optimizer, params, grads):
    """Three steps with the same gradients, in the last one 100 times as large: all updates."""
    numbers, found = optimizer.settings(10), []
    state = jax.jit(optimizer.build(numbers, 0).init)(params)

    @jax.jit
    def step(params, state, number):
        now = jax.tree.map(lambda gradient: gradient * jnp.where(number == 2, 100.0, 1.0), grads)
        updates, state = optimizer.build(numbers, number).update(now, state, params)
        return optax.apply_updates(params, updates), state, updates

    for number in range(3):
        params, state, updates = step(params, state, number)
        found.append(updates)
    return jax.tree.map(np.asarray, found)


def newton_schulz(matrix):
    """The orthogonal part of a matrix, nearly, with Muon's coefficients, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.astype(np.float64)
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def test_muon_takes_the_matrix_of_each_expert():
    config = OptimizerConfig(
        optimizer="muon", lr=0.1, lr_schedule="constant", warmup_steps=0, momentum=0.0, weight_decay=0.0, grad_clip=0
    )
    params, grads = arrays(0, SHAPES), arrays(1, SHAPES)
    found = update(NamedOptimizer(config, matrices=STACKS), params, grads)[0]
    for name, gradient in grads.items():
        rows = gradient.shape[2]
        flat = gradient.reshape(LAYERS * COUNT, rows, -1)
        want = np.stack([newton_schulz(one) * 0.2 * max(one.shape) ** 0.5 for one in flat]) * -0.1
        np.testing.assert_allclose(found[name].reshape(want.shape), want, rtol=2e-3, atol=2e-5)


def test_adafactor_takes_the_matrix_of_each_expert():
    """Large enough to factor; the update of each is cut to a root mean square of its own."""
    shapes = {"gate_up": (LAYERS, COUNT, 130, 2, 70), "down": (LAYERS, COUNT, 140, 130)}
    config = OptimizerConfig(
        optimizer="adafactor", lr=0.1, lr_schedule="constant", warmup_steps=0, weight_decay=0.1, grad_clip=0
    )
    params, grads = arrays(0, shapes), arrays(1, shapes)
    found = update(NamedOptimizer(config, matrices=STACKS), params, grads)
    single = optax.adafactor(
        0.1, multiply_by_parameter_scale=False, weight_decay_rate=0.01, decay_rate=0.8, clipping_threshold=1.0
    )
    begin, change_of = jax.jit(single.init), jax.jit(single.update)
    for name, shape in shapes.items():
        for layer, expert in ((0, 0), (1, 2)):
            one = params[name][layer, expert].reshape(shape[2], -1)
            gradient = grads[name][layer, expert].reshape(one.shape)
            state = begin(one)
            for number in range(3):
                change, state = change_of(gradient * np.float32(100.0 if number == 2 else 1.0), state, one)
                one = one + np.asarray(change)
                mine = found[number][name][layer, expert].reshape(one.shape)
                np.testing.assert_allclose(mine, change, rtol=1e-4, atol=1e-6)
