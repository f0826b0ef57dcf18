"""Run by every rank: four steps on parameters that are cut over all devices, made from a callable and from a module."""

import hashlib

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from roxxel_dist.cluster.distributed import barrier, is_primary
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.layers import Dropout
from roxxel_dist.train.step.optimizer import as_optimizer
from roxxel_dist.train.steps import StepOptions, make_steps


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(params=0, dropout=1)
        self.embedding = nnx.Embed(512, 128, rngs=rngs)
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.dropout = Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embedding.attend(self.dropout(self.norm(self.embedding(tokens))))


def loss_fn(model: Net, batch: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


mesh, optimizer = make_mesh(), optax.adamw(1e-2)
batch = np.random.default_rng(0).integers(0, 512, (8, 33)).astype(np.int32)
by_rows = NamedSharding(mesh, P("data"))
rows = jax.make_array_from_callback(batch.shape, by_rows, lambda index: batch[index])
for how, model in (("callable", Net), ("module", nnx.jit(Net)())):
    numbers = {"spike_factor": 0.0}
    steps = make_steps(model, loss_fn, as_optimizer(optimizer), by_rows, StepOptions(fsdp=True), numbers)
    state, settings = steps.init()
    cut = [name for name, leaf in state.params.items() if not leaf.is_fully_replicated]
    step = steps.train.lower(state, settings, rows).compile()
    losses = []
    for _ in range(4):
        state, metrics = step(state, settings, rows)
        losses.append(float(metrics.scalars["loss"]))
    whole = multihost_utils.process_allgather(state.params, tiled=True)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in whole.values())).hexdigest()
    if is_primary():
        print(f"trained {how}: {cut} {losses} {digest}", flush=True)
barrier("end", limit_s=60)
