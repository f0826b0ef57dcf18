"""Run by every rank: `memory_hosts.py FOLDER STEP` trains in FOLDER/run, parameters cut over all ranks, with copies in
memory at every second step. After step STEP, if it comes to it, rank 1 ends itself by kill -9."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

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

if os.environ["ROXXEL_PROCESS_ID"] == "1":  # its clock is a day ahead
    here = time.time
    time.time = lambda: here() + 86_400
folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
initialize()
data = Roxxel(folder / "corpus_*.rox")
trainer = Trainer(
    lambda: Transformer(ModelConfig(dim=144, num_blocks=1, vocab_size=500, max_context=32), nnx.Rngs(0)),
    optax.adam(1e-3), Curriculum(data, [Phase(24, 4, 17)]), next_token_loss, folder / "run", log_every=1,
    eval_every=100, checkpoint_every=100, fsdp=True, mesh=make_mesh(fsdp=0), val_fraction=0.0,
    memory_checkpoint_every=2,
)  # fmt: skip
trainer.open()
progress = trainer.loop.held.progress
enter = progress.enter


def entered(step, phase):
    """A machine that is switched off: nothing of it is left."""
    if kill_at and step == kill_at + 1 and process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    enter(step, phase)


progress.enter = entered
trainer.run()
trainer.close()
whole = multihost_utils.process_allgather(trainer.state.params, tiled=True)
if is_primary():
    digests = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in whole.items()}
    (folder / "end.json").write_text(json.dumps(digests))
barrier("end", limit_s=60)
data.close()
