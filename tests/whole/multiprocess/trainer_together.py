"""Run by every rank: trains in FOLDER/run with a batch that breaks it, patience, and a loss that rank 0 alone knows.

The parameters are cut over a mesh of two ranks with two devices each, and no rank has the whole of one.

The evaluation of step 20 lasts, on rank 0 alone, until the file FOLDER/go is there: meanwhile the other ranks run ahead
into the next collective. Each rank leaves in FOLDER/end-RANK.json how it ended.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.distributed import barrier, initialize, is_primary, process_index
from roxxel_dist.cluster.mesh import make_mesh
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

folder = Path(sys.argv[1])
initialize()
run = folder / "run"
data = Roxxel(folder / "corpus_*.rox")
curriculum = Curriculum(data, [Phase(200, 4, 17)])
poison = data.read(curriculum.plan(42).rows(6).offset, 17, np.int32)


def loss_fn(model, batch):
    return next_token_loss(model, batch) * jnp.where((batch == poison).all(), jnp.nan, 1.0)


def evaluate(state):
    """Rank 0 alone knows a loss, and it never falls after step 20."""
    if not is_primary():
        return None
    step, end = int(state.step), time.monotonic() + 100
    while step == 20 and not (folder / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return {"val_loss": 100.0 - min(step, 20)}


trainer = Trainer(
    lambda: Transformer(ModelConfig(dim=144, num_blocks=1, vocab_size=500, max_context=32), nnx.Rngs(0)),
    optax.adam(1e-3), curriculum, loss_fn, run, eval_fn=evaluate, log_every=1, eval_every=10, checkpoint_every=5,
    patience=3, on_bad_step="rewind", fsdp=True, mesh=make_mesh(fsdp=2, tensor=2), val_fraction=0.0,
)  # fmt: skip
trainer.run()
trainer.close()
params = trainer.state.params
cut = [name for name, leaf in params.items() if not leaf.is_fully_replicated]
whole = multihost_utils.process_allgather(params, tiled=True)
digests = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in whole.items()}
end = [trainer.step, trainer.store.steps(), trainer.store.best_step(), len(trainer.plan.amendments), cut, digests]
(folder / f"end-{process_index()}.json").write_text(json.dumps(end))
barrier("end", limit_s=60)
data.close()
