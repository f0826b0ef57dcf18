"""Phases with fewer rows than virtual shards: each row is cut into shards of its tokens, and the bits stay."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_rows import SHARDS, SMALL, batch_of, hash_of, trained
from flax import nnx
from jax.sharding import AxisType
from models import transformer

from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.model.attention.cut_rows import RowCut
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.process.exit_codes import UserError
from roxxel_dist.train.exact.layout import check_virtual_shards
from roxxel_dist.train.step.optimizer import as_optimizer

OWN_MESH = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 8}
DROPOUT = {"dropout_rate": 0.1}
FEATURES = {
    "plain": {},
    "one layer": {"num_blocks": 1},
    "logits in chunks, scan": {"loss_chunk": 8, "scan_layers": True},
    "window, gate, learned positions, remat": {
        "sliding_window": True, "context_window": 40, "no_sink": True, "pos_encoding": "learned",
        "gradient_checkpointing": True,
    },
    "mla, scan, untied": MLA | {"scan_layers": True, "weight_tying": False},
    "experts": {"use_moe": True, "n_experts": 4, "top_k_mlp": 2},
    "sinusoids, layernorm, heads of their own": {"pos_encoding": "absolute", "norm_type": "layernorm", "kv_heads": 2},
    "mup": {"parametrization": "mup", "base_dim": 16},
    "queries and keys normed, biases": {"qk_norm": "head", "qkv_bias": True},
    "norms after each part, partial rotary": {
        "qk_norm": "projection", "norm_position": "after", "partial_rotary_factor": 0.5
    },
    "soft caps, norms before and after, z-loss": {
        "attn_softcap": 2.0, "logit_softcap": 5.0, "norm_position": "both", "norm_unit_offset": True,
        "scale_embeddings": True, "query_pre_attn_scalar": 12.0, "z_loss": 1e-3,
    },
}  # fmt: skip
PHASES = [(8, 17), (4, 45), (1, 130)]


def on_default_flags(cases, devices):
    """The hashes of each case on each number of devices, in a process whose XLA is that of a user."""
    program = Path(__file__).parents[1] / "support" / "exact_rows.py"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PJRT_NPROC": "16"}
    words = [sys.executable, str(program), json.dumps(cases), *map(str, devices)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


GATE = {"fields": DROPOUT | {"no_sink": True, "num_blocks": 1}, "shapes": [[1, 33]], "shards": 4, "steps": 2}
GATE |= {"packed": True, "validate": False}


@pytest.mark.long
def test_one_hash_of_bf16_with_dropout_and_documents_on_1_and_2_devices():
    """On two devices each adds the sums of two shards, and they add those."""
    options = GATE | {"dtype": jnp.bfloat16, "optimizer": as_optimizer(optax.sgd(1.0))}
    hashes = {
        count: hash_of(trained(count, **options, model=transformer(**SMALL | GATE["fields"]))) for count in (1, 2)
    }
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_hash_of_it_on_the_xla_of_a_user():
    [hashes] = on_default_flags([GATE | {"dtype": "bfloat16"}], [1, 2])
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_one_hash_on_any_devices(name, packed):
    """In float32, and in bfloat16 with dropout; through phases of 8 rows, 4 rows, and 1 row, and in validation."""
    cases = [
        {"fields": FEATURES[name], "packed": packed, "shapes": PHASES},
        {"fields": FEATURES[name] | DROPOUT, "packed": packed, "dtype": "bfloat16", "shapes": PHASES},
    ]
    for hashes in on_default_flags(cases, [1, 2, 3, 4, 7, 8]):
        assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
def test_two_rows_on_up_to_four_devices_and_a_loss_of_one_number():
    options = {"packed": True, "loss": next_token_loss, "steps": 1}
    fields = DROPOUT | {"use_moe": True, "n_experts": 4, "num_blocks": 1}
    hashes = {count: hash_of(trained(count, fields, [(2, 33)], shards=4, **options)) for count in (1, 2, 3, 4)}
    assert len(set(hashes.values())) == 1, hashes


def loss_and_gradient(model, shape, *, packed):
    """Of an ordinary model in float64: its attention has all scores at once."""
    with jax.enable_x64(True):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        batch = batch_of(0, shape, packed, jax.devices()[0])
        of_params = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(graphdef, p, rest), batch))
        loss, grads = jax.jit(of_params)(params)
        leaves = jax.tree.leaves_with_path(grads)
        names = {jax.tree_util.keystr(path[:-1], simple=True, separator="."): leaf for path, leaf in leaves}
        return float(loss), {name: np.asarray(leaf, np.float64) for name, leaf in names.items()}


CASE = ("one layer", (1, 50), True)
MORE = [("plain", (1, 130), True), ("window, gate, learned positions, remat", (4, 60), False)]
MORE += [(name, shape, packed) for name in FEATURES for shape in ((1, 100), (4, 40)) for packed in (False, True)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "shape", "packed"), [CASE, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)]
)
def test_gradients_are_those_of_dense_attention_in_float64(name, shape, packed):
    """And on two devices, each of which adds the sums of two shards, the bits of one."""
    fields = FEATURES[name] | {"alpha_balance": 0.0}  # the balance of experts is that of each shard
    start = transformer(**SMALL | fields)
    loss, gradients = loss_and_gradient(start, shape, packed=packed)
    options = {"steps": 1, "optimizer": as_optimizer(optax.sgd(1.0)), "validate": False}
    options |= {"shards": SHARDS // 2, "packed": packed, "model": start}
    one, two = (trained(devices, fields, [shape], **options) for devices in (1, 2))
    assert hash_of(one) == hash_of(two)
    [(found, rows)], params, _ = two
    assert found["loss"] + found.get("balance_loss", 0.0) == pytest.approx(loss, rel=1e-6)
    assert len(rows) == shape[0]
    before = {
        jax.tree_util.keystr(path[:-1], simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(nnx.state(start, nnx.Param))
    }
    for leaf, expected in gradients.items():
        mine = before[leaf].astype(np.float64) - params[leaf]
        np.testing.assert_allclose(mine, expected, atol=1e-5 * np.abs(expected).max() + 1e-7, err_msg=leaf)


@pytest.mark.parametrize(("length", "window"), [(8192, None), (100, None), (20_001, 100)])
def test_shards_see_equally_many_keys_and_are_all_of_a_row(length, window):
    cut = RowCut.of_length(SHARDS, length, window, by_place=False)
    numbers = [np.asarray(cut.numbers(shard)) for shard in range(2 * SHARDS)]
    assert len({part.sum() for part in numbers}) == 1
    assert all(np.array_equal(*pair) for pair in zip(numbers[:SHARDS], numbers[SHARDS:], strict=True))
    joined = np.concatenate(numbers[:SHARDS])
    np.testing.assert_array_equal(joined[cut.places], np.arange(cut.row_blocks))
    assert 0 <= cut.tokens - length < SHARDS * cut.blocks


LONG = Shape(steps=1, batch_size=1, seq_len=9, weights=(("self", 1.0),))
REFUSED = [
    (LONG, {}, r"1, so virtual_shards \(8\) cuts each row .* of two pieces, and it has 8 tokens .* at least 17"),
    (replace(LONG, batch_size=6), {}, r"cuts each row into 8 / 6 shards, .* a multiple of 8"),
    (replace(LONG, batch_size=2, seq_len=65), {"grad_accum": 2}, r"4 shards, .* at once, and grad_accum is 2"),
    (replace(LONG, seq_len=65), {"cuts_rows": False}, r"8 shards\. .* the built-in model and its loss"),
    (replace(LONG, seq_len=65), {"mesh": OWN_MESH}, r"8 shards, .* on a mesh of make_mesh alone, .*'x': 8"),
]


@pytest.mark.parametrize(("shape", "options", "words"), REFUSED)
def test_what_cannot_be_cut_is_refused(shape, options, words):
    options = {"grad_accum": 1, "mesh": make_mesh(8)} | options
    with pytest.raises(UserError, match=words):
        check_virtual_shards(SHARDS, [replace(LONG, batch_size=16), shape], **options)
