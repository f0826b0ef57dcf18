"""Training of a small model with rows that virtual shards cut, on any number of simulated devices.

As a program it is that in a process of its own, whose XLA has the flags of a user's process:

    python exact_rows.py '[{"fields": {...}, "packed": true, "dtype": "bfloat16", "shapes": [[1, 65]]}]' 1 2 8

prints, for each of these cases, the hash of losses and weights on each number of devices, as JSON.
"""

import hashlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from roxxel_dist.cluster.mesh import fit_sharding, make_mesh
from roxxel_dist.data.packing import Packed
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import TransformerBuilder
from roxxel_dist.train.step.compile import AotCompiler
from roxxel_dist.train.step.optimizer import NamedOptimizer, OptimizerConfig
from roxxel_dist.train.step.step import EMA, SPIKE_FACTOR
from roxxel_dist.train.steps import StepOptions, make_steps

SHARDS, VOCABULARY = 8, 96
SMALL = {"dim": 32, "num_blocks": 2, "vocab_size": VOCABULARY, "max_context": 512, "head_size": 16, "kv_heads": 1}


def batch_of(seed, shape, packed, sharding):
    """Random tokens, with `packed` of several documents a row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, shape).astype(np.int32)
    if not packed:
        return jax.device_put(tokens, sharding)
    segments = np.sort(rng.integers(0, 3, shape), 1).astype(np.int32)
    starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) != 0, np.arange(shape[1]), 0), 1)
    return Packed(*jax.device_put((tokens, segments, (np.arange(shape[1]) - starts).astype(np.int32)), sharding))


def trained(
    devices, fields, shapes, *, shards=SHARDS, packed=False, loss=token_losses, dtype=None, steps=3, optimizer=None,
    validate=True, fsdp=0, average=False, skip_bad=False, grad_accum=1, model=None,
):  # fmt: skip
    """(losses and gradient norms of each step, the parameters after them, a validation's losses) of some phases.

    0 `shards` are ordinary steps; `fsdp` devices share a copy of the state, 0 for none. A `model` begins as it is, in
    place of one that is made of `fields`.
    """
    mesh, optimizer = (
        make_mesh(devices, fsdp=fsdp or 1),
        optimizer or NamedOptimizer(OptimizerConfig(lr=1e-2, warmup_steps=0)),
    )
    builder = model or TransformerBuilder(ModelConfig(**SMALL | fields), 0, 1)
    options = StepOptions(
        grad_accum=grad_accum, fsdp=bool(fsdp), compute_dtype=dtype, skip_bad=skip_bad,
        average=average, virtual_shards=shards,
    )  # fmt: skip
    numbers = {**optimizer.settings(100), SPIKE_FACTOR: 1.0001 if skip_bad else 0.0} | ({EMA: 0.9} if average else {})
    made = make_steps(builder, loss, optimizer, mesh, options, numbers)
    state, hparams = made.init()
    if fsdp:
        assert not all(leaf.is_fully_replicated for leaf in state.params.values())
    compiler, found, validation = AotCompiler(mesh), [], {}
    step, evaluate, sharding = made.train, made.evaluate() if shards else None, made.sharding
    for number, shape in enumerate(map(tuple, shapes)):
        place = fit_sharding(sharding, shape, grad_accum)
        like = getattr(state, "whole", state)
        compiler.prepare(("step", shape), step, like, hparams, batch_of(0, shape, packed, place))
        for each in range(steps):
            batch = batch_of(10 * number + each, shape, packed, place)
            state, metrics = compiler.get(("step", shape))(state, hparams, batch)
            scalars = {name: float(value) for name, value in sorted(metrics.scalars.items())}
            rows = None if metrics.row_loss is None else np.asarray(metrics.row_loss).tolist()
            found.append((scalars, rows))
    whole = getattr(state, "whole", state)
    if evaluate is not None and validate:
        compiler.prepare("evaluate", evaluate, whole.params, whole.rest, hparams, batch)
        losses = compiler.get("evaluate")(whole.params, whole.rest, hparams, batch)
        validation = {name: float(value) for name, value in sorted(losses.items())}
    compiler.close()
    counts = {name: np.asarray(whole.rest[name]) for name in whole.rest if name.endswith("count")}
    return found, {name: np.asarray(leaf) for name, leaf in whole.params.items()} | counts, validation


def hash_of(result):
    """Of what `trained` gives."""
    found, params, validation = result
    digest = hashlib.sha256(repr((found, validation)).encode())
    for name in sorted(params):
        digest.update(params[name].tobytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    assert "XLA_FLAGS" not in os.environ
    hashes = []
    for case in json.loads(sys.argv[1]):
        dtype = jnp.dtype(case.pop("dtype")) if "dtype" in case else None
        hashes.append({count: hash_of(trained(int(count), **case, dtype=dtype)) for count in sys.argv[2:]})
    print(json.dumps(hashes))
