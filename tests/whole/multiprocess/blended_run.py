"""Run by the tests: `blended_run.py DATA RUN STEP` trains by one curriculum up to STEP, then by an amended one.

Started again it goes on where it was, as a person's script would. `make_corpora(DATA)` makes what it reads.

With MEMORY_EVERY it copies its state in memory at each so-many-th step; with DIE_IN_COPY it ends itself by kill -9 in
the middle of the so-many-th block that it copies.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from flax import nnx

from roxxel_dist import Curriculum, Phase, Roxxel, Trainer
from roxxel_dist.checkpoint.blocks import BlockFile
from roxxel_dist.model.config import ModelConfig
from roxxel_dist.model.loss import token_losses
from roxxel_dist.model.transformer import Transformer
from roxxel_dist.settings.training import OptimizerConfig
from roxxel_dist.train.step.optimizer import NamedOptimizer

VOCAB = 300
BLEND = {"weights": {"self": 0.7, "notes": 0.3}, "blend": "row"}
FIRST = [Phase(30, 8, 17), Phase(60, 8, 33, **BLEND), Phase(30, 4, 33)]
BOUNDARIES = (30, 80, 120)
"""Steps after which, with the amendment, another phase begins."""
AMENDED = [FIRST[0], Phase(50, 8, 33, **BLEND), Phase(40, 16, 17, **BLEND | {"weights": {"self": 0.4, "notes": 0.6}})]
AMENDED += [Phase(30, 4, 65)]
AMEND_AFTER = 55
"""In the middle of the blend."""
LAST = sum(phase.steps or 0 for phase in AMENDED)
SAVE_EVERY = 5


def make_corpora(folder: Path) -> None:
    """Two data sets of random documents."""
    rng = np.random.default_rng(8)
    for name, count in (("text", 250), ("notes", 200)):
        with Roxxel(folder / f"{name}_*.rox") as data:
            documents = (rng.integers(1, VOCAB, rng.integers(50, 500)).astype(np.uint16) for _ in range(count))
            data.write(documents, vocab_size=VOCAB, max_shard_bytes=40_000)


def model() -> Transformer:
    """The same weights each time."""
    shape = ModelConfig(dim=32, num_blocks=1, vocab_size=VOCAB, max_context=64, dropout_rate=0.1)
    return Transformer(shape, nnx.Rngs(params=0, dropout=1))


def train(data: Path, run: Path, phases: list[Phase], **options: object) -> None:
    """Continue from the newest checkpoint to the end of the phases, or to `max_steps`."""
    optimizer = NamedOptimizer(OptimizerConfig(lr=3e-3))
    with Roxxel(data / "text_*.rox") as text, Roxxel(data / "notes_*.rox") as notes:
        trainer = Trainer(
            model, optimizer, Curriculum(text, phases, {"notes": notes}), token_losses, run, log_every=1, eval_every=20,
            eval_iters=2, checkpoint_every=SAVE_EVERY, val_fraction=0.1,
            memory_checkpoint_every=int(os.environ.get("MEMORY_EVERY", "0")), **options,
        )  # fmt: skip
        try:
            trainer.run()
        finally:
            trainer.close()


def die_in_copy(blocks: int) -> None:
    """kill -9 when so many blocks were copied, and half of the next one."""
    write = BlockFile.write
    left = iter(range(blocks))

    def cut(file: BlockFile, place: int, array: np.ndarray) -> None:
        if next(left, None) is None:
            flat = array.reshape(-1)
            write(file, place, flat[: flat.size // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, place, array)

    BlockFile.write = cut


if __name__ == "__main__":
    if "DIE_IN_COPY" in os.environ:
        die_in_copy(int(os.environ["DIE_IN_COPY"]))
    data, run, until = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    saved = [int(step.name) for step in (run / "checkpoints").glob("*") if step.name.isdecimal()]
    if max(saved, default=0) <= until:  # a run that was amended is refused the curriculum of before
        train(data, run, FIRST, max_steps=until)
    train(data, run, AMENDED, amend=True)
