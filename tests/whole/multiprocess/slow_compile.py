"""Run by every rank: three steps in FOLDER/run; rank 1 takes longer to trace the first step than Gloo would wait."""

import sys
import time
from pathlib import Path

import optax
from flax import nnx

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.cluster.distributed import barrier, initialize, process_index
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import next_token_loss
from roxxel_dist.model.transformer import Transformer

GLOO_S = 30.0
folder = Path(sys.argv[1])
initialize()


def loss_fn(model, batch):
    if process_index() == 1 and not (folder / "slept").exists():
        (folder / "slept").touch()
        time.sleep(2 * GLOO_S)
    return next_token_loss(model, batch)


with Roxxel(folder / "corpus_*.rox") as data:
    trainer = Trainer(
        lambda: Transformer(ModelConfig(dim=16, num_blocks=1, vocab_size=500, max_context=32), nnx.Rngs(0)),
        optax.adam(1e-3), Curriculum(data, [Phase(3, 4, 17)]), loss_fn, folder / "run", log_every=1,
        val_fraction=0.0,
    )  # fmt: skip
    trainer.run()
    trainer.close()
    barrier("end", limit_s=60)
