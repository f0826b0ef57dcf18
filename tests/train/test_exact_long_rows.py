"""Phases with fewer rows than virtual shards: each row is cut into shards of its tokens, and the bits stay."""

import hashlib

import jax
import numpy as np
import pytest

from roxxel_dist.cluster.mesh import batch_sharding, fit_sharding, make_mesh, scalars_on
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.train.compile import AotCompiler
from roxxel_dist.train.optimizer import InitialState, NamedOptimizer, OptimizerConfig
from roxxel_dist.train.train_state import init_state
from roxxel_dist.train.train_step import SPIKE_FACTOR, make_step
from roxxel_dist.train.virtual_shards.step import init_state_of_copies, make_sharded_steps

SHARDS = 8
SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": 96, "max_context": 512, "head_size": 16, "kv_heads": 1}
MLA = {"mla": True, "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 8}
FEATURES = {
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


PHASES = [(8, 17), (1, 129)]


def cases():
    for name, fields in FEATURES.items():
        for packed in (False, True):
            quick = name == "dropout, scan, logits in chunks" and packed
            yield pytest.param(fields, packed, marks=() if quick else pytest.mark.long, id=f"{name}, {packed}")


@pytest.mark.parametrize(("fields", "packed"), cases())
def test_one_hash_on_1_2_4_and_8_devices(fields, packed):
    hashes = {count: hash_of(trained(count, fields, PHASES, packed=packed)) for count in (1, 2, 4, 8)}
    assert len(set(hashes.values())) == 1, hashes
