"""Phases with fewer rows than virtual shards: each row is cut into shards of its tokens, and the bits stay."""

import hashlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from roxxel_dist.cluster.exit_codes import UserError
from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, make_mesh, scalars_on
from roxxel_dist.curriculum.segments import Shape
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss, token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.train.compile import AotCompiler
from roxxel_dist.train.optimizer import InitialState, NamedOptimizer, OptimizerConfig
from roxxel_dist.train.train_state import init_state
from roxxel_dist.train.train_step import SPIKE_FACTOR, make_step
from roxxel_dist.train.virtual_shards.layout import check_virtual_shards
from roxxel_dist.train.virtual_shards.step import init_state_of_copies, make_sharded_steps

SHARDS = 8
OWN_MESH = jax.make_mesh((8,), ("x",), (AxisType.Auto,))
SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": 96, "max_context": 512, "head_size": 16, "kv_heads": 1}
MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 8}
FEATURES = {
    "one block, dropout": {"num_blocks": 1, "dropout_rate": 0.1},
    "plain": {},
    "dropout, scan, logits in chunks": {"dropout_rate": 0.2, "scan_layers": True, "loss_chunk": 8},
    "window, gate, learned positions, remat": {
        "sliding_window": True, "context_window": 40, "no_sink": True, "pos_encoding": "learned",
        "gradient_checkpointing": True,
    },
    "mla, remat, scan, untied": MLA | {"gradient_checkpointing": True, "scan_layers": True, "weight_tying": False},
    "experts, dropout": {"use_moe": True, "n_experts": 4, "top_k_mlp": 2, "dropout_rate": 0.1},
    "sinusoids, layernorm": {"pos_encoding": "absolute", "norm_type": "layernorm"},
}  # fmt: skip


def batch_of(seed, shape, packed, sharding):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 96, shape).astype(np.int32)
    if not packed:
        return jax.device_put(tokens, sharding)
    segments = np.sort(rng.integers(0, 3, shape), 1).astype(np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) != 0, np.arange(shape[1]), 0), 1)
    return Packed(*jax.device_put((tokens, segments, (np.arange(shape[1]) - starts).astype(np.int32)), sharding))


def trained(devices, fields, shapes, *, shards=SHARDS, packed=False, loss=token_losses, dtype=None, steps=2):
    """(losses and gradient norms of each step, the parameters after them, a validation's losses) of some phases."""
    mesh, optimizer = make_mesh(devices), NamedOptimizer(OptimizerConfig(lr=1e-2, warmup_steps=0))
    init = init_state_of_copies if shards else init_state
    builder = TransformerBuilder(ModelConfig(**SMALL | fields), 0, 1)
    split, state, hparams = init(builder, InitialState(optimizer), mesh, fsdp=False, dtype=None)
    hparams |= scalars_on(mesh, {**optimizer.settings(100), SPIKE_FACTOR: 0.0})
    sharding, compiler, found, validation = batch_sharding(mesh), AotCompiler(mesh), [], {}
    if shards:
        step, evaluate = make_sharded_steps(split, loss, optimizer, sharding, shards=shards, compute_dtype=dtype)
    else:
        step, evaluate = make_step(split, loss, optimizer, state, sharding, compute_dtype=dtype), None
    for number, shape in enumerate(shapes):
        place = fit_sharding(sharding, shape)
        compiler.prepare(
            ("step", shape), step, getattr(state, "whole", state), hparams, batch_of(0, shape, packed, place)
        )
        for each in range(steps):
            batch = batch_of(10 * number + each, shape, packed, place)
            state, metrics = compiler.get(("step", shape))(state, hparams, batch)
            scalars = {name: float(value) for name, value in sorted(metrics.scalars.items())}
            rows = None if metrics.row_loss is None else np.asarray(metrics.row_loss).tolist()
            found.append((scalars, rows))
        if evaluate is not None:
            whole = state.whole
            compiler.prepare(("evaluate", shape), evaluate, whole.params, whole.rest, hparams, batch)
            losses = compiler.get(("evaluate", shape))(whole.params, whole.rest, hparams, batch)
            validation = {name: float(value) for name, value in sorted(losses.items())}
    compiler.close()
    whole = getattr(state, "whole", state)
    return found, {name: np.asarray(leaf) for name, leaf in whole.params.items()}, validation


def hash_of(result):
    found, params, validation = result
    digest = hashlib.sha256(repr((found, validation)).encode())
    for name in sorted(params):
        digest.update(params[name].tobytes())
    return digest.hexdigest()[:12]


PHASES = [(8, 17), (2, 45), (1, 129)]


def cases():
    for name in FEATURES:
        for packed in (False, True):
            yield pytest.param(name, packed, (1, 2, 4, 8), PHASES, marks=pytest.mark.long, id=f"{name}, {packed}")
    yield pytest.param("one block, dropout", True, (1, 2), [(1, 65)], id="two devices")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "packed", "devices", "phases"), list(cases()))
def test_one_hash_on_any_devices(name, packed, devices, phases):
    hashes = {count: hash_of(trained(count, FEATURES[name], phases, packed=packed)) for count in devices}
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
@pytest.mark.parametrize("loss", [token_losses, next_token_loss])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_one_hash_of_mixed_precision_and_of_a_loss_of_one_number(loss, dtype):
    fields = {"use_moe": True, "n_experts": 4}
    hashes = {count: hash_of(trained(count, fields, [(1, 65)], loss=loss, dtype=dtype)) for count in (1, 4)}
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 129), (1, 100), (4, 40)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name, fields in FEATURES.items() if "dropout_rate" not in fields])
def test_the_numbers_of_an_ordinary_step(name, packed, shape):
    """Losses, of rows too, gradient norms and parameters after three steps, up to rounding."""
    (found, params, _), (whole, expected, _) = (
        trained(1, FEATURES[name], [shape], shards=shards, packed=packed, steps=3) for shards in (SHARDS, 0)
    )
    for (mine, rows), (scalars, of_rows) in zip(found, whole, strict=True):
        assert mine == pytest.approx(scalars, rel=1e-5)
        assert rows == pytest.approx(of_rows, rel=1e-5)
    for leaf, values in params.items():
        np.testing.assert_allclose(values, expected[leaf], atol=1e-4, err_msg=leaf)


LONG = Shape(steps=1, batch_size=1, seq_len=9, weights=(("self", 1.0),))
REFUSED = [
    (LONG, {}, r"1, so virtual_shards \(8\) cuts each row .* of two pieces, and it has 8 tokens .* at least 17"),
    (replace(LONG, batch_size=3), {}, r"cuts each row into 8 / 3 shards, .* a multiple of 8"),
    (replace(LONG, batch_size=2, seq_len=65), {"grad_accum": 2}, r"4 shards, .* at once, and grad_accum is 2"),
    (replace(LONG, seq_len=65), {"cuts_rows": False}, r"8 shards, .* the built-in model and its loss alone"),
    (replace(LONG, seq_len=65), {"mesh": OWN_MESH}, r"8 shards, .* on a mesh of make_mesh alone, .*'x': 8"),
]


@pytest.mark.parametrize(("shape", "options", "words"), REFUSED)
def test_what_cannot_be_cut_is_refused(shape, options, words):
    options = {"grad_accum": 1, "mesh": make_mesh(8)} | options
    with pytest.raises(UserError, match=words):
        check_virtual_shards(SHARDS, [replace(LONG, batch_size=16), shape], **options)
